"""Environment variables: those that harm, those that are reserved, those that stand twice.

Owns: rule `environment`. Does not own: variables of the program itself.
The list is AWS's own advice for current versions of the OFI plugin (doc/efa-env-var.md), and what
PyTorch renamed in 2.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import RUNTIMES, Workload, commands, environment

_PLUGIN = "the OFI plugin sets what fits the platform; a fixed value is wrong on the next"
_OBSOLETE = "obsolete with current EFA drivers and libfabric"
_RENAMED = "PyTorch calls it TORCH_{} since 2.2, and this name warns or does nothing"
DENIED = {
    "FI_EFA_USE_DEVICE_RDMA": _OBSOLETE,
    "FI_EFA_FORK_SAFE": _OBSOLETE,
    "FI_EFA_ENABLE_SHM_TRANSFER": _OBSOLETE,
    "FI_PROVIDER": "the plugin chooses it, and efa fails where there is no EFA",
    "NCCL_PROTO": "it was for plugins up to 1.5",
    "NCCL_ALGO": "NCCL's own choice depends on size and topology",
    "NCCL_BUFFSIZE": _PLUGIN,
    "NCCL_P2P_NET_CHUNKSIZE": _PLUGIN,
    "NCCL_NVLS_CHUNKSIZE": _PLUGIN,
    "NCCL_NVLSTREE_MAX_CHUNKSIZE": _PLUGIN,
    "NCCL_MIN_NCHANNELS": _PLUGIN,
    "NCCL_NSOCKS_PERTHREAD": "it is for TCP, and slows EFA's bootstrap",
    "NCCL_SOCKET_NTHREADS": "it is for TCP, and slows EFA's bootstrap",
    "NCCL_NET_GDR_LEVEL": _PLUGIN,
    "NCCL_ASYNC_ERROR_HANDLING": _RENAMED.format("NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_BLOCKING_WAIT": _RENAMED.format("NCCL_BLOCKING_WAIT"),
}
_NVLS = "NCCL_NVLS_ENABLE"
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
    if name in DENIED:
        yield Hit(place, f"{name}: {DENIED[name]}", "remove it")
    elif name.startswith("RDMAV_"):
        yield Hit(place, f"{name}: AWS says not to use it with EFA", "remove it")
    elif name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        reason = f"NCCL_DEBUG={value} writes lines for every group of every generation"
        yield Hit(place, reason, "use WARN; raise it for one run")
    elif name == _NVLS and value == "0" and not scene.target.allows_nvls_off:
        reason = "switching NVLS off costs bandwidth on NVSwitch nodes"
        fix = "remove it; where engine nvrx asks for it, validate with --allow-nvls-off"
        yield Hit(place, reason, fix)


def _reserved(workload: Workload, container: Node, name: Node) -> Iterator[Hit]:
    injects = workload.operator == "training-operator" or (
        workload.document.kind in RUNTIMES and container.at("name").text == "node"
    )
    if injects and _INJECTED.match(name.text):
        yield Hit(name, f"the operator sets {name.text} itself", "remove it")
