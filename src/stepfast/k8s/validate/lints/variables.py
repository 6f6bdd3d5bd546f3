"""Environment variables: those that harm, those that are reserved, those that stand twice.

Owns: rule `environment`. Does not own: which do harm (`k8s.environment`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.k8s.environment import NVLS, harm_of
from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import RUNTIMES, Workload, commands, environment

_INJECTED = re.compile(r"(PET_\w+|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|NNODES|NODE_RANK)\Z")
_EXPORT = re.compile(r"\bexport\s+([A-Z][A-Z0-9_]+)=(\S*)")


def variables(scene: Scene) -> Iterator[Hit]:
    """No variable is set that the platform sets better, or that the operator sets."""
    for workload in scene.workloads:
        for container in workload.all_containers:
            yield from _twice(container)
            if not (workload.is_training or workload.has_devices):
                continue
            for entry in environment(container):
                name, value = entry.at("name"), entry.at("value")
                yield from _denied(scene, name, name.text, value.text)
                yield from _reserved(workload, container, name)
            for word in commands(container):
                for name_text, value_text in _EXPORT.findall(word.text):
                    yield from _denied(scene, word, name_text, value_text)
    for document in scene.of_kind("TrainJob"):
        for entry in document.root.at("spec", "trainer", "env").items:
            name = entry.at("name")
            if _INJECTED.match(name.text):
                yield Hit(name, "Kubeflow Trainer sets it itself, and refuses it", "remove it")
            yield from _denied(scene, name, name.text, entry.at("value").text)


def _twice(container: Node) -> Iterator[Hit]:
    seen: set[str] = set()
    for entry in environment(container):
        name = entry.at("name")
        if name.text and name.text in seen:
            reason = f"{name.text} stands twice: the last one wins, or the apply conflicts"
            yield Hit(name, reason, "keep one of them")
        seen.add(name.text)


def _denied(scene: Scene, place: Node, name: str, value: str) -> Iterator[Hit]:
    if harm := harm_of(name, value):
        fix = "use WARN; raise it for one run" if name == "NCCL_DEBUG" else "remove it"
        yield Hit(place, f"{name}: {harm}", fix)
    elif name == NVLS and value == "0" and not scene.target.allows_nvls_off:
        reason = "switching NVLS off costs bandwidth on NVSwitch nodes"
        fix = "remove it; where engine nvrx asks for it, validate with --allow-nvls-off"
        yield Hit(place, reason, fix)


def _reserved(workload: Workload, container: Node, name: Node) -> Iterator[Hit]:
    injects = workload.operator == "training-operator" or (
        workload.document.kind in RUNTIMES and container.at("name").text == "node"
    )
    if injects and _INJECTED.match(name.text):
        yield Hit(name, f"the operator sets {name.text} itself", "remove it")
