"""What runs and where its data is: images, what is fetched at the start, volumes that last.

Owns: rules `images` and `storage`. Does not own: volumes in memory (`memory`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import (
    Workload,
    commands,
    environment,
    environment_value,
    requested,
)

_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}\Z")
_FETCHES = (
    (re.compile(r"\bpip3?\s+install|\buv\s+(?:pip|sync|run)\b|\bconda\s+install"), "packages"),
    (re.compile(r"\bgit\s+(?:clone|pull|fetch)\b"), "a repository"),
    (re.compile(r"\b(?:curl|wget)\s"), "a file"),
    (re.compile(r"\bapt(?:-get)?\s+(?:-\S+\s+)*(?:install|update)\b"), "packages"),
    (re.compile(r"\bhuggingface-cli\s+download|\bhf\s+download|snapshot_download"), "a model"),
    (re.compile(r"\baws\s+s3\s+(?:cp|sync)\b"), "files"),
)
_FETCHING_PROGRAMS = {"pip", "pip3", "git", "curl", "wget", "huggingface-cli"}
_HUB = re.compile(r"^HF_(TOKEN|HOME|HUB_CACHE|DATASETS_CACHE)\Z|^HUGGING_?FACE|^TRANSFORMERS_CACHE")
_CHECKPOINT_FLAG = re.compile(
    r"--(?:checkpoints|checkpoint[-_]dir|checkpoint[-_]path|ckpt[-_]dir|save[-_]dir)(?:=(.*))?\Z"
)
_STORES = ("s3://", "gs://", "az://", "abfs://", "http://", "https://")
LUSTRE = "fsx.csi.aws.com"
MOUNTPOINT = "s3.csi.aws.com"


def images(scene: Scene) -> Iterator[Hit]:
    """The same bytes run at every restart, and nothing is fetched on the way to it."""
    for workload in scene.workloads:
        for container in workload.all_containers:
            yield from _image(container)
            if workload.is_training:
                yield from _fetches(container)
                yield from _offline(container)
    for document in scene.training_documents:
        yield from _one_digest(scene.parts(document))


def _image(container: Node) -> Iterator[Hit]:
    image, policy = container.at("image"), container.at("imagePullPolicy")
    if not _DIGEST.search(image.text):
        reason = "a tag may mean another image after a restart, and on each node"
        yield Hit(image, reason, "name it by digest: IMAGE@sha256:...")
    if policy.text == "Always" or (not policy.exists and image.text.endswith(":latest")):
        reason = "every restart asks the registry, and fails where it does not answer"
        yield Hit(policy, reason, "set imagePullPolicy: IfNotPresent")


def _fetches(container: Node) -> Iterator[Hit]:
    words = commands(container)
    for index, word in enumerate(words):
        what = next((what for pattern, what in _FETCHES if pattern.search(word.text)), "")
        if not what and index == 0 and word.text.rpartition("/")[2] in _FETCHING_PROGRAMS:
            what = "something"
        if what:
            reason = f"every start fetches {what}, on the way to a recovery"
            yield Hit(word, reason, "put it into the image, or on a volume, before")


def _offline(container: Node) -> Iterator[Hit]:
    uses_hub = [e for e in environment(container) if _HUB.search(e.at("name").text)]
    switch = environment_value(container, "HF_HUB_OFFLINE")
    if uses_hub and (switch is None or str(switch.value) not in ("1", "true", "True")):
        reason = "the Hugging Face Hub is asked at every restart"
        yield Hit(uses_hub[0], reason, 'set HF_HUB_OFFLINE: "1"')


def _one_digest(parts: list[Workload]) -> Iterator[Hit]:
    ours: dict[str, Node] = {}
    for workload in (w for w in parts if w.is_training):
        for container in workload.containers:
            if _runs_stepfast(container):
                digest = container.at("image").text.partition("@")[2]
                ours.setdefault(digest, container.at("image"))
    for place in list(ours.values())[1:]:
        reason = "agent and coordinator come from different images: their protocols may differ"
        yield Hit(place, reason, "use one digest for both")


def _runs_stepfast(container: Node) -> bool:
    return any(word.text.rpartition("/")[2] == "stepfast" for word in commands(container))


def storage(scene: Scene) -> Iterator[Hit]:
    """What has to last is on a volume that lasts, apart from other runs."""
    for workload in scene.training:
        for container in workload.all_containers:
            yield from _target(workload, container)
            yield from _mounts(scene, workload, container)
            yield from _spill(workload, container)
    for document in scene.of_kind("PersistentVolume"):
        yield from _static_volume(document)


def _volume_under(workload: Workload, container: Node, path: str) -> Node | None:
    best, length = None, -1
    for mount in container.at("volumeMounts").items:
        base = mount.at("mountPath").text.rstrip("/")
        if (path == base or path.startswith(base + "/")) and len(base) > length:
            for volume in workload.spec.at("volumes").items:
                if volume.at("name").text == mount.at("name").text:
                    best, length = volume, len(base)
    return best


def _targets(container: Node) -> Iterator[Node]:
    words = commands(container)
    for index, word in enumerate(words):
        match = _CHECKPOINT_FLAG.match(word.text)
        if match is not None and match[1] is not None:
            yield Node(word.document, word.path, match[1])
        elif match is not None and index + 1 < len(words):
            yield words[index + 1]
    value = environment_value(container, "STEPFAST_CHECKPOINTS")
    if value is not None and value.text:
        yield value


def _target(workload: Workload, container: Node) -> Iterator[Hit]:
    for target in _targets(container):
        if target.text.startswith((*_STORES, "$(")) or target.text == "off":
            continue
        path = target.text.removeprefix("file://")
        volume = _volume_under(workload, container, path) if path.startswith("/") else None
        if volume is None:
            reason = f"checkpoints go to {path}, in the container: they go with it"
            yield Hit(target, reason, "use s3://..., or a mounted claim")
        elif volume.at("emptyDir").exists:
            reason = f"checkpoints go to {path}, an emptyDir: they go with the pod"
            yield Hit(target, reason, "use s3://..., or a mounted claim")


def _mounts(scene: Scene, workload: Workload, container: Node) -> Iterator[Hit]:
    volumes = {v.at("name").text: v for v in workload.spec.at("volumes").items}
    for mount in container.at("volumeMounts").items:
        volume = volumes.get(mount.at("name").text)
        claim = Node(workload.document, (), None) if volume is None else volume
        claim_name = claim.at("persistentVolumeClaim", "claimName").text
        if not claim_name:
            continue
        is_read = (
            mount.at("readOnly").value is True
            or claim.at("persistentVolumeClaim", "readOnly").value is True
        )
        told = mount.at("subPath").text or mount.at("subPathExpr").text
        if not is_read and not told:
            reason = "runs that share the claim write into the same directory"
            yield Hit(mount, reason, "set subPath to the run's name, or readOnly: true")
        for document in scene.beside(workload.document, "PersistentVolumeClaim"):
            if document.name == claim_name:
                modes = document.root.at("spec", "accessModes")
                several = (workload.job.at("completions").number or 2) > 1
                shared = {"ReadWriteMany", "ReadOnlyMany"}
                if several and not shared & {m.text for m in modes.items}:
                    reason = "one node at a time can mount it, and every node of the job does"
                    yield Hit(modes, reason, "use ReadWriteMany")


def _spill(workload: Workload, container: Node) -> Iterator[Hit]:
    volumes = {v.at("name").text: v for v in workload.spec.at("volumes").items}
    for mount in container.at("volumeMounts").items:
        volume = volumes.get(mount.at("name").text)
        if volume is None or not volume.at("emptyDir").exists:
            continue
        on_disk = volume.at("emptyDir", "medium").text != "Memory"
        if on_disk and not requested(container, "ephemeral-storage"):
            place = container.at("resources", "requests", "ephemeral-storage")
            reason = f"{mount.at('name').text} is on the node's disk, and the pod asks for none"
            yield Hit(place, reason, "ask for ephemeral-storage, request = limit")
            return


def _static_volume(document: Document) -> Iterator[Hit]:
    spec = document.root.at("spec")
    driver = spec.at("csi", "driver").text
    if not driver:
        return
    options = [item.text for item in spec.at("mountOptions").items]
    if driver == LUSTRE and "flock" not in options:
        reason = "without flock, file locks on Lustre fail or are the node's own only"
        yield Hit(spec.at("mountOptions"), reason, "add flock to mountOptions")
    if not spec.at("claimRef").exists:
        reason = "any claim of this size and class may take the volume"
        yield Hit(spec.at("claimRef"), reason, "name the claim that it is for")
    is_read = bool({"read-only", "ro"} & set(options)) or [
        mode.text for mode in spec.at("accessModes").items
    ] == ["ReadOnlyMany"]
    if driver == MOUNTPOINT and not is_read:
        reason = "Mountpoint for S3 has no rename, append or lock: data may be read, only"
        yield Hit(spec.at("mountOptions"), reason, "mount it read-only; write by s3://")
