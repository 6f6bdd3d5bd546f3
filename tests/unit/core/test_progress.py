"""What counts as progress, and what a job without any ends with."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from stepfast.core.durable import CheckpointSettings
from stepfast.core.faults import ErrorClass, FaultKind
from stepfast.core.job_state import Phase
from stepfast.core.messages import FaultReported, FinishJob, FirstStepDone, PersistSlots, RankState
from stepfast.core.terms import Generation, NodeId, Step
from stepfast.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR
from stepfast.events import DecisionMade, GenerationOpened, JobEnded, Recovered
from unit.core.rigs import USER_ERROR, JobRig, error_of, fault, held

STORE = CheckpointSettings(url="store", interval_steps=4)
MISFIT = error_of(ErrorClass.STATE, type="stepfast.errors.StateError")


def resumed_job(step: int = 5, known: int = 5, **settings) -> JobRig:
    """A run that goes on from what an earlier one left in memory, and whose ranks stand at it."""
    rig = JobRig(**settings)
    rig.state = replace(rig.state, generation=Generation(1), steps_max=Step(known))
    for number in rig.reports:
        rig.set_rank(number, snapshots=held((1, step - 1), (1, step)))
    for node in range(rig.state.nodes):
        rig.hello(node)
    rig.all_report()
    return rig


def enter_at(rig: JobRig) -> None:
    """Every rank is in the generation, at the step that it goes on from; none has made one."""
    start = rig.state.start
    for number in rig.reports:
        rig.set_rank(
            number, state=RankState.ACTIVE, generation=start.generation, step=start.step or Step(0)
        )
    rig.all_report()
    for node in range(rig.state.nodes):
        rig.beat(node, start.step or 0)


def fail_at_resume(rig: JobRig, first: int, error=MISFIT) -> None:
    """All ranks raise; `first` is the first to say so, the others are told to leave by then."""
    enter_at(rig)
    step = rig.state.start.step or Step(0)
    rig.fault(FaultKind.EXCEPTION, first, error=error, step=step)
    rig.leave(*rig.reports, step=step)
    if rig.state.phase is Phase.RECOVERING:
        rig.replace(first)


@pytest.mark.parametrize("error", [MISFIT, USER_ERROR])
def test_what_fails_at_resume_in_all_ranks_ends_after_three_tries_whoever_is_first(error):
    rig = resumed_job(checkpoints=STORE)
    for first in (0, 1, 3):
        assert not rig.all_of(JobEnded)
        fail_at_resume(rig, first, error)
    (end,) = rig.all_of(JobEnded)
    assert end.exit_code == EXIT_USER_ERROR
    assert "3 times with no new step between" in end.reason
    assert len(rig.all_of(GenerationOpened)) == 3
    assert rig.state.end.fault.error == error, "its traceback is shown last"


def test_a_loss_between_the_tries_begins_no_new_count():
    rig = resumed_job(checkpoints=STORE)
    fail_at_resume(rig, 0)
    fail_at_resume(rig, 1)
    enter_at(rig)
    rig.fault(FaultKind.KILL, 2)
    rig.leave(0, 1, 3)
    rig.replace(2)
    assert not rig.all_of(JobEnded)
    fail_at_resume(rig, 1)
    assert rig.all_of(JobEnded)[0].exit_code == EXIT_USER_ERROR


def test_to_stand_at_the_step_gone_on_from_is_no_progress():
    """Also where this job's own log knows nothing of the step: another directory's checkpoint."""
    rig = resumed_job(known=0, per_hour=3)
    for count in range(3):
        enter_at(rig)
        rig.fault(FaultKind.KILL, 0, step=Step(5))
        rig.leave(1, 2, 3)
        rig.replace(0)
        assert rig.state.budget.tokens == pytest.approx(2.0 - count, abs=0.1)
    assert not rig.state.has_progressed
    enter_at(rig)
    rig.fault(FaultKind.KILL, 0, step=Step(5))
    rig.leave(1, 2, 3)
    rig.replace(0)
    assert rig.all_of(JobEnded)[0].exit_code == EXIT_TRY_AGAIN


def test_a_step_that_all_ranks_complete_is_progress_even_if_no_heartbeat_says_so():
    rig = resumed_job(5, checkpoints=STORE)
    fail_at_resume(rig, 0)
    fail_at_resume(rig, 0)
    enter_at(rig)
    for number in rig.reports:
        rig.set_rank(number, step=Step(6))
    rig.fault(FaultKind.EXCEPTION, 0, error=MISFIT, step=Step(6))
    rig.leave(*rig.reports, step=6)
    assert rig.state.has_progressed
    assert not rig.all_of(JobEnded)
    assert rig.state.repeat.count == 1


def test_memory_alone_that_this_run_could_not_use_is_kept_for_another_one():
    rig = resumed_job()
    for _ in range(3):
        fail_at_resume(rig, 0)
    assert rig.all_of(JobEnded)
    assert all(order.keep_memory for order in rig.all_of(FinishJob))


def test_memory_of_a_run_that_went_on_or_began_anew_goes_with_it():
    went_on = resumed_job()
    enter_at(went_on)
    for node in range(2):
        went_on.beat(node, 7)
    for _ in range(3):
        fail_at_resume(went_on, 0)
    assert went_on.all_of(JobEnded)
    began = JobRig().start(steps=(0, 0))
    began.fault(FaultKind.EXCEPTION, 0, error=USER_ERROR, step=Step(0))
    began.leave(0, 1, 2, 3, step=0)
    assert began.all_of(JobEnded)
    for rig in (went_on, began):
        assert not any(order.keep_memory for order in rig.all_of(FinishJob))


def test_with_a_store_what_this_run_could_not_use_is_made_durable_first():
    rig = resumed_job(checkpoints=STORE)
    for _ in range(3):
        fail_at_resume(rig, 0)
    assert rig.all_of(FinishJob)[0].drain
    for number in rig.reports:
        rig.set_rank(number, state=RankState.GONE, pid=0)
    rig.all_report()
    assert rig.now_of(PersistSlots)[0].checkpoint.step == 5


# --- a coordinator that came back ----------------------------------------------------------------


def raised_meanwhile(**changes):
    told = fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    return FaultReported(fault=msgspec.structs.replace(told, **changes))


def test_a_fault_that_a_coordinator_hears_when_it_is_back_gets_everybody_out():
    """The rank has raised and is not quiet yet: its generation must not be adopted as whole."""
    rig = JobRig(nodes=1, nproc=1)
    rig.state = replace(rig.state, generation=Generation(1), steps_max=Step(5))
    rig.hello(0)
    rig.from_node(0, raised_meanwhile())
    rig.set_rank(0, state=RankState.ACTIVE, generation=Generation(1), step=Step(5))
    rig.report(0)
    assert rig.state.phase is Phase.RECOVERING
    rig.set_rank(0, snapshots=held((1, 5)))
    rig.leave(0)
    assert rig.state.phase is Phase.STARTING
    assert len(rig.all_of(DecisionMade)) == 1


def test_who_resumed_in_the_older_generation_has_not_in_the_new_one():
    """A node says again what its ranks reached; the account of the incident must not take it."""
    rig = JobRig()
    rig.state = replace(rig.state, generation=Generation(1), steps_max=Step(5))
    for number in rig.reports:
        snapshots = held((1, 4), (1, 5))
        rig.set_rank(
            number,
            state=RankState.QUIET,
            generation=Generation(1),
            step=Step(5),
            snapshots=snapshots,
        )
    rig.hello(0)
    rig.from_node(0, raised_meanwhile(generation=Generation(0), step=Step(0), node=NodeId(0)))
    rig.state = replace(rig.state, start=None)
    for number in rig.reports:
        stepped(rig, number)
    rig.hello(1)
    rig.all_report()
    assert rig.state.phase is Phase.STARTING
    assert not rig.all_of(Recovered), "nobody has completed a step of generation 2"


def stepped(rig: JobRig, number: int) -> None:
    done = FirstStepDone(generation=rig.state.generation, rank=number, step=Step(1), seconds=0.1)
    rig.from_node(0, done)
