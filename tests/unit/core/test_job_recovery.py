"""The job under faults: interrupted, decided, resumed; hangs judged; old messages dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stepfast.core.faults import ErrorClass, FaultKind, Whereabouts
from stepfast.core.job_state import Phase
from stepfast.core.messages import (
    FaultReported,
    Heartbeat,
    Interrupt,
    ProbeRanks,
    RankState,
    StartGeneration,
)
from stepfast.core.objectives import Objectives
from stepfast.core.outputs import SendToNode
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, Step
from stepfast.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR
from stepfast.events import (
    DecisionMade,
    Dropped,
    FaultSeen,
    JobEnded,
    Note,
    Recovered,
    SloBreached,
)
from unit.core.rigs import USER_ERROR, JobRig, error_of, fault, held


def phase(rig: JobRig) -> Phase:
    return rig.state.phase


# --- recovery ------------------------------------------------------------------------------------


def test_an_exception_is_recovered_in_process():
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    orders = rig.now_of(Interrupt)
    assert [o.replace for o in orders] == [(), ()]
    rig.leave(0, 1, 2)
    assert phase(rig) is Phase.RECOVERING
    rig.leave(3)
    assert phase(rig) is Phase.STARTING
    start = rig.now_of(StartGeneration)[0]
    assert (start.generation, start.step) == (2, 5)
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert (event.kind, event.rank, event.resumed_step, event.steps_lost) == ("exception", 1, 5, 0)
    assert event.survivors_kept_pid
    assert phase(rig) is Phase.RUNNING


def test_a_recovery_that_misses_an_objective_is_an_event_behind_its_own():
    rig = JobRig().start()
    rig.state = replace(rig.state, objectives=Objectives(recovery_s=1.0, steps_lost=5))
    for generation, seconds in ((1, 0.5), (2, 3.0)):
        at = {"generation": Generation(generation), "step": Step(4 + generation)}
        rig.fault(FaultKind.EXCEPTION, 1, **at)
        rig.now += seconds
        rig.leave(0, 1, 2, 3)
        rig.enter()
    events = rig.all_of((Recovered, SloBreached))
    assert [type(e) for e in events] == [Recovered, Recovered, SloBreached]
    breach = events[-1]
    assert (breach.objective, breach.limit, breach.generation) == ("recovery_s", 1.0, 3)
    assert breach.value == events[1].total_s >= 3.0


def test_a_killed_rank_is_replaced():
    rig = JobRig().start()
    rig.fault(FaultKind.KILL, 2)
    to_node_1 = [o.message for o in rig.outputs if isinstance(o, SendToNode) and o.node == 1]
    assert [(r.rank, r.incarnation) for r in to_node_1[0].replace] == [(2, 1)]
    rig.leave(0, 1, 3)
    rig.replace(2)
    assert phase(rig) is Phase.STARTING
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert event.survivors_kept_pid and event.kind == "kill"


def test_an_error_of_the_device_costs_its_process_at_once():
    """It may never get out of the generation: what it waits for is the broken device."""
    rig = JobRig().start()
    rig.fault(FaultKind.COLLECTIVE, 0, error=error_of(ErrorClass.COLLECTIVE))
    rig.fault(FaultKind.EXCEPTION, 2, error=error_of(ErrorClass.DEVICE))
    to_node_1 = [o.message for o in rig.outputs if isinstance(o, SendToNode) and o.node == 1]
    assert [(r.rank, r.incarnation) for r in to_node_1[-1].replace] == [(2, 1)]
    rig.leave(0, 1, 2, 3)
    assert phase(rig) is Phase.RECOVERING, "quiet or not"
    rig.replace(2)
    assert phase(rig) is Phase.STARTING
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert event.survivors_kept_pid and (event.kind, event.rank) == ("exception", 2)


def test_a_rank_that_left_and_cannot_go_on_is_replaced_and_is_not_the_cause():
    rig = JobRig().start()
    rig.fault(FaultKind.HANG, 1)
    rig.leave(0, 1, 2)
    rig.fault(FaultKind.UNUSABLE, 3, reason="rank 3: a CUDA graph cannot be kept")
    rig.leave(3)
    assert phase(rig) is Phase.RECOVERING
    rig.replace(3)
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert (event.kind, event.rank, event.survivors_kept_pid) == ("hang", 1, True)
    assert [c.rank for c in event.causes] == [1]


def test_a_rank_that_dies_when_it_is_already_quiet_does_not_count_as_out():
    """The fault is in front of the report: the last report still says quiet."""
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2)
    rig.set_rank(3, state=RankState.QUIET, generation=Generation(1))
    rig.fault(FaultKind.KILL, 2)
    rig.report(1)
    assert phase(rig) is Phase.RECOVERING
    rig.replace(2)
    assert phase(rig) is Phase.STARTING


def test_a_generation_opens_only_when_every_rank_is_out_of_the_older_one():
    rig = JobRig().start()
    rig.fault(FaultKind.KILL, 0)
    rig.replace(0)
    for number in (1, 2):
        rig.leave(number)
        assert phase(rig) is Phase.RECOVERING
    rig.leave(3)
    assert rig.state.generation == 2


def test_what_a_node_said_before_it_heard_of_the_generation_does_not_count():
    """Generation 1 is open; the node was slow to hear of it, and its old "ready" is on the way."""
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, step=0)
    rig.report(1, heard=0)
    assert phase(rig) is Phase.RECOVERING, "ranks 2 and 3 may be in generation 1"
    rig.leave(2, 3, step=0)
    assert phase(rig) is Phase.STARTING


def test_who_never_got_into_the_generation_is_out_of_it():
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, step=0)
    rig.report(1, heard=1)
    assert phase(rig) is Phase.STARTING


def test_a_fault_while_starting_joins_the_incident():
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    for r in rig.reports:
        rig.set_rank(r, state=RankState.ACTIVE, generation=Generation(2), step=Step(5))
    rig.all_report()
    rig.resumed(0)
    rig.fault(FaultKind.KILL, 3)
    assert phase(rig) is Phase.RECOVERING
    rig.leave(0, 1, 2)
    rig.replace(3)
    assert rig.state.generation == 3
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert (event.kind, event.generation) == ("exception", 3)
    assert [(c.kind, c.rank) for c in event.causes] == [("exception", 0), ("kill", 3)]


def test_two_faults_at_once_are_one_incident():
    rig = JobRig().start()
    rig.fault(FaultKind.KILL, 0)
    rig.fault(FaultKind.KILL, 3)
    rig.leave(1, 2)
    rig.replace(0)
    assert phase(rig) is Phase.RECOVERING
    rig.replace(3)
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert len(event.causes) == 2
    assert len(rig.all_of(DecisionMade)) == 1


def test_collateral_faults_wait_for_their_cause():
    rig = JobRig().start()
    for number in (0, 1, 2):
        rig.fault(FaultKind.COLLECTIVE, number, error=error_of(ErrorClass.COLLECTIVE))
    rig.leave(0, 1, 2, 3)
    assert phase(rig) is Phase.RECOVERING, "collected for a short window"
    rig.fault(FaultKind.EXCEPTION, 3, error=error_of(ErrorClass.MEMORY))
    assert "exception" in rig.all_of(DecisionMade)[0].reason
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert [(c.kind, c.rank) for c in event.causes] == [("exception", 3)]


def test_collateral_faults_alone_are_decided_after_the_window():
    rig = JobRig().start()
    rig.fault(FaultKind.COLLECTIVE, 1, error=error_of(ErrorClass.COLLECTIVE))
    rig.leave(0, 1, 2, 3)
    rig.tick(0.2)
    assert phase(rig) is Phase.STARTING


def test_a_fault_told_twice_counts_once():
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    assert rig.now_of(Interrupt), "the order is a level: it is repeated"
    assert len(rig.all_of(FaultSeen)) == 1
    rig.leave(0, 1, 2, 3)
    assert len(rig.all_of(DecisionMade)) == 1


def test_the_same_failure_again_gets_a_fresh_process():
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    rig.enter()
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    assert phase(rig) is Phase.RECOVERING
    assert [(r.rank, r.incarnation) for r in rig.now_of(Interrupt)[0].replace] == [(1, 1)]
    rig.report(0)
    assert phase(rig) is Phase.RECOVERING, "its old process still says quiet"
    rig.replace(1)
    assert phase(rig) is Phase.STARTING


def test_a_user_exception_three_times_at_one_step_ends_the_job():
    rig = JobRig().start()
    for _ in range(3):
        assert phase(rig) is Phase.RUNNING
        rig.fault(FaultKind.EXCEPTION, 1, error=USER_ERROR)
        rig.leave(0, 1, 2, 3)
        if phase(rig) is Phase.RECOVERING:
            rig.replace(1)
        if phase(rig) is Phase.STARTING:
            rig.enter()
    (ended,) = rig.all_of(JobEnded)
    assert ended.exit_code == EXIT_USER_ERROR
    assert "3 times" in ended.reason


def test_steps_lost_are_told_from_what_every_rank_had_completed():
    rig = JobRig().start(steps=(4, 5))
    rig.set_rank(0, snapshots=held((1, 4)))
    rig.fault(FaultKind.EXCEPTION, 0, step=Step(5), error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3, step=5)
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert (event.resumed_step, event.steps_lost) == (4, 1)


def test_an_abandoned_lineage_is_never_resumed_from():
    rig = JobRig().start()
    rig.set_rank(0, snapshots=held((1, 4), (1, 5)))
    rig.set_rank(1, snapshots=held((1, 3), (1, 4)))
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    assert rig.state.start.step == 4
    rig.enter()
    for r in rig.reports:
        rig.set_rank(r, snapshots=held((1, 5), (2, 4)))
    rig.fault(FaultKind.KILL, 0)
    rig.leave(1, 2, 3)
    rig.replace(0)
    assert rig.state.start.step == 4
    assert {s.generation for s in rig.state.start.sources.values()} == {2}


def test_with_recovery_off_the_first_fault_ends_the_job_without_getting_anybody_back():
    rig = JobRig(recovery="off").start()
    rig.fault(FaultKind.KILL, 0)
    (ended,) = rig.all_of(JobEnded)
    assert ended.exit_code == EXIT_TRY_AGAIN
    assert "recovery is off" in ended.reason


def test_a_survivor_with_an_obstacle_has_everybody_build_again():
    rig = JobRig().start()
    for r in rig.reports:
        rig.set_rank(r, keep_obstacle=None)
    rig.set_rank(2, keep_obstacle="a lambda")
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    assert not rig.state.start.keep
    assert [(n.topic, n.text) for n in rig.all_of(Note)] == [("build again", "a lambda")]


@pytest.mark.parametrize("has_collectives", [False, True])
def test_survivors_keep_what_they_built_unless_fresh_ranks_need_them(has_collectives: bool):
    rig = JobRig().start()
    for r in rig.reports:
        rig.set_rank(r, keep_obstacle=None, build_has_collectives=has_collectives)
    rig.fault(FaultKind.KILL, 0)
    rig.leave(1, 2, 3)
    rig.set_rank(0, keep_obstacle="nothing built yet", build_has_collectives=False)
    rig.replace(0)
    assert rig.state.start.keep is not has_collectives


# --- old messages --------------------------------------------------------------------------------


def recovered() -> JobRig:
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    rig.enter()
    return rig


@pytest.mark.parametrize("kind", [FaultKind.COLLECTIVE, FaultKind.EXCEPTION, FaultKind.HANG])
def test_a_fault_of_an_older_generation_is_dropped_with_an_event(kind: FaultKind):
    rig = recovered()
    before = rig.state
    rig.fault(kind, 1, generation=Generation(1))
    assert [d.what for d in rig.now_of(Dropped)] == [f"fault {kind}"]
    assert replace(rig.state, membership=before.membership) == before


def test_the_end_of_an_older_process_is_dropped_and_of_the_present_one_is_not():
    rig = JobRig().start()
    rig.fault(FaultKind.KILL, 0)
    rig.leave(1, 2, 3)
    rig.replace(0)
    rig.enter()
    rig.fault(FaultKind.KILL, 0, incarnation=1, generation=Generation(1))
    assert rig.now_of(Dropped) and phase(rig) is Phase.RUNNING
    rig.fault(FaultKind.KILL, 0, incarnation=2, generation=NO_GENERATION)
    assert phase(rig) is Phase.RECOVERING


def test_progress_and_suspicions_of_an_older_generation_are_dropped():
    rig = recovered()
    rig.resumed(0, generation=1)
    assert [d.what for d in rig.now_of(Dropped)] == ["RankResumed"]
    rig.state = replace(rig.state, generation=Generation(3))
    rig.suspect(0)
    rig.state = replace(rig.state, generation=Generation(4))
    message = msgspec.structs.replace(rig.log[-1][1].message, generation=Generation(3))
    rig.from_node(0, message)
    assert [d.what for d in rig.now_of(Dropped)] == ["suspicion"]


def test_a_stranger_is_not_listened_to():
    rig = JobRig()
    assert rig.from_node(1, Heartbeat(node=NodeId(1), steps={Rank(2): Step(3)})) == []


# --- hangs ---------------------------------------------------------------------------------------


def hang(rig: JobRig, number: int = 1, where: Whereabouts = Whereabouts.USER) -> None:
    rig.suspect(number)
    rig.answer(1)
    rig.answer(0, **{f"rank_{number}": where})


def test_a_suspicion_has_everybody_asked_once():
    rig = JobRig().start()
    rig.suspect(1)
    assert [p.probe for p in rig.now_of(ProbeRanks)] == [1, 1]
    rig.suspect(1)
    rig.suspect(2)
    assert len(rig.all_of(ProbeRanks)) == 2


@pytest.mark.parametrize(
    ("where", "kind", "replaced"),
    [
        (Whereabouts.USER, "hang", False),
        (Whereabouts.SILENT, "gil", True),
        (Whereabouts.STOPPED, "stop", True),
    ],
)
def test_a_verdict_is_a_fault_like_any_other(where: Whereabouts, kind: str, replaced: bool):
    rig = JobRig().start()
    hang(rig, 1, where)
    (seen,) = rig.all_of(FaultSeen)
    assert (seen.kind, seen.rank, seen.step) == (kind, 1, 5)
    assert bool(rig.now_of(Interrupt)[0].replace) is replaced


def test_who_is_excused_ends_the_question_without_a_fault():
    rig = JobRig().start()
    rig.suspect(0)
    rig.answer(0, rank_0=Whereabouts.AWAY, rank_1=Whereabouts.AWAY)
    rig.answer(1, rank_2=Whereabouts.AWAY, rank_3=Whereabouts.AWAY)
    assert phase(rig) is Phase.RUNNING
    assert rig.state.probe is None
    rig.suspect(0)
    assert rig.now_of(ProbeRanks)[0].probe == 2


def test_a_node_that_does_not_answer_is_not_waited_for():
    rig = JobRig().start()
    rig.suspect(1)
    rig.answer(0, rank_1=Whereabouts.USER)
    assert phase(rig) is Phase.RUNNING
    rig.tick(0.5)
    assert phase(rig) is Phase.RECOVERING


def test_an_answer_to_an_older_question_is_none():
    rig = JobRig().start()
    rig.suspect(1)
    rig.state = replace(rig.state, probe=replace(rig.state.probe, number=9))
    given = rig.answer(0)
    rig.state = replace(rig.state, probe=replace(rig.state.probe, number=1, answered=frozenset()))
    assert given == []


def test_a_fault_ends_the_question():
    rig = JobRig().start()
    rig.suspect(1)
    rig.fault(FaultKind.KILL, 2)
    assert rig.state.probe is None


def test_a_hang_that_repeats_at_one_step_doubles_the_limit_there():
    rig = JobRig().start()
    factors = []
    for _ in range(3):
        hang(rig)
        rig.leave(0, 1, 2, 3)
        if phase(rig) is Phase.RECOVERING:
            rig.replace(1)
        factors.append((rig.state.start.limit_step, rig.state.start.limit_factor))
        rig.enter()
    assert factors == [(5, 2.0), (5, 4.0), (5, 8.0)]
    assert not rig.all_of(JobEnded)


def test_a_hang_at_another_step_begins_anew():
    rig = JobRig().start()
    hang(rig)
    rig.leave(0, 1, 2, 3)
    rig.enter()
    rig.suspect(1)
    rig.state = replace(rig.state, hang_step=Step(4))
    rig.answer(1)
    rig.answer(0, rank_1=Whereabouts.USER)
    rig.leave(0, 1, 2, 3)
    if phase(rig) is Phase.RECOVERING:
        rig.replace(1)
    assert rig.state.start.limit_factor == 2.0


@pytest.mark.parametrize("setting", [{"hang": "report"}, {"recovery": "report"}])
def test_where_hangs_are_only_reported_there_is_one_note_a_step(setting: dict[str, Any]):
    rig = JobRig(**setting).start()
    hang(rig)
    hang(rig)
    assert phase(rig) is Phase.RUNNING
    notes = [n for n in rig.all_of(Note) if n.topic == "hang"]
    assert [(n.rank, n.node) for n in notes] == [(1, 0)]


def test_a_fault_in_words_is_enough_for_every_kind():
    """No kind of fault finds the machine unprepared, in any phase."""
    for kind in FaultKind:
        for phase_of in (lambda: JobRig().start(), recovered):
            rig = phase_of()
            told = fault(kind, 1, generation=rig.state.generation, step=Step(5))
            rig.from_node(0, FaultReported(fault=told))
            assert phase(rig) is Phase.RECOVERING
            assert rig.all_of(FaultSeen)[-1].kind == kind
