"""What a node's GPUs say of themselves, judged: whether they may train.

Owns: the rules. Does not own: asking the driver (`health.nvml`).
Invariant: what could not be asked is unknown, and never part of what is well.

Where the rules come from: NVIDIA's recovery action is followed, whatever it is; a row that waits to
be remapped waits for a reset, and before a job is the time for it; uncorrected errors since the
last reset are in memory that is still in use. Links have no count that is right for every machine,
so GPUs of one node are held against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from stepfast.core.quantities import counted
from stepfast.health.verdicts import Finding, Verdict, healthy, unhealthy, unknown

T = TypeVar("T")
_ACTIONS = {
    0: "none",
    1: "GPU reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
_RESET = "reset the GPU (nvidia-smi --gpu-reset), or replace the node"
_REPLACE = "replace the node"
FABRIC_ABSENT, FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED = range(4)


class Unread(msgspec.Struct, frozen=True):
    """There is no answer: the driver or the GPU does not have it, or may not give it."""

    reason: str


class Broken(msgspec.Struct, frozen=True):
    """There is no answer because the GPU is in trouble."""

    reason: str


class Remapped(NamedTuple):
    """Rows of memory that were replaced, wait for a reset, or could not be."""

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


class Links(NamedTuple):
    """NVLink: how many are up, of how many."""

    active: int
    total: int


class Fabric(NamedTuple):
    """The registration of a GPU with the switches: its state, and the status it ended with."""

    state: int
    status: int


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's answers."""

    index: int
    name: str  # its UUID, where it said it
    recovery: int | Unread | Broken
    remapped: Remapped | Unread | Broken
    is_ecc_on: bool | Unread | Broken
    uncorrected: int | Unread | Broken  # since the last reset
    is_sram_worn: bool | Unread | Broken
    links: Links | Unread | Broken
    fabric: Fabric | Unread | Broken


class Said(NamedTuple):
    """About one GPU, before it is put together with what is said about the others."""

    verdict: Verdict
    evidence: str
    change: str = ""


def gpu_count(found: int, device_files: int, expected: int) -> Finding:
    """`device_files`: of /dev, where every GPU has one as long as its driver holds it."""
    check, evidence = "gpu count", counted(found, "GPU")
    if found < expected:
        return unhealthy(check, f"{evidence}, {expected} expected", _REPLACE)
    if not expected and found < device_files:
        # One that was lost, or one that this container may not use.
        change = "say how many there are: --health-gpus"
        return unknown(check, f"{evidence}, {device_files} in /dev", change)
    return healthy(check, evidence)


def judged(gpus: Sequence[Gpu]) -> list[Finding]:
    """One finding for each check, over all GPUs."""
    if not gpus:
        return []
    most = max((g.links.active for g in gpus if isinstance(g.links, Links)), default=0)
    checks: tuple[tuple[str, Callable[[Gpu], Said]], ...] = (
        ("gpu recovery action", lambda g: _of(g.recovery, _recovery)),
        ("gpu remapped rows", lambda g: _of(g.remapped, _remapped)),
        ("gpu ecc", _ecc),
        ("gpu sram", lambda g: _of(g.is_sram_worn, _sram)),
        ("gpu nvlink", lambda g: _of(g.links, lambda links: _links(links, most, len(gpus)))),
        ("gpu fabric", lambda g: _of(g.fabric, _fabric)),
    )
    return [_together(check, [(gpu, say(gpu)) for gpu in gpus]) for check, say in checks]


def _together(check: str, said: Sequence[tuple[Gpu, Said]]) -> Finding:
    """The worst verdict, with those that say it; where all are well, what they say."""
    by = {v: [(g, s) for g, s in said if s.verdict is v] for v in Verdict}
    for verdict, make in ((Verdict.UNHEALTHY, unhealthy), (Verdict.UNKNOWN, unknown)):
        if told := by[verdict]:
            texts = {s.evidence for _, s in told}
            if len(texts) == 1 and len(told) == len(said) > 1:
                return make(check, f"all GPUs: {texts.pop()}", told[0][1].change)
            evidence = "; ".join(f"GPU {g.index} ({g.name}): {s.evidence}" for g, s in told)
            return make(check, evidence, told[0][1].change)
    return healthy(check, "; ".join(sorted({s.evidence for _, s in said})))


def _of(value: T | Unread | Broken, judge: Callable[[T], Said]) -> Said:
    if isinstance(value, Broken):
        return Said(Verdict.UNHEALTHY, value.reason, _RESET)
    if isinstance(value, Unread):
        return Said(Verdict.UNKNOWN, value.reason)
    return judge(value)


def _recovery(action: int) -> Said:
    words = _ACTIONS.get(action, f"action {action}")
    if action == 0:
        return Said(Verdict.HEALTHY, words)
    return Said(Verdict.UNHEALTHY, f"the driver asks for: {words}", f"{words}, as it says")


def _remapped(rows: Remapped) -> Said:
    evidence = f"{rows.corrected} corrected and {rows.uncorrected} uncorrected rows remapped"
    if rows.failed:
        return Said(Verdict.UNHEALTHY, f"{evidence}, and one could not be", _REPLACE)
    if rows.pending:
        return Said(Verdict.UNHEALTHY, f"{evidence}, and one waits for a reset", _RESET)
    return Said(Verdict.HEALTHY, evidence)


def _ecc(gpu: Gpu) -> Said:
    def of_count(count: int) -> Said:
        if count > 0:
            evidence = f"{counted(count, 'uncorrected error')} since the last reset"
            return Said(Verdict.UNHEALTHY, evidence, _RESET)
        return Said(Verdict.HEALTHY, "on, no uncorrected error since the last reset")

    if gpu.is_ecc_on is False:
        return Said(Verdict.UNKNOWN, "ECC is off: nobody would see an error of memory")
    if not isinstance(gpu.is_ecc_on, bool):
        return _of(gpu.is_ecc_on, lambda _: of_count(0))
    return _of(gpu.uncorrected, of_count)


def _sram(is_worn: bool) -> Said:
    if is_worn:
        return Said(
            Verdict.UNHEALTHY, "more uncorrected errors of SRAM than its maker allows", _REPLACE
        )
    return Said(Verdict.HEALTHY, "within its maker's threshold")


def _links(links: Links, most: int, gpus: int) -> Said:
    """One GPU alone, or all alike: nothing says how many there should be."""
    evidence = f"{links.active} of {counted(links.total, 'link')} up"
    if links.active < most:
        return Said(Verdict.UNHEALTHY, f"{evidence}, {most} on another GPU", _RESET)
    if links.active == links.total or (links.active and gpus > 1):
        return Said(Verdict.HEALTHY, evidence)
    return Said(Verdict.UNKNOWN, f"{evidence}; a machine without bridges looks the same")


def _fabric(fabric: Fabric) -> Said:
    if fabric.state == FABRIC_ABSENT:
        return Said(Verdict.HEALTHY, "none")
    if fabric.state == FABRIC_COMPLETED and fabric.status == 0:
        return Said(Verdict.HEALTHY, "registered")
    if fabric.state == FABRIC_COMPLETED:
        evidence = f"registration with the switches failed with status {fabric.status}"
        return Said(Verdict.UNHEALTHY, evidence, "look at Fabric Manager's log; " + _REPLACE)
    words = {FABRIC_NOT_STARTED: "has not begun", FABRIC_IN_PROGRESS: "is under way"}
    state = words.get(fabric.state, f"is in state {fabric.state}")
    return Said(Verdict.UNKNOWN, f"registration with the switches {state}")
