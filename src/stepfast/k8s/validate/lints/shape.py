"""The job's shape: one pod for each node, and the node's devices all in it.

Owns: rules `shape`, `devices` and `hugepages`. Does not own: memory and CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.k8s.instances import CLAIMED_TYPES, INSTANCE_TYPES
from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.quantities import plain, quantity
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import (
    EFA,
    GPU,
    RUNTIMES,
    Workload,
    environment_value,
    requested,
)

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
HUGEPAGES = "hugepages-2Mi"


def shape(scene: Scene) -> Iterator[Hit]:
    """Indexed, as many at once as there are, in one Job, a whole node each."""
    for workload in scene.training:
        if workload.job.exists and workload.document.kind not in RUNTIMES:
            yield from _counts(workload)
        if workload.operator in ("jobset", "trainer") and workload.is_worker:
            yield from _replicas(workload)
        if workload.is_worker:
            yield from _whole_node(workload)


def _counts(workload: Workload) -> Iterator[Hit]:
    mode = workload.job.at("completionMode")
    if mode.text != "Indexed" and (mode.exists or workload.operator == ""):
        reason = "pods without an index have no stable name and no rank"
        yield Hit(mode, reason, "set completionMode: Indexed")
    completions, parallelism = workload.job.at("completions"), workload.job.at("parallelism")
    if completions.number is None:
        yield Hit(completions, "the number of nodes is not said", "set completions to it")
    elif parallelism.number != completions.number:
        reason = f"{completions.number} nodes, but not all of them run at once"
        yield Hit(parallelism, reason, f"set parallelism: {completions.number}")


def _replicas(workload: Workload) -> Iterator[Hit]:
    replicas = workload.replica.at("replicas")
    exclusive = EXCLUSIVE in {
        *workload.document.root.at("metadata", "annotations").texts,
        *workload.replica.at("template", "metadata", "annotations").texts,
    }
    if (replicas.number or 1) != 1 and not exclusive:
        reason = "several Jobs of one role: the completion index is no node index any more"
        yield Hit(replicas, reason, "set replicas: 1, and completions to the number of nodes")


def _whole_node(workload: Workload) -> Iterator[Hit]:
    gpus = workload.asked(GPU)
    for instance in workload.instances[:1]:
        if 0 < gpus < instance.gpus:
            reason = f"{plain(gpus)} of the node's {instance.gpus} GPUs: others share the node"
            yield Hit(_first_device(workload), reason, f"ask for all {instance.gpus}")


def devices(scene: Scene) -> Iterator[Hit]:
    """GPUs and EFA devices are those that the instance type has."""
    for workload in scene.training:
        for container in workload.all_containers:
            for resource in (GPU, EFA):
                yield from _equal_limit(container, resource)
        if workload.is_coordinator and workload.has_devices:
            reason = "the coordinator has no use for a GPU or an EFA device"
            yield Hit(_first_device(workload), reason, "remove them, and keep it off GPU nodes")
        if workload.is_worker:
            yield from _against_table(workload)


def _equal_limit(container: Node, resource: str) -> Iterator[Hit]:
    resources = container.at("resources")
    request = resources.at("requests", resource)
    limit = resources.at("limits", resource)
    if request.exists and quantity(request.value) != quantity(limit.value):
        reason = f"{resource} cannot be shared: its request and its limit have to be equal"
        yield Hit(request, reason, "give both the same number")


def _first_device(workload: Workload) -> Node:
    for container in workload.all_containers:
        for part in ("limits", "requests"):
            for resource in (GPU, EFA):
                place = container.at("resources", part, resource)
                if place.exists:
                    return place
    return workload.spec.at("containers")


def _against_table(workload: Workload) -> Iterator[Hit]:
    named = workload.instance_names
    if workload.has_devices and not named:
        reason = "devices are asked for, but no instance type: nothing says that the counts fit"
        yield Hit(
            workload.spec.at("nodeSelector"),
            reason,
            "select node.kubernetes.io/instance-type: p5.48xlarge or the like",
        )
    for place in named:
        name = place.text.removeprefix("ml.")
        if name.startswith(CLAIMED_TYPES):
            reason = f"{name} gives its GPUs by resource claims and compute domains (DRA)"
            yield Hit(place, reason, "this shape of manifest cannot run there; use another type")
        elif name not in INSTANCE_TYPES:
            if workload.has_devices:
                reason = f"{name} is not in the table of accelerated instance types"
                yield Hit(place, reason, f"use one of {', '.join(INSTANCE_TYPES)}")
        else:
            instance = INSTANCE_TYPES[name]
            for resource, count in ((GPU, instance.gpus), (EFA, instance.efas)):
                asked = workload.asked(resource)
                if asked != count and (resource == EFA or asked > count or not asked):
                    reason = f"{name} has {count} {resource}, the pod asks for {plain(asked)}"
                    yield Hit(_first_device(workload), reason, f"ask for {count}")


def hugepages(scene: Scene) -> Iterator[Hit]:
    """Huge pages are asked for where EFA uses them, and nowhere else."""
    for workload in scene.training:
        for container in workload.all_containers:
            yield from _hugepages_of(container, workload)


def _hugepages_of(container: Node, workload: Workload) -> Iterator[Hit]:
    resources = container.at("resources")
    request, limit = resources.at("requests", HUGEPAGES), resources.at("limits", HUGEPAGES)
    switch = environment_value(container, "FI_EFA_USE_HUGE_PAGE")
    is_used = requested(container, EFA) > 0 and (switch is None or str(switch.value) != "0")
    amount = requested(container, HUGEPAGES)
    if is_used and not amount:
        reason = "EFA takes huge pages, and the pod asks for none: it fails, or forks with ENOMEM"
        fix = 'set FI_EFA_USE_HUGE_PAGE: "0"; or ask for hugepages-2Mi: 5120Mi'
        yield Hit(resources, reason, fix)
    if amount and not is_used:
        who = "the coordinator has no EFA" if workload.is_coordinator else "EFA uses none here"
        place = request if request.exists else limit
        yield Hit(place, f"huge pages are asked for, but {who}", "remove hugepages-2Mi")
    if request.exists and quantity(request.value) != quantity(limit.value):
        yield Hit(request, "huge pages cannot be overcommitted", "set request = limit")
