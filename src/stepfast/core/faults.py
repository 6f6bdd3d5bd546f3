"""What can go wrong, in one vocabulary for injection, detection and records, and which of several
is the cause.

Owns: the kinds, the typed fault, the order of causes, the verdict over a suspected hang.
Does not own: what to do about it (`core.policy`) or how it is observed (agent, rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from stepfast.core.quantities import counted, numbered
from stepfast.core.terms import Generation, NodeId, Rank, Step


class FaultKind(StrEnum):
    """One word per kind; the words of `--fault` are the same."""

    EXCEPTION = "exception"  # out of the user's function
    KILL = "kill"  # ended by SIGKILL
    SEGV = "segv"  # ended by SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL
    SIGNAL = "signal"  # ended by any other signal
    EXIT = "exit"  # the process ended by itself before the job did
    STOP = "stop"  # the process is stopped (SIGSTOP, a debugger)
    GIL = "gil"  # alive, but its interpreter answers nobody
    HANG = "hang"  # answers, and makes no progress outside any collective
    NODE = "node"  # the node's agent is silent
    COORDINATOR = "coordinator"  # it was away while the ranks' generation ended
    UNREACHABLE = "unreachable"  # did not leave an interrupted generation by the deadline
    UNUSABLE = "unusable"  # left it, and holds what cannot be taken into another one
    COLLECTIVE = "collective"  # an error of c10d: mostly a victim of another fault


class ErrorClass(StrEnum):
    """Whose an exception is. Only `USER` and `STATE` can mean that the job will fail again."""

    USER = "user"
    COLLECTIVE = "collective"
    DEVICE = "device"  # an error that stays with the process, or may: only a fresh one is rid of it
    MEMORY = "memory"
    IO = "io"
    ROOM = "room"  # the node's memory is too small for the snapshots
    CHECKPOINT = "checkpoint"  # a committed checkpoint is damaged: another one may be whole
    STATE = "state"  # state that cannot be read, or does not fit what the script tracks


class ExceptionReport(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as text: it crosses processes without pickling and holds no frame alive."""

    type: str
    message: str
    traceback: str
    frame: str  # "file:line" of the innermost frame of user code
    error_class: ErrorClass


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One observed fault. `rank` is None where no single rank can be named."""

    kind: FaultKind
    generation: Generation
    rank: Rank | None
    node: NodeId
    step: Step
    reason: str
    incarnation: int = 0
    detect_s: float = (
        0.0  # from the last sign of progress (hang) or the process's end to this report
    )
    error: ExceptionReport | None = None
    log_tail: str = ""  # the last lines of a dead rank's log


# The end of a process, a stop and an exception that is not c10d's outrank c10d's errors, which are
# collateral while another cause exists. A lost node explains the ends of its own ranks.
_CAUSE_ORDER = (
    FaultKind.NODE,
    FaultKind.COORDINATOR,
    FaultKind.KILL,
    FaultKind.SEGV,
    FaultKind.SIGNAL,
    FaultKind.EXCEPTION,
    FaultKind.EXIT,
    FaultKind.STOP,
    FaultKind.GIL,
    FaultKind.HANG,
    FaultKind.UNREACHABLE,
    FaultKind.UNUSABLE,
    FaultKind.COLLECTIVE,
)

# Ranks in these kinds of trouble cannot be reached from inside: they get a fresh process.
_OUT_OF_REACH = frozenset(
    {
        FaultKind.UNREACHABLE,
        FaultKind.UNUSABLE,
        FaultKind.KILL,
        FaultKind.SEGV,
        FaultKind.SIGNAL,
        FaultKind.EXIT,
        FaultKind.STOP,
        FaultKind.GIL,
    }
)


def is_of_process(fault: Fault) -> bool:
    """Whether the fault is told of a process, by its incarnation, and not of a generation."""
    return fault.kind in _OUT_OF_REACH


def needs_fresh_process(fault: Fault) -> bool:
    """Whether the process cannot go on in place, whatever else is known.

    An error of the device stays with its context, so nothing that the process does next can be
    trusted, the way out included.
    """
    is_of_device = fault.error is not None and fault.error.error_class is ErrorClass.DEVICE
    return is_of_process(fault) or is_of_device


def is_collateral(fault: Fault) -> bool:
    """Whether the fault can be the mere consequence of another one."""
    kinds = (FaultKind.COLLECTIVE, FaultKind.UNREACHABLE, FaultKind.UNUSABLE)
    return fault.kind in kinds


def root_causes(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults that explain the others, first reported first; collateral ones only where nothing
    else is known.
    """
    known = tuple(faults)
    primary = tuple(f for f in known if not is_collateral(f))
    return primary or known[:1]


def chief_cause(faults: Sequence[Fault]) -> Fault:
    """The one fault that names an incident: of the highest in the order of causes, the first
    reported.
    """
    assert faults, "an incident without a fault"
    return min(root_causes(faults), key=lambda f: _CAUSE_ORDER.index(f.kind))


class Whereabouts(StrEnum):
    """Where a rank's main thread was when it was asked."""

    COLLECTIVE = "collective"  # waits for peers: never the culprit while somebody else is not there
    DEVICE = "device"  # ahead of a device that has not ended what was queued: the same, on a GPU
    DATA = "data"  # waits for its tracked loader, or in a named section
    COMPILE = "compile"  # torch.compile at work
    USER = "user"
    SILENT = "silent"  # did not answer in time
    STOPPED = "stopped"  # did not answer, and the kernel says it is stopped
    AWAY = "away"  # not in the generation (ended, or not begun)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to "where are you?". Durations are of the asked node's own clock."""

    rank: Rank
    node: NodeId
    whereabouts: Whereabouts
    step: Step
    since_progress_s: float
    limit_s: float  # what this rank may take at its present phase
    collectives: int = 0  # collectives begun in this generation; the one behind has the fewest
    stack: str = ""


_SILENT_KINDS = {Whereabouts.SILENT: FaultKind.GIL, Whereabouts.STOPPED: FaultKind.STOP}
_WAITING = (Whereabouts.COLLECTIVE, Whereabouts.DEVICE)
_SECTION_HINT = " (an evaluation or a save belongs into run.section)"
SUSPICION_RATIO = 0.9  # asked at 90 % of the limit, so that the verdict falls within it


class HangVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who hangs, and why it is thought so; `culprits` is empty where everybody is excused."""

    culprits: tuple[tuple[Rank, FaultKind], ...]
    reason: str


def judge_hang(evidence: Sequence[Evidence]) -> HangVerdict:
    """Name the rank that all others wait for.

    Silence outranks everything: a rank whose interpreter does not answer makes no progress. Then
    ranks outside any collective, unless their phase still has time (data, compile, a section). Who
    waits for its device is inside: all that it queued is on the way, or waits for peers; one whose
    device is idle holds up the others. Where all wait, the one that began the fewest collectives is
    behind; if nobody is, the network is, and the lowest rank stands for it.
    """
    present = sorted(
        (e for e in evidence if e.whereabouts is not Whereabouts.AWAY), key=lambda e: e.rank
    )
    silent = [e for e in present if e.whereabouts in _SILENT_KINDS and _is_over(e)]
    if silent:
        culprits = tuple((e.rank, _SILENT_KINDS[e.whereabouts]) for e in silent)
        return HangVerdict(culprits=culprits, reason=f"{_names(silent)} did not answer")
    outside = [e for e in present if e.whereabouts not in _WAITING]
    excused = [e for e in outside if not _is_over(e)]
    if excused:
        where = ", ".join(sorted({e.whereabouts.value for e in excused}))
        return HangVerdict(
            culprits=(), reason=f"{_names(excused)} within the limit of its phase ({where})"
        )
    if outside:
        # Several can be outside at once, in plain computation; the furthest back holds up the
        # others.
        furthest_back = min((e.step, e.collectives) for e in outside)
        outside = [e for e in outside if (e.step, e.collectives) == furthest_back]
        culprits = tuple((e.rank, FaultKind.HANG) for e in outside)
        return HangVerdict(
            culprits=culprits, reason=f"{_names(outside)} outside any collective{_SECTION_HINT}"
        )
    return _judge_waiting(present)


def _judge_waiting(waiting: Sequence[Evidence]) -> HangVerdict:
    over = [e for e in waiting if _is_over(e)]
    if not over:
        return HangVerdict(culprits=(), reason="all within their limits")
    behind = min(waiting, key=lambda e: (e.step, e.collectives, e.rank))
    ahead = max(waiting, key=lambda e: (e.step, e.collectives))
    if (behind.step, behind.collectives) == (ahead.step, ahead.collectives):
        on_device = all(e.whereabouts is Whereabouts.DEVICE for e in waiting)
        where = "for their devices" if on_device else "in the same collective"
        reason = f"all ranks wait {where}; rank {behind.rank} stands for them"
    else:
        steps, collectives = ahead.step - behind.step, ahead.collectives - behind.collectives
        missing = counted(steps, "step") if steps else counted(collectives, "collective")
        reason = f"rank {behind.rank} is {missing} behind"
    return HangVerdict(culprits=((behind.rank, FaultKind.HANG),), reason=reason)


def _is_over(e: Evidence) -> bool:
    return e.since_progress_s >= e.limit_s * SUSPICION_RATIO


def _names(evidence: Sequence[Evidence]) -> str:
    return numbered("rank", [e.rank for e in evidence])


_CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})  # ILL, ABRT, BUS, FPE, SEGV
_SIGKILL = 9


def kind_of_end(signal_number: int | None) -> FaultKind:
    """The kind of a process's end; None means that it exited by itself."""
    if signal_number is None:
        return FaultKind.EXIT
    if signal_number == _SIGKILL:
        return FaultKind.KILL
    return FaultKind.SEGV if signal_number in _CRASH_SIGNALS else FaultKind.SIGNAL


def is_plain_refusal(error: ExceptionReport) -> bool:
    """Whether stepfast itself refuses state: its message says all, its traceback is of its own."""
    return error.error_class is ErrorClass.STATE and error.type.startswith("stepfast.")
