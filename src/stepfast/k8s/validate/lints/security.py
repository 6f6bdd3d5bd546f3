"""What a pod may do: nothing that Pod Security's level `restricted` refuses, and no API access.

Owns: rules `pod-security` and `access`. Does not own: what the program does inside.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.k8s.environment import is_secret
from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import Workload, environment

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_ROLES = ("Role", "ClusterRole")
_NODE_DELETERS = {"delete", "deletecollection"}


def pod_security(scene: Scene) -> Iterator[Hit]:
    """The pod is admitted in a namespace that enforces `restricted`."""
    for workload in scene.workloads:
        spec = workload.spec
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.at(name).value is True:
                reason = f"{name} shares the node's own; `baseline` refuses it"
                yield Hit(spec.at(name), reason, "remove it")
        for volume in spec.at("volumes").items:
            yield from _volume(volume)
        for container in workload.all_containers:
            yield from _container(container, spec.at("securityContext"))


def _volume(volume: Node) -> Iterator[Hit]:
    for kind, place in volume.fields:
        if kind == "hostPath":
            reason = "a directory of the node: uncounted, shared by jobs, left behind"
            yield Hit(place, reason, "use an emptyDir, or a claim")
        elif kind not in _VOLUMES and kind != "name":
            yield Hit(place, f"`restricted` refuses volumes of kind {kind}", "use a claim")


def _container(container: Node, pod_context: Node) -> Iterator[Hit]:
    context = container.at("securityContext")
    if context.at("privileged").value is True:
        reason = "a privileged container owns its node; GPUs and EFA do not need that"
        yield Hit(context.at("privileged"), reason, "remove it")
    if context.at("allowPrivilegeEscalation").value is not False:
        place = context.at("allowPrivilegeEscalation")
        yield Hit(place, "a program could gain rights that it was not given", "set it to false")
    capabilities = context.at("capabilities")
    if "ALL" not in [item.text for item in capabilities.at("drop").items]:
        yield Hit(capabilities.at("drop"), "root's capabilities are kept", "set drop: [ALL]")
    for item in capabilities.at("add").items:
        if item.text != "NET_BIND_SERVICE":
            reason = f"`restricted` refuses {item.text}; EFA and NCCL run without it"
            yield Hit(item, reason, "remove it")
    for port in container.at("ports").items:
        if port.at("hostPort").number:
            yield Hit(port.at("hostPort"), "a port of the node, one pod's only", "remove it")
    both = (context, pod_context)
    non_root = [c.at("runAsNonRoot").value for c in both if c.at("runAsNonRoot").exists]
    if not non_root or non_root[0] is not True:
        yield Hit(context.at("runAsNonRoot"), "it may run as root", "set runAsNonRoot: true")
    for each in both:
        if each.at("runAsUser").number == 0:
            yield Hit(each.at("runAsUser"), "user 0 is root", "use another user")
    profile = [c.at("seccompProfile", "type").text for c in both]
    if next((text for text in profile if text), "") not in ("RuntimeDefault", "Localhost"):
        place = context.at("seccompProfile")
        yield Hit(place, "every system call is allowed", "set seccompProfile.type: RuntimeDefault")


def access(scene: Scene) -> Iterator[Hit]:
    """No part can do to the API what it does not need to, and no secret stands in a file."""
    for workload in scene.training:
        yield from _account(workload)
    for document in scene.training_documents:
        yield from _one_account_for_each_role(scene.parts(document))
    for workload in scene.workloads:
        for container in workload.all_containers:
            for entry in environment(container):
                yield from _literal(entry)
    for document in scene.of_kind("Secret"):
        for name in ("data", "stringData"):
            for _, value in document.root.at(name).fields:
                reason = "a secret in a file is in every copy of it"
                yield Hit(value, reason, "create it beside the files, or by an external store")
    for document in scene.of_kind(*_ROLES):
        for rule in document.root.at("rules").items:
            yield from _grant(rule)


def _account(workload: Workload) -> Iterator[Hit]:
    account = workload.spec.at("serviceAccountName")
    if account.text in ("", "default"):
        reason = "the namespace's default account: what others need, this pod can do too"
        yield Hit(account, reason, "give each role a ServiceAccount of its own")
    mounted = workload.spec.at("automountServiceAccountToken")
    if mounted.value is not False:
        reason = "a token of the API lies in every pod, and no part of a training job needs it"
        yield Hit(mounted, reason, "set automountServiceAccountToken: false")


def _one_account_for_each_role(workloads: list[Workload]) -> Iterator[Hit]:
    seen: dict[str, Workload] = {}
    for workload in (w for w in workloads if w.is_training):
        account = workload.spec.at("serviceAccountName")
        other = seen.setdefault(account.text, workload)
        if account.text not in ("", "default") and other.role is not workload.role:
            reason = f"the {other.role.value} uses the same account"
            yield Hit(account, reason, "give each role a ServiceAccount of its own")


def _literal(entry: Node) -> Iterator[Hit]:
    name, value = entry.at("name").text, entry.at("value")
    if not value.text or value.text.startswith("$("):
        return
    if is_secret(name, value.text):
        reason = f"{name} is a secret that everybody can read who can read the manifest"
        yield Hit(value, reason, "use valueFrom.secretKeyRef, or a mounted Secret")


def _grant(rule: Node) -> Iterator[Hit]:
    for name in ("apiGroups", "resources", "verbs"):
        for item in rule.at(name).items:
            if item.text == "*":
                yield Hit(item, f"all {name}, those of tomorrow too", "name what is needed")
    resources = {item.text for item in rule.at("resources").items}
    verbs = {item.text for item in rule.at("verbs").items}
    if "secrets" in resources:
        yield Hit(rule.at("resources"), "all secrets can be read", "mount the one that is needed")
    if "nodes" in resources and verbs & _NODE_DELETERS:
        yield Hit(rule.at("verbs"), "nodes can be deleted", "keep that in a role of its own")
