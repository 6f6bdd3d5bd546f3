"""What to do about a fault: the ladder, the restart budget, and when it is the user's bug.

    in process -> fresh process -> (user's bug: end with 78)
Owns: the decision and its reason in words. Does not own any effect.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from stepfast.core.faults import ErrorClass, ExceptionReport, Fault, FaultKind
from stepfast.core.quantities import counted
from stepfast.core.terms import Rank, Step

# The same exception at the same step so often, and no new step between: it will fail again.
USER_BUG_TRIES = 3

_SIGNATURES_MAX = 16  # so many different failures without a step between are told apart


class Action(StrEnum):
    """The rungs of the ladder."""

    RESTART_IN_PROCESS = "restart in process"
    REPLACE_PROCESS = "replace the process"
    END_USER_ERROR = "end the job: the user's code is at fault"
    END_TRY_AGAIN = "end the job: try again later"


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason in words."""

    action: Action
    reason: str

    @property
    def ends_job(self) -> bool:
        """Whether the job is over."""
        return self.action in (Action.END_USER_ERROR, Action.END_TRY_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A bucket of restarts: refilled by time (`per_hour`) and by progress (one for each step that
    the job completed for the first time).
    """

    per_hour: int
    tokens: float
    at: float

    @staticmethod
    def full(per_hour: int, now: float) -> Budget:
        """A bucket at its brim."""
        return Budget(per_hour=per_hour, tokens=float(per_hour), at=now)

    def refilled(self, now: float, new_steps: int = 0) -> Budget:
        """The bucket at `now`, after `new_steps` steps that were never reached before."""
        by_time = max(0.0, now - self.at) * self.per_hour / 3600.0
        return replace(
            self, tokens=min(float(self.per_hour), self.tokens + by_time + new_steps), at=now
        )

    def spent(self) -> Budget:
        """The bucket after one restart; may go below zero, which is "empty"."""
        return replace(self, tokens=self.tokens - 1.0)


Signature = tuple[FaultKind, Rank | None, Step, str, str]


@dataclass(frozen=True, slots=True)
class Repeat:
    """How often each failure came since the job was last beyond the step at which it comes.

    `count` is that of the newest one. Failures between two of a kind change nothing: a node that
    was lost meanwhile does not make a bug go away. Nor does the rank, for what all ranks fail by:
    another one may be the first to say so.
    """

    counts: tuple[tuple[Signature, int], ...] = ()  # the newest last
    count: int = 0

    def after(self, fault: Fault) -> Repeat:
        """Count one more of the same, or begin to."""
        signature = _signature(fault)
        known = dict(self.counts)
        count = known.pop(signature, 0) + 1
        counts = (*known.items(), (signature, count))
        return Repeat(counts[-_SIGNATURES_MAX:], count)

    def passed(self, step: Step) -> Repeat:
        """Every rank has completed `step`, for the first time: what failed before it is over."""
        return Repeat(tuple((s, count) for s, count in self.counts if s[2] >= step))


def _signature(fault: Fault) -> Signature:
    error = fault.error
    kind, frame = ("", "") if error is None else (error.type, error.frame)
    is_of_all = _will_fail_again(fault) or (error and error.error_class is ErrorClass.ROOM)
    rank = None if is_of_all else fault.rank
    return (fault.kind, rank, fault.step, kind, frame)


def decide(
    fault: Fault, *, repeat: Repeat, budget: Budget, recovery_on: bool, job_has_stepped: bool
) -> Decision:
    """The decision about one incident's chief cause. `repeat` and `budget` already count this
    fault.
    """
    if _will_fail_again(fault):
        assert fault.error is not None
        what = _in_words(fault.error)
        if not job_has_stepped:
            return Decision(Action.END_USER_ERROR, f"{what}, before the job's first step")
        if repeat.count >= USER_BUG_TRIES:
            reason = f"{what} at step {fault.step}, {repeat.count} times with no new step between"
            return Decision(Action.END_USER_ERROR, reason)
    if fault.error is not None and _is_refusal(fault.error, repeat, job_has_stepped):
        return Decision(Action.END_TRY_AGAIN, fault.error.message)
    if not recovery_on:
        return Decision(
            Action.END_TRY_AGAIN, f"{fault.kind} of rank {fault.rank}, and recovery is off"
        )
    if budget.tokens < 0:
        budget_words = f"the budget of {counted(budget.per_hour, 'restart')} an hour"
        return Decision(Action.END_TRY_AGAIN, f"{budget_words} is spent, last by {fault.kind}")
    if fault.error is not None and fault.error.error_class is ErrorClass.DEVICE:
        return Decision(
            Action.REPLACE_PROCESS, f"{fault.kind}: an error of the device stays with the process"
        )
    if fault.kind not in (FaultKind.EXCEPTION, FaultKind.COLLECTIVE, FaultKind.HANG):
        return Decision(
            Action.REPLACE_PROCESS, f"{fault.kind}: the process is gone or out of reach"
        )
    if repeat.count > 1:
        return Decision(
            Action.REPLACE_PROCESS, f"{fault.kind} again at step {fault.step}: a fresh process"
        )
    return Decision(Action.RESTART_IN_PROCESS, f"{fault.kind}: the process lives")


def _in_words(error: ExceptionReport) -> str:
    message = error.message.strip().splitlines()
    where = f" ({error.frame})" if error.frame else ""
    return f"{error.type}: {message[0] if message else ''}{where}"


def _is_refusal(error: ExceptionReport, repeat: Repeat, job_has_stepped: bool) -> bool:
    """stepfast's own refusal: it will not heal by trying again here.

    Before the first step that is any; later, too small a memory, where it came twice: what the
    optimizer makes at its first step may be what there is no room for.
    """
    if error.error_class is ErrorClass.ROOM:
        return not job_has_stepped or repeat.count > 1
    is_own = error.type.startswith("stepfast.") and error.error_class is ErrorClass.IO
    return is_own and not job_has_stepped


def _will_fail_again(fault: Fault) -> bool:
    """Whether the same is to be expected wherever it is tried: the user's code, or state that does
    not fit it.
    """
    error = fault.error
    return (
        fault.kind is FaultKind.EXCEPTION
        and error is not None
        and error.error_class in (ErrorClass.USER, ErrorClass.STATE)
    )
