"""CPU, memory and what lives in it: the pod is never the first to be killed, and snapshots fit.

Owns: rules `quality-of-service` and `memory-volumes`. Does not own: how big a snapshot is.
A manifest declares it: annotations stepfast.dev/snapshot-bytes (all slots and replicas of one
node) and stepfast.dev/working-set-bytes (what the ranks need besides).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from stepfast.k8s.instances import ALLOCATABLE_SHARE
from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.quantities import gib, plain, quantity
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import (
    GPU,
    Workload,
    environment_value,
    flag_values,
    requested,
)

SNAPSHOT_BYTES = "stepfast.dev/snapshot-bytes"
WORKING_SET_BYTES = "stepfast.dev/working-set-bytes"
_SHM = "/dev/shm"  # a mount path in a pod


def quality_of_service(scene: Scene) -> Iterator[Hit]:
    """Guaranteed: CPU, memory and ephemeral storage are set, and request = limit."""
    for workload in scene.training:
        for container in workload.all_containers:
            yield from _guaranteed(container)
        yield from _fits_node(workload)


def _guaranteed(container: Node) -> Iterator[Hit]:
    resources = container.at("resources")
    for name in ("cpu", "memory", "ephemeral-storage"):
        request, limit = resources.at("requests", name), resources.at("limits", name)
        if quantity(limit.value) is None:
            reason = f"no limit of {name}: under pressure this pod goes before others"
            yield Hit(limit, reason, f"set {name} in requests and limits, to the same value")
        elif request.exists and quantity(request.value) != quantity(limit.value):
            reason = f"the request of {name} is not its limit: the pod is only Burstable"
            yield Hit(request, reason, f"set it to {limit.value}")


def _fits_node(workload: Workload) -> Iterator[Hit]:
    for instance in workload.instances[:1]:
        most = {
            "cpu": Fraction(instance.cpu_milli, 1000) * ALLOCATABLE_SHARE,
            "memory": Fraction(instance.memory_mib) * 2**20 * ALLOCATABLE_SHARE,
        }
        for name, limit in most.items():
            asked = workload.asked(name)
            if asked > limit:
                show = gib if name == "memory" else plain
                place = workload.spec.at("containers", 0, "resources", "requests", name)
                reason = f"{show(asked)} of {name}: more than 95 % of what the node can give"
                yield Hit(place, reason, f"ask for at most {show(limit)}")


def memory_volumes(scene: Scene) -> Iterator[Hit]:
    """What is kept in memory is bounded, counted in the pod's limit, and big enough."""
    for workload in scene.training:
        volumes = {v.at("name").text: v for v in workload.spec.at("volumes").items}
        for volume in volumes.values():
            yield from _bounded(volume)
        if workload.is_worker:
            yield from _shared_memory(workload, volumes)
            yield from _snapshots(scene, workload, volumes)
        yield from _counted(workload, list(volumes.values()))


def is_in_memory(volume: Node) -> bool:
    """A tmpfs that the pod is charged for."""
    return volume.at("emptyDir", "medium").text == "Memory"


def _bounded(volume: Node) -> Iterator[Hit]:
    size = volume.at("emptyDir", "sizeLimit")
    if is_in_memory(volume) and not quantity(size.value):
        reason = "a memory volume without a size can fill the node's memory"
        yield Hit(size, reason, "set sizeLimit")


def _mount_at(workload: Workload, path: str) -> Node | None:
    """The mount that a path lies on, of any container: the longest prefix wins."""
    best: Node | None = None
    length = 0
    for container in workload.containers:
        for mount in container.at("volumeMounts").items:
            base = mount.at("mountPath").text.rstrip("/")
            if base and (path == base or path.startswith(base + "/")) and len(base) > length:
                best, length = mount, len(base)
    return best


def _shared_memory(workload: Workload, volumes: dict[str, Node]) -> Iterator[Hit]:
    mount = _mount_at(workload, _SHM)
    if mount is None:
        if workload.asked(GPU) > 0:
            reason = "/dev/shm has 64 MiB unless a volume is mounted: loaders and NCCL need more"
            fix = "mount an emptyDir of medium Memory with a sizeLimit at /dev/shm"
            yield Hit(workload.spec.at("volumes"), reason, fix)
        return
    volume = volumes.get(mount.at("name").text)
    if volume is not None and not is_in_memory(volume):
        reason = "/dev/shm is no memory volume of this pod: unbounded, uncounted, or slow"
        yield Hit(volume, reason, "make it an emptyDir of medium Memory with a sizeLimit")


def memory_dir(scene: Scene, workload: Workload) -> Node | None:
    """Where its snapshots go: as the agent is told, else as the job's coordinator tells it."""
    for teller in (workload, *scene.coordinators):
        if teller.document.namespace != workload.document.namespace:
            continue
        for container in teller.containers:
            told = flag_values(container, "--memory-dir")
            value_of = environment_value(container, "STEPFAST_MEMORY_DIR")
            if told or value_of is not None:
                return told[0] if told else value_of
    return None


def _snapshots(scene: Scene, workload: Workload, volumes: dict[str, Node]) -> Iterator[Hit]:
    told = memory_dir(scene, workload)
    if told is None or not told.text:
        return
    if told.text == _SHM or told.text.startswith(_SHM + "/"):
        reason = "snapshots under /dev/shm share its room with loaders and NCCL"
        yield Hit(told, reason, "give them a volume and a path of their own")
        return
    mount = _mount_at(workload, told.text)
    if mount is None:
        reason = f"nothing is mounted at {told.text}: snapshots would go to the container's disk"
        yield Hit(told, reason, "mount an emptyDir of medium Memory there")
        return
    volume = volumes.get(mount.at("name").text)
    if volume is None:
        return
    if not is_in_memory(volume):
        reason = "snapshots are not kept in memory of this pod"
        yield Hit(volume, reason, "use an emptyDir of medium Memory with a sizeLimit")
    needed = quantity(workload.annotations.get(SNAPSHOT_BYTES, ""))
    size = volume.at("emptyDir", "sizeLimit")
    limit = quantity(size.value)
    if needed is not None and limit is not None and limit < needed:
        reason = f"{gib(limit)} are less than the {gib(needed)} of its slots and replicas"
        yield Hit(size, reason, f"set sizeLimit to {gib(needed)} or more")


def _counted(workload: Workload, volumes: list[Node]) -> Iterator[Hit]:
    kept = sum(
        (quantity(v.at("emptyDir", "sizeLimit").value) or Fraction(0))
        for v in volumes
        if is_in_memory(v)
    )
    working = quantity(workload.annotations.get(WORKING_SET_BYTES, "")) or Fraction(0)
    limits = sum((requested(c, "memory") for c in workload.containers), Fraction(0))
    if kept and limits and kept + working > limits:
        place = workload.spec.at("containers", 0, "resources", "limits", "memory")
        reason = (
            f"memory volumes take {gib(Fraction(kept))}, ranks {gib(working)}:"
            f" more than the limit of {gib(limits)}; filling them kills the pod"
        )
        yield Hit(place, reason, f"raise the limit to {gib(kept + working)} or shrink the volumes")
