"""The ladder, the budget, and when it is the user's bug."""

from __future__ import annotations

from typing import Any

import pytest

from stepfast.core.faults import ErrorClass, Fault, FaultKind
from stepfast.core.policy import USER_BUG_TRIES, Action, Budget, Repeat, decide
from stepfast.core.terms import Step
from unit.core.rigs import USER_ERROR, error_of, fault


def decision(told: Fault, *, count: int = 1, tokens: float = 5.0, **changes: Any):
    repeat = Repeat()
    for _ in range(count):
        repeat = repeat.after(told)
    budget = Budget(per_hour=30, tokens=tokens, at=0.0)
    plain = {"recovery_on": True, "job_has_stepped": True}
    return decide(told, repeat=repeat, budget=budget, **{**plain, **changes})


def exception(error_class: ErrorClass = ErrorClass.USER, **changes: Any) -> Fault:
    return fault(FaultKind.EXCEPTION, error=error_of(error_class), **changes)


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.HANG, FaultKind.COLLECTIVE])
def test_a_process_that_lives_is_kept_at_first(kind):
    assert decision(fault(kind, error=None)).action is Action.RESTART_IN_PROCESS


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.HANG, FaultKind.COLLECTIVE])
def test_the_same_again_climbs_to_a_fresh_process(kind):
    assert decision(fault(kind), count=2).action is Action.REPLACE_PROCESS


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.KILL,
        FaultKind.SEGV,
        FaultKind.SIGNAL,
        FaultKind.EXIT,
        FaultKind.STOP,
        FaultKind.GIL,
        FaultKind.UNREACHABLE,
        FaultKind.UNUSABLE,
        FaultKind.NODE,
    ],
)
def test_who_is_out_of_reach_is_replaced(kind):
    assert decision(fault(kind)).action is Action.REPLACE_PROCESS


def test_an_error_of_the_device_costs_the_process_at_once_and_want_of_memory_does_not():
    made = decision(exception(ErrorClass.DEVICE))
    assert made.action is Action.REPLACE_PROCESS and "stays with the process" in made.reason
    assert decision(exception(ErrorClass.MEMORY)).action is Action.RESTART_IN_PROCESS


def test_the_same_user_exception_three_times_is_the_users_bug():
    assert USER_BUG_TRIES == 3
    assert not decision(exception(), count=2).ends_job
    third = decision(exception(), count=3)
    assert third.action is Action.END_USER_ERROR
    assert "Error: bad batch" in third.reason
    assert "train.py:7" in third.reason


def test_a_user_exception_before_the_first_step_ends_the_job_at_once():
    ended = decision(exception(), job_has_stepped=False)
    assert ended.action is Action.END_USER_ERROR


@pytest.mark.parametrize(
    "error_class", [ErrorClass.DEVICE, ErrorClass.MEMORY, ErrorClass.IO, ErrorClass.COLLECTIVE]
)
@pytest.mark.parametrize("stepped", [True, False])
def test_other_errors_are_never_the_users(error_class: ErrorClass, stepped: bool):
    for count in (1, 3, 9):
        made = decision(exception(error_class), count=count, job_has_stepped=stepped)
        assert made.action is not Action.END_USER_ERROR


@pytest.mark.parametrize("kind", [k for k in FaultKind if k is not FaultKind.EXCEPTION])
@pytest.mark.parametrize("stepped", [True, False])
def test_signals_exits_and_hangs_are_never_the_users(kind, stepped: bool):
    for count in (1, 3, 9):
        told = fault(kind, error=USER_ERROR if kind is FaultKind.COLLECTIVE else None)
        made = decision(told, count=count, job_has_stepped=stepped)
        assert made.action is not Action.END_USER_ERROR


def test_a_hang_that_repeats_never_by_itself_ends_the_job():
    assert not decision(fault(FaultKind.HANG), count=20).ends_job


def test_our_own_refusal_before_the_first_step_is_not_tried_again():
    refusal = error_of(ErrorClass.IO, type="stepfast.errors.OperatingError")
    told = fault(FaultKind.EXCEPTION, error=refusal)
    assert decision(told, job_has_stepped=False).action is Action.END_TRY_AGAIN
    assert not decision(told, job_has_stepped=True).ends_job


@pytest.mark.parametrize("kind", list(FaultKind))
def test_with_recovery_off_every_fault_ends_the_job(kind):
    assert decision(fault(kind), recovery_on=False).action is Action.END_TRY_AGAIN


def test_an_empty_budget_ends_the_job_with_try_again():
    assert not decision(fault(FaultKind.KILL), tokens=0.0).ends_job
    spent = decision(fault(FaultKind.KILL), tokens=-0.1)
    assert spent.action is Action.END_TRY_AGAIN
    assert "30 restarts an hour" in spent.reason


def test_a_budget_of_none_ends_at_the_first_fault():
    assert Budget.full(0, 0.0).refilled(10.0).spent().tokens < 0


def test_time_refills_the_budget_up_to_its_brim():
    spent = Budget(per_hour=60, tokens=10.0, at=100.0)
    assert spent.refilled(160.0).tokens == pytest.approx(11.0)
    assert spent.refilled(100.0 + 36_000).tokens == 60.0


def test_progress_refills_the_budget():
    spent = Budget(per_hour=60, tokens=10.0, at=100.0)
    assert spent.refilled(100.0, new_steps=3).tokens == pytest.approx(13.0)


def test_a_clock_that_stands_still_refills_nothing():
    spent = Budget(per_hour=60, tokens=10.0, at=100.0)
    assert spent.refilled(90.0).tokens == 10.0


@pytest.mark.parametrize(
    "other",
    [
        exception(step=6),
        fault(FaultKind.EXCEPTION, error=error_of(ErrorClass.USER, frame="train.py:8")),
        fault(FaultKind.EXCEPTION, error=error_of(ErrorClass.USER, type="KeyError")),
        fault(FaultKind.KILL),
    ],
)
def test_another_failure_has_a_count_of_its_own(other: Fault):
    twice = Repeat().after(exception()).after(exception())
    assert twice.count == 2
    assert twice.after(other).count == 1
    assert twice.after(other).after(exception()).count == 3, "what comes between changes nothing"


def test_an_exception_is_the_same_whichever_rank_is_the_first_to_raise_it():
    first, second = exception(), fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.USER))
    assert Repeat().after(first).after(second).count == 2


def test_a_step_beyond_the_failure_ends_the_count_and_no_other_does():
    twice = Repeat().after(exception(step=5)).after(exception(step=5))
    assert twice.passed(Step(5)).after(exception(step=5)).count == 3
    assert twice.passed(Step(6)).after(exception(step=5)).count == 1


def test_the_failures_that_are_told_apart_are_bounded():
    repeat = Repeat()
    for step in range(100):
        repeat = repeat.after(exception(step=step))
    assert len(repeat.counts) < 20


def test_state_that_does_not_fit_is_tried_as_often_as_a_users_bug():
    misfit = exception(ErrorClass.STATE)
    assert decision(misfit, count=1).action is Action.RESTART_IN_PROCESS
    assert decision(misfit, count=2).action is Action.REPLACE_PROCESS
    assert decision(misfit, count=3).action is Action.END_USER_ERROR


def test_too_small_a_memory_is_tried_once_more_and_no_third_time():
    """The optimizer's state appears at the first step, and every rank may be the first to say."""
    repeat = Repeat()
    for rank, ends in ((0, False), (1, True)):
        error = error_of(ErrorClass.ROOM, type="stepfast.errors.NoRoomError")
        told = fault(FaultKind.EXCEPTION, step=1, rank=rank, error=error)
        repeat = repeat.after(told)
        budget = Budget(per_hour=30, tokens=5.0, at=0.0)
        given = decide(told, repeat=repeat, budget=budget, recovery_on=True, job_has_stepped=True)
        assert given.ends_job is ends
    assert (given.action, given.reason) == (Action.END_TRY_AGAIN, error.message)
