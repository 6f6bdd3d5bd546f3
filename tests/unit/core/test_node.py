"""One node: its ranks' processes, their limits, and what the coordinator hears of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stepfast.core.faults import ErrorClass, FaultKind, Whereabouts
from stepfast.core.messages import (
    Bye,
    EvidenceGiven,
    FaultReported,
    FinishJob,
    FirstStepDone,
    HangSuspected,
    Heartbeat,
    Hello,
    Interrupt,
    LoggedStep,
    NodeReport,
    Noted,
    PhaseBegan,
    PhaseEnded,
    ProbeAnswer,
    ProbeRanks,
    RankEntered,
    RankFinish,
    RankLeave,
    RankLogged,
    RankProbe,
    RankQuiet,
    RankRaised,
    RankResumed,
    RankReturned,
    RankStart,
    RankState,
    Replacement,
)
from stepfast.core.node_state import (
    CoordinatorConnected,
    CoordinatorLost,
    ForkFailed,
    FromJob,
    NodeStopRequested,
    RankEnded,
    RankForked,
    StoreLost,
    StoreReady,
)
from stepfast.core.outputs import (
    EndProcess,
    ForkRank,
    KillRank,
    OpenStore,
    SendToCoordinator,
    SendToRank,
)
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import FIRST_TURN, TURN
from stepfast.errors import EXIT_TRY_AGAIN
from unit.core.rigs import NodeRig, error_of, held, start_of

G1 = Generation(1)


def ended(
    number: int,
    *,
    signal: int | None = 9,
    exit_code: int = 3,
    incarnation: int = 1,
    snapshots: Any = (),
):
    code = None if signal is not None else exit_code
    return RankEnded(
        rank=Rank(number),
        incarnation=incarnation,
        exit_code=code,
        signal=signal,
        log_tail="last words",
        snapshots=snapshots,
    )


def interrupt(generation: int = 1, *replaced: tuple[int, int]) -> FromJob:
    order = Interrupt(
        generation=Generation(generation),
        reason="a fault",
        replace=tuple(Replacement(Rank(r), i) for r, i in replaced),
    )
    return FromJob(order)


def quiet(generation: int = 1) -> RankQuiet:
    return RankQuiet(
        generation=Generation(generation),
        keep_obstacle=None,
        build_has_collectives=False,
        interrupt_s=0.1,
    )


def began(step: int, phase: str = TURN, turn_s: float | None = None) -> PhaseBegan:
    return PhaseBegan(generation=G1, step=Step(step), phase=phase, turn_s=turn_s)


def finish(*, finished: bool = False) -> FromJob:
    return FromJob(FinishJob(finished=finished, exit_code=0 if finished else 1, reason="over"))


def turning(rig: NodeRig) -> NodeRig:
    """Both ranks are in ordinary turns; a turn was seen to take 0.1 s."""
    for number in (0, 1):
        rig.say(number, began(5, FIRST_TURN))
        rig.say(number, began(6, TURN, 0.1))
        rig.say(number, began(7, TURN, 0.1))
    return rig


# --- joining -------------------------------------------------------------------------------------


def test_a_connection_begins_with_hello():
    rig = NodeRig()
    rig.feed(CoordinatorConnected())
    assert rig.all_of(Hello) == [Hello(protocol=1, node=NodeId(0), host="host-0", pid=10)]


def test_the_welcome_forks_the_ranks_and_opens_a_store():
    rig = NodeRig()
    rig.feed(CoordinatorConnected())
    rig.welcome(incarnation=3)
    assert rig.now_of(ForkRank) == [ForkRank(Rank(0), 4), ForkRank(Rank(1), 4)]
    assert len(rig.now_of(OpenStore)) == 1


def test_a_second_welcome_changes_nothing_that_runs():
    rig = NodeRig().ready()
    rig.welcome()
    assert not rig.now_of(ForkRank) and not rig.now_of(OpenStore)
    assert len(rig.now_of(NodeReport)) == 1, "the levels are said again"


def test_levels_are_said_when_they_change_and_not_otherwise():
    rig = NodeRig().ready()
    assert [r.state for r in rig.all_of(NodeReport)[-1].ranks] == ["ready", "ready"]
    rig.tick(0.01)
    assert not rig.now_of(NodeReport)


def test_steps_alone_travel_with_heartbeats():
    rig = turning(NodeRig().ready().active())
    rig.tick(0.6)
    reports = len(rig.all_of(NodeReport))
    rig.say(0, began(8, TURN, 0.1))
    rig.tick(0.6)
    assert len(rig.all_of(NodeReport)) == reports
    assert rig.all_of(Heartbeat)[-1].steps == {0: 8, 1: 7}


def test_only_ranks_in_a_generation_have_steps():
    rig = turning(NodeRig().ready().active())
    rig.feed(interrupt())
    rig.say(0, quiet())
    rig.tick(0.6)
    assert rig.all_of(Heartbeat)[-1].steps == {1: 7}


def test_what_was_logged_goes_with_the_next_heartbeat_once():
    rig = turning(NodeRig().ready().active())
    logged = LoggedStep(step=Step(7), values={"loss": 1.0})
    rig.say(0, RankLogged(generation=G1, logged=logged))
    rig.tick(0.6)
    rig.tick(0.6)
    assert [beat.logged for beat in rig.all_of(Heartbeat)][-2:] == [(logged,), ()]


def test_what_was_logged_before_a_fault_is_delivered_before_it():
    rig = turning(NodeRig().ready().active())
    logged = LoggedStep(step=Step(7), values={})
    rig.say(0, RankLogged(generation=G1, logged=logged))
    rig.feed(ended(1))
    sent = [o.message for o in rig.outputs if hasattr(o, "message")]
    kinds = [type(m) for m in sent]
    assert kinds.index(Heartbeat) < kinds.index(FaultReported)
    assert sent[kinds.index(Heartbeat)].logged == (logged,)


# --- forking -------------------------------------------------------------------------------------


def test_a_process_that_can_not_be_made_is_a_fault():
    rig = NodeRig().connect()
    rig.feed(ForkFailed(Rank(1), 1, "no memory"))
    (told,) = rig.now_of(FaultReported)
    assert (told.fault.kind, told.fault.rank, told.fault.incarnation) == ("exit", 1, 1)
    rig.feed(interrupt(0, (1, 1)))
    assert rig.now_of(ForkRank) == [ForkRank(Rank(1), 2)]


def test_a_process_condemned_while_it_is_forked_ends_as_soon_as_it_stands():
    rig = NodeRig().connect()
    rig.feed(interrupt(0, (1, 1)))
    assert not rig.now_of(ForkRank), "one fork at a time"
    rig.feed(RankForked(Rank(1), 1, 1001))
    assert [k.rank for k in rig.now_of(KillRank)] == [1]
    rig.feed(ended(1))
    assert rig.now_of(ForkRank) == [ForkRank(Rank(1), 2)]
    assert not rig.all_of(FaultReported)


def test_a_fork_that_comes_after_the_end_is_not_left_running():
    rig = NodeRig().connect()
    rig.feed(RankForked(Rank(0), 1, 1000))
    rig.feed(finish())
    rig.feed(RankForked(Rank(1), 1, 1001))
    assert [k.rank for k in rig.now_of(KillRank)] == [1]


def test_a_process_that_never_reaches_the_function_has_the_ceiling():
    rig = NodeRig().connect()
    rig.feed(RankForked(Rank(0), 1, 1000))
    rig.tick(59.0)
    assert not rig.all_of(FaultReported)
    rig.tick(2.0)
    (told,) = rig.now_of(FaultReported)
    assert (told.fault.kind, told.fault.rank) == (FaultKind.UNREACHABLE, 0)
    rig.tick(1.0)
    assert not rig.now_of(FaultReported)


# --- a generation --------------------------------------------------------------------------------


def test_a_generation_starts_on_every_rank_that_waits():
    rig = NodeRig().ready()
    source = SnapshotId(G1, Step(5))
    rig.feed(FromJob(start_of(2, 5, rig.state, sources={Rank(0): source, Rank(1): source})))
    starts = rig.now_of(RankStart)
    assert [(s.rank, s.local_rank, s.step, s.source) for s in starts] == [
        (0, 0, 5, source),
        (1, 1, 5, source),
    ]
    assert starts[0].slot_directory == "slots/rank-0"
    assert starts[1].log_path == "logs/rank-1-gen-2.log"
    assert all(rig.rank(n).state is RankState.ACTIVE for n in (0, 1))


def test_an_order_to_start_is_a_level():
    rig = NodeRig().ready().active()
    rig.feed(FromJob(start_of(1, 5, rig.state)))
    assert not rig.now_of(RankStart)


def test_a_rank_that_left_does_not_join_the_same_generation_again():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    rig.say(0, quiet())
    rig.feed(FromJob(start_of(1, 5, rig.state)))
    assert not rig.now_of(RankStart)


def test_no_other_process_than_the_one_meant_joins():
    rig = NodeRig().ready()
    rig.feed(FromJob(start_of(1, 5, rig.state, incarnations={Rank(0): 1, Rank(1): 2})))
    assert [s.rank for s in rig.now_of(RankStart)] == [0]


def test_a_process_that_is_being_ended_does_not_join():
    rig = NodeRig().ready().active()
    rig.feed(interrupt(1))
    rig.say(0, quiet())
    rig.say(1, quiet())
    rig.feed(interrupt(1, (1, 1)))
    rig.feed(FromJob(start_of(2, 5, rig.state)))
    assert [s.rank for s in rig.now_of(RankStart)] == [0]


def test_the_store_of_a_generation_is_taken_and_the_next_one_opened():
    rig = NodeRig().ready()
    rig.feed(FromJob(start_of(1, 5, rig.state, store_host="host-0", store_port=7000)))
    assert rig.state.store_port is None
    assert len(rig.now_of(OpenStore)) == 1
    rig.feed(StoreReady(7005))
    assert rig.now_of(NodeReport)[0].store_port == 7005


def test_a_lost_store_is_noted_and_opened_again():
    rig = NodeRig().ready()
    rig.feed(StoreLost("killed"))
    assert len(rig.now_of(OpenStore)) == 1
    assert rig.now_of(NodeReport)[0].store_port is None
    assert [n.topic for n in rig.now_of(Noted)] == ["store lost"]


@pytest.mark.parametrize(
    ("error_class", "kind"),
    [
        (ErrorClass.USER, FaultKind.EXCEPTION),
        (ErrorClass.DEVICE, FaultKind.EXCEPTION),
        (ErrorClass.COLLECTIVE, FaultKind.COLLECTIVE),
    ],
)
def test_an_exception_is_reported_with_its_error(error_class: ErrorClass, kind: FaultKind):
    rig = NodeRig().ready().active()
    rig.say(1, RankRaised(generation=G1, step=Step(5), error=error_of(error_class)))
    (told,) = rig.now_of(FaultReported)
    assert (told.fault.kind, told.fault.rank, told.fault.step) == (kind, 1, 5)
    assert told.fault.error == error_of(error_class)
    assert rig.rank(1).state is RankState.ACTIVE, "it has not left yet"


@pytest.mark.parametrize(("signal", "kind"), [(9, "kill"), (11, "segv"), (None, "exit")])
def test_the_end_of_a_process_is_a_fault(signal: int | None, kind: str):
    rig = turning(NodeRig().ready().active())
    rig.feed(ended(1, signal=signal, snapshots=held((1, 6), (1, 7))))
    (told,) = rig.now_of(FaultReported)
    fault = told.fault
    assert (fault.kind, fault.rank, fault.step, fault.generation) == (kind, 1, 7, 1)
    assert fault.log_tail == "last words"
    (report,) = rig.now_of(NodeReport)
    assert report.ranks[1].state is RankState.ABSENT
    assert report.ranks[1].snapshots == held((1, 6), (1, 7)), "the slots outlive it"


def test_the_end_of_an_older_process_is_no_news():
    rig = NodeRig().ready().active()
    rig.feed(ended(1, incarnation=0))
    assert not rig.outputs


# --- interrupt, replace, quiet -------------------------------------------------------------------


def test_an_interrupt_reaches_every_rank_of_the_generation_once():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    assert rig.now_of(SendToRank) == [SendToRank(Rank(r), RankLeave(generation=G1)) for r in (0, 1)]
    rig.feed(interrupt())
    assert not rig.now_of(SendToRank)


def test_quiet_is_reported_with_what_the_slots_hold():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    rig.say(0, quiet(), snapshots=held((1, 5), (1, 6)))
    report = rig.now_of(NodeReport)[0].ranks[0]
    assert (report.state, report.generation) == (RankState.QUIET, 1)
    assert report.snapshots == held((1, 5), (1, 6))
    assert report.keep_obstacle is None


def test_a_rank_that_can_be_in_no_other_generation_is_a_fault_before_it_is_quiet():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    rig.say(1, msgspec.structs.replace(quiet(), unusable="2 CUDA graphs cannot be kept"))
    told = [o.message for o in rig.outputs if isinstance(o, SendToCoordinator)]
    (fault,) = [m.fault for m in told if isinstance(m, FaultReported)]
    assert (fault.kind, fault.rank, fault.incarnation) == (FaultKind.UNUSABLE, 1, 1)
    assert fault.reason == "rank 1: 2 CUDA graphs cannot be kept"
    kinds = [type(m) for m in told]
    assert kinds.index(FaultReported) < kinds.index(NodeReport)


def test_a_dead_rank_is_replaced_by_order():
    rig = NodeRig().ready().active()
    rig.feed(ended(1, snapshots=held((1, 5))))
    assert not rig.now_of(ForkRank), "not by itself"
    rig.feed(interrupt(1, (1, 1)))
    assert rig.now_of(ForkRank) == [ForkRank(Rank(1), 2)]
    rig.feed(interrupt(1, (1, 1)))
    assert not rig.now_of(ForkRank), "twice is the same as once"
    rig.feed(RankForked(Rank(1), 2, 1002))
    rig.say(1, RankEntered(pid=1002), snapshots=held((1, 5)))
    report = rig.now_of(NodeReport)[0].ranks[1]
    assert (report.state, report.incarnation, report.generation) == ("ready", 2, 0)
    assert report.snapshots == held((1, 5))


def test_a_living_rank_is_ended_and_replaced_by_order_and_that_is_no_fault():
    rig = NodeRig().ready().active()
    rig.feed(interrupt(1, (1, 1)))
    assert [(k.rank, k.incarnation) for k in rig.now_of(KillRank)] == [(1, 1)]
    rig.feed(ended(1))
    assert rig.now_of(ForkRank) == [ForkRank(Rank(1), 2)]
    assert not rig.all_of(FaultReported)


def test_an_order_for_an_older_process_leaves_the_new_one_alone():
    rig = NodeRig().ready().active()
    rig.feed(ended(1))
    rig.feed(interrupt(1, (1, 1)))
    rig.feed(RankForked(Rank(1), 2, 1002))
    rig.feed(interrupt(1, (1, 1)))
    assert not rig.now_of(KillRank) and not rig.now_of(ForkRank)


def test_who_does_not_leave_by_the_deadline_is_reported_and_again():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    rig.say(0, quiet())
    rig.tick(1.9)
    assert not rig.all_of(FaultReported)
    rig.tick(0.2)
    (told,) = rig.now_of(FaultReported)
    assert (told.fault.kind, told.fault.rank) == (FaultKind.UNREACHABLE, 1)
    rig.tick(1.0)
    assert not rig.now_of(FaultReported)
    rig.tick(1.1)
    assert len(rig.now_of(FaultReported)) == 1, "a level: it lasts"


def test_who_is_stopped_and_was_told_to_leave_is_a_cause_and_soon():
    rig = NodeRig().ready().active()
    rig.feed(interrupt())
    rig.tick(0.4, stopped=[1])
    assert not rig.all_of(FaultReported), "a short stop is nobody's fault"
    rig.tick(0.2, stopped=[1])
    (told,) = rig.now_of(FaultReported)
    assert (told.fault.kind, told.fault.rank) == (FaultKind.STOP, 1)
    assert told.fault.reason == (
        "rank 1 did not leave generation 1 within 0.5 s: its process is stopped"
    )
    rig.tick(1.0, stopped=[1])
    assert not rig.now_of(FaultReported)


def test_a_rank_that_returned_leaves_too():
    rig = NodeRig().ready().active()
    returned = RankReturned(generation=G1, rank=Rank(0), step=Step(9), digests=())
    rig.say(0, returned)
    assert rig.rank(0).state is RankState.RETURNED
    rig.feed(interrupt())
    assert {s.rank for s in rig.now_of(SendToRank)} == {0, 1}


# --- limits --------------------------------------------------------------------------------------


def test_a_rank_beyond_its_limit_is_suspected_while_it_lasts():
    rig = turning(NodeRig().ready().active())
    rig.tick(1.7)
    assert not rig.all_of(HangSuspected)
    rig.say(1, began(8, TURN, 0.1))
    rig.tick(0.2)
    (told,) = rig.now_of(HangSuspected)
    assert (told.rank, told.step, told.limit_s) == (0, 7, 2.0)
    rig.tick(0.1)
    assert not rig.now_of(HangSuspected)
    rig.tick(0.2)
    assert len(rig.now_of(HangSuspected)) == 1
    rig.say(0, began(8, TURN, 0.1))
    rig.tick(0.3)
    assert not [s for s in rig.now_of(HangSuspected) if s.rank == 0]


def test_the_first_turn_has_the_ceiling():
    rig = NodeRig().ready().active()
    rig.say(0, began(5, FIRST_TURN))
    rig.say(1, began(5, FIRST_TURN))
    rig.tick(53.0)
    assert not rig.all_of(HangSuspected)
    rig.tick(2.0)
    assert {s.rank for s in rig.now_of(HangSuspected)} == {0, 1}


def test_a_section_has_a_limit_of_its_own_and_its_time_is_not_the_turns():
    rig = turning(NodeRig().ready().active())
    rig.say(0, began(7, "section:eval"))
    rig.say(1, began(7, "section:eval"))
    rig.tick(20.0)
    assert not rig.all_of(HangSuspected), "unseen: the ceiling"
    for number in (0, 1):
        rig.say(number, PhaseEnded(generation=G1, step=Step(7), phase="section:eval", seconds=20.0))
    rig.tick(1.0)
    assert not rig.all_of(HangSuspected), "the turn's clock began anew"
    rig.tick(1.0)
    assert rig.now_of(HangSuspected)


def test_a_section_in_the_set_up_does_not_make_the_rest_of_it_short():
    rig = NodeRig().ready().active()
    rig.now += 0.01
    for number in (0, 1):
        rig.say(number, began(5, "section:download"))
    rig.now += 1.0
    for number in (0, 1):
        ended_section = PhaseEnded(
            generation=G1, step=Step(5), phase="section:download", seconds=1.0
        )
        rig.say(number, ended_section)
    rig.tick(30.0)
    assert not rig.all_of(HangSuspected), "code outside the loop has the ceiling"


def test_a_repeated_hang_doubles_the_limit_at_its_step_alone():
    rig = NodeRig().ready()
    rig.feed(FromJob(start_of(1, 5, rig.state, limit_step=Step(7), limit_factor=4.0)))
    turning(rig)
    rig.tick(5.0)
    assert not rig.all_of(HangSuspected)
    rig.say(1, began(8, TURN, 0.1))
    rig.tick(2.0)
    assert [(s.rank, s.limit_s) for s in rig.now_of(HangSuspected)] == [(1, 2.0)]
    rig.tick(1.0)
    assert [(s.rank, s.limit_s) for s in rig.now_of(HangSuspected) if s.rank == 0] == [(0, 8.0)]


def test_who_leaves_or_returned_is_not_suspected():
    rig = turning(NodeRig().ready().active())
    rig.say(0, RankReturned(generation=G1, rank=Rank(0), step=Step(9), digests=()))
    rig.feed(interrupt())
    rig.tick(100.0)
    assert not rig.all_of(HangSuspected)


def test_a_stopped_process_is_suspected_soon_whatever_it_was_in():
    rig = turning(NodeRig().ready().active())
    rig.say(0, PhaseBegan(generation=G1, step=Step(6), phase="section:eval"))
    rig.tick(0.1, stopped=[0])
    rig.tick(1.9, stopped=[0])
    assert [(s.rank, s.limit_s) for s in rig.now_of(HangSuspected) if s.rank == 0] == [(0, 2.0)]
    rig.feed(ask(frozenset({Rank(0)})))
    rig.say(1, answer())
    of_stopped = rig.now_of(EvidenceGiven)[0].evidence[0]
    assert (of_stopped.whereabouts, of_stopped.limit_s) == ("stopped", 2.0)


def test_a_process_that_a_profiler_stops_now_and_then_has_its_phases_limit():
    rig = turning(NodeRig().ready().active())
    rig.say(0, PhaseBegan(generation=G1, step=Step(6), phase="section:eval"))
    for _ in range(5):
        rig.tick(1.0, stopped=[0])
        rig.tick(0.1)
    assert not [s for s in rig.all_of(HangSuspected) if s.rank == 0]


# --- probes --------------------------------------------------------------------------------------


def ask(stopped: frozenset[Rank] = frozenset()) -> FromJob:
    return FromJob(ProbeRanks(probe=4, generation=G1), stopped)


def answer(where: Whereabouts = Whereabouts.COLLECTIVE, seconds: float = 0.0, probe: int = 4):
    return ProbeAnswer(
        probe=probe, whereabouts=where, seconds_there=seconds, collectives=3, stack="here"
    )


def test_a_question_is_passed_on_and_answered_when_all_have_spoken():
    rig = turning(NodeRig().ready().active())
    rig.feed(ask())
    assert rig.now_of(RankProbe) == [RankProbe(probe=4)] * 2
    rig.say(0, answer())
    assert not rig.all_of(EvidenceGiven)
    rig.say(1, answer(Whereabouts.USER))
    (told,) = rig.now_of(EvidenceGiven)
    assert [(e.rank, e.whereabouts, e.stack) for e in told.evidence] == [
        (0, "collective", "here"),
        (1, "user", "here"),
    ]


def test_who_does_not_answer_is_silent_or_stopped():
    rig = turning(NodeRig().ready().active())
    rig.feed(ask(frozenset({Rank(0)})))
    rig.tick(0.2)
    (told,) = rig.now_of(EvidenceGiven)
    assert [e.whereabouts for e in told.evidence] == ["stopped", "silent"]


def test_where_the_others_have_answered_the_stopped_are_not_waited_for():
    rig = turning(NodeRig().ready().active())
    rig.feed(ask(frozenset({Rank(0)})))
    rig.say(1, answer())
    assert [e.whereabouts for e in rig.now_of(EvidenceGiven)[0].evidence] == [
        "stopped",
        "collective",
    ]


def test_an_answer_to_another_question_is_none():
    rig = turning(NodeRig().ready().active())
    rig.feed(ask())
    rig.say(0, answer(probe=3))
    rig.say(1, answer())
    assert not rig.all_of(EvidenceGiven)


def test_a_wait_for_data_has_the_loaders_limit_and_a_compilation_the_ceiling():
    rig = turning(NodeRig().ready().active())
    rig.now += 3.0
    rig.feed(ask())
    rig.say(0, answer(Whereabouts.DATA, seconds=3.0))
    rig.say(1, answer(Whereabouts.COMPILE))
    evidence = rig.now_of(EvidenceGiven)[0].evidence
    assert [(e.since_progress_s, e.limit_s) for e in evidence] == [(3.0, 20.0), (3.0, 60.0)]


def test_nobody_in_the_generation_is_an_answer_too():
    rig = NodeRig().ready()
    rig.feed(ask())
    assert [e.evidence for e in rig.now_of(EvidenceGiven)] == [()]


# --- the coordinator is away ---------------------------------------------------------------------


def resumed(number: int) -> RankResumed:
    return RankResumed(
        generation=G1,
        rank=Rank(number),
        step=Step(5),
        rendezvous_s=0.0,
        build_s=0.0,
        restore_s=0.0,
        kept=False,
    )


def test_what_stands_is_told_again_after_a_lost_connection():
    rig = NodeRig().ready().active()
    first = FirstStepDone(generation=G1, rank=Rank(0), step=Step(6), seconds=0.1)
    rig.say(0, resumed(0))
    rig.say(0, first)
    rig.feed(CoordinatorLost())
    rig.feed(ended(1))
    assert not rig.now_of(NodeReport)
    rig.feed(CoordinatorConnected())
    told = [type(o.message) for o in rig.outputs]
    assert told == [Hello, RankResumed, FirstStepDone, FaultReported, NodeReport]


def test_what_is_over_is_not_told_again():
    rig = NodeRig().ready().active()
    rig.say(0, resumed(0))
    rig.feed(ended(1))
    rig.feed(interrupt(1, (1, 1)))
    rig.feed(RankForked(Rank(1), 2, 1002))
    rig.say(1, RankEntered(pid=1002))
    rig.say(0, quiet())
    rig.feed(FromJob(start_of(2, 5, rig.state)))
    rig.feed(CoordinatorConnected())
    assert not rig.now_of(RankResumed) and not rig.now_of(FaultReported)


def test_ranks_train_on_without_a_coordinator_for_a_while():
    rig = turning(NodeRig().ready().active())
    rig.feed(CoordinatorLost())
    rig.tick(119.0)
    assert not rig.now_of(RankFinish) and not rig.now_of(Heartbeat)
    rig.tick(2.0)
    assert len(rig.now_of(RankFinish)) == 2
    assert not rig.now_of(RankFinish)[0].finished


def test_a_coordinator_that_comes_back_in_time_finds_them_training():
    rig = turning(NodeRig().ready().active())
    rig.feed(CoordinatorLost())
    rig.tick(100.0)
    rig.feed(CoordinatorConnected())
    rig.tick(100.0)
    assert not rig.all_of(RankFinish)


# --- the end -------------------------------------------------------------------------------------


def test_a_finished_job_lets_the_ranks_run_on_to_their_end():
    rig = NodeRig().ready().active()
    rig.feed(finish(finished=True))
    assert rig.now_of(RankFinish) == [RankFinish(finished=True)] * 2
    rig.tick(100.0)
    assert not rig.all_of(KillRank)
    rig.feed(ended(0, signal=None, exit_code=0))
    rig.feed(ended(1, signal=None))
    assert rig.now_of(Bye) == [Bye(node=NodeId(0), failed=(Rank(1),))]
    assert rig.now_of(EndProcess)[0].exit_code == 0


def test_a_crash_behind_the_end_is_a_note():
    rig = NodeRig().ready().active()
    rig.feed(finish(finished=True))
    rig.feed(ended(0))
    assert [n.topic for n in rig.now_of(Noted)] == ["after the end"]
    assert not rig.all_of(FaultReported)


def test_who_does_not_end_in_time_is_killed():
    rig = NodeRig().ready().active()
    rig.feed(finish())
    rig.feed(ended(0))
    rig.tick(3.1)
    assert [k.rank for k in rig.now_of(KillRank)] == [1]
    rig.feed(ended(1))
    assert rig.now_of(EndProcess)[0].exit_code == 1


def test_a_later_order_to_end_may_only_be_harder():
    rig = NodeRig().ready().active()
    rig.feed(finish(finished=True))
    rig.feed(finish())
    assert rig.now_of(RankFinish) == [RankFinish(finished=False)] * 2
    rig.feed(finish(finished=True))
    assert not rig.outputs


def test_a_node_that_ends_takes_no_other_order():
    rig = NodeRig().ready().active()
    rig.feed(finish())
    rig.feed(ended(1))
    rig.feed(interrupt(1, (0, 1), (1, 1)))
    rig.feed(FromJob(start_of(2, 5, rig.state)))
    rig.welcome()
    assert not rig.all_of(ForkRank)[2:], "the two of the beginning"


@pytest.mark.parametrize("phase", ["new", "connected", "ready", "active"])
def test_a_stop_ends_the_node_in_every_phase(phase: str):
    rig = {
        "new": lambda: NodeRig(),
        "connected": lambda: NodeRig().connect(),
        "ready": lambda: NodeRig().ready(),
        "active": lambda: NodeRig().ready().active(),
    }[phase]()
    rig.feed(NodeStopRequested("SIGTERM"))
    for number in (0, 1):
        if Rank(number) in rig.state.ranks and rig.rank(number).pid:
            rig.feed(ended(number))
    ends = rig.all_of(EndProcess)
    assert [e.exit_code for e in ends] == [EXIT_TRY_AGAIN]
