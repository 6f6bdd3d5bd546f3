"""Whether the snapshot slots of all ranks fit into the memory directory, and whether it is memory.

Owns: what kind of file system it is, and the sum. Does not own: slots (`checkpoint`).
"""

from __future__ import annotations

import os
from pathlib import Path

from stepfast.core.quantities import counted, size_text
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_OTHER = "choose a tmpfs: --memory-dir /dev/shm, or in a pod an emptyDir of medium Memory"


def memory_directory(path: Path, kind: str | None) -> Finding:
    """Whether slots can be made in it, and memory is behind it."""
    check = "memory directory"
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        return unhealthy(check, f"{path} is no directory that can be written to", _OTHER)
    if kind is None:
        return unknown(check, f"{path}, on an unknown file system")
    if kind not in _IN_MEMORY:
        return unhealthy(check, f"{path} is on {kind}: every snapshot goes to a disk", _OTHER)
    return healthy(check, f"{path} is a {kind}")


def room(
    *, state_bytes: int, ranks: int, slots_per_rank: int, free_bytes: int, available_bytes: int
) -> Finding:
    """Whether all slots of a node fit. `state_bytes`: one rank's state; 0: not given.

    `available_bytes`: what the machine, or its container, has left of real memory.
    """
    check = "memory"
    least = min(free_bytes, available_bytes)
    there = (
        f"{size_text(free_bytes)} free in the directory, {size_text(available_bytes)} of the memory"
    )
    if not state_bytes:
        each = least // (ranks * slots_per_rank)
        evidence = f"{there}: with {counted(ranks, 'rank')} up to {size_text(each)} of state each"
        return unknown(check, evidence, "say how much a rank's state is: --state-bytes")
    needed = state_bytes * ranks * slots_per_rank
    evidence = (
        f"{counted(ranks, 'rank')} x {slots_per_rank} slots need {size_text(needed)}; {there}"
    )
    if needed <= least:
        return healthy(check, evidence)
    change = "enlarge the memory (docker --shm-size, emptyDir sizeLimit), or run fewer ranks"
    return unhealthy(check, evidence, change)


def file_system_of(path: Path, mountinfo: str) -> str | None:
    """The type of the file system that `path` is on. `mountinfo`: /proc/self/mountinfo."""
    target = os.path.realpath(path)
    best: tuple[int, str] | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        words, kinds = before.split(" "), after.split(" ")
        if len(words) < 5 or not kinds[0]:
            continue
        point = words[4].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= best[0]):
            best = (len(point), kinds[0])  # a later mount on the same place hides the earlier
    return None if best is None else best[1]


def available_bytes(meminfo: str, cgroup_max: str, cgroup_now: str) -> int:
    """What is left of real memory. The texts of /proc/meminfo, memory.max and memory.current."""
    lines = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    available = int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024
    if cgroup_max.strip().isdigit() and cgroup_now.strip().isdigit():
        return min(available, max(0, int(cgroup_max) - int(cgroup_now)))
    return available
