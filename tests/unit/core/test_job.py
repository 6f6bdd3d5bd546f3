"""The job: who is there, when a generation may open, from which step, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from stepfast.core.faults import ErrorClass, FaultKind
from stepfast.core.job_state import Phase, StopRequested
from stepfast.core.messages import (
    Bye,
    FinishJob,
    Heartbeat,
    Interrupt,
    LoggedStep,
    Noted,
    RankState,
    StartGeneration,
    Welcome,
)
from stepfast.core.outputs import EndProcess, Persist, SendToNode
from stepfast.core.recovery import Lineage
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, Step
from stepfast.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR
from stepfast.events import (
    DecisionMade,
    Dropped,
    FaultSeen,
    GenerationOpened,
    GenerationRunning,
    JobEnded,
    NodeJoined,
    NodeLeft,
    Note,
    Recovered,
    StepLogged,
)
from unit.core.rigs import USER_ERROR, JobRig, error_of, held


def phase(rig: JobRig) -> Phase:
    return rig.state.phase


# --- forming -------------------------------------------------------------------------------------


def test_a_node_that_joins_is_told_its_ranks():
    rig = JobRig()
    rig.hello(1)
    assert rig.now_of(NodeJoined) == [NodeJoined(node=1, host="host-1", pid=11)]
    (welcome,) = rig.now_of(Welcome)
    assert welcome.ranks == {2: 0, 3: 0}
    assert welcome.settings == rig.state.settings


def test_the_first_generation_opens_when_every_rank_is_ready():
    rig = JobRig()
    rig.hello(0)
    rig.report(0)
    rig.hello(1)
    rig.set_rank(3, state=RankState.STARTING)
    rig.report(1)
    assert phase(rig) is Phase.FORMING
    rig.set_rank(3, state=RankState.READY)
    rig.report(1)
    assert phase(rig) is Phase.STARTING
    starts = rig.now_of(StartGeneration)
    assert len(starts) == 2 and starts[0] == starts[1]
    assert (starts[0].generation, starts[0].step) == (1, None)
    assert starts[0].incarnations == {0: 1, 1: 1, 2: 1, 3: 1}


def test_no_generation_opens_without_a_store_to_meet_at():
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n, store=False)
    assert phase(rig) is Phase.FORMING
    rig.report(1)
    (start,) = {s.store_host for s in rig.now_of(StartGeneration)}
    assert start == "host-1"


def test_slots_of_before_are_adopted():
    """The job directory is opened again; fresh processes find what is in the node's memory."""
    rig = JobRig()
    lineage = Lineage().opened(Generation(1), Step(0)).opened(Generation(2), Step(5))
    rig.state = replace(rig.state, generation=Generation(2), lineage=lineage, steps_max=Step(7))
    for r in rig.reports:
        rig.set_rank(r, snapshots=held((1, 6), (2, 6), (2, 7)))
    rig.set_rank(3, snapshots=held((1, 6), (2, 6)))
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    start = rig.now_of(StartGeneration)[0]
    assert (start.generation, start.step) == (3, 6)
    assert {s.generation for s in start.sources.values()} == {2}


@pytest.mark.parametrize("known", ["steps", "slots"])
def test_starting_over_is_refused(known: str):
    rig = JobRig()
    if known == "steps":
        rig.state = replace(rig.state, steps_max=Step(7))
    else:
        rig.set_rank(0, snapshots=held((1, 4)))
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    (ended,) = rig.all_of(JobEnded)
    assert (ended.status, ended.exit_code) == ("failed", EXIT_USER_ERROR)
    assert "refusing to start over" in ended.reason
    assert not rig.all_of(GenerationOpened)


def test_nodes_that_do_not_join_in_time_end_the_job():
    rig = JobRig()
    rig.hello(0)
    rig.report(0)
    rig.tick(599.0)
    assert phase(rig) is Phase.FORMING
    rig.tick(2.0)
    assert "node 1 did not join" in rig.all_of(JobEnded)[0].reason


def test_nodes_that_do_not_join_in_time_end_the_job_in_a_recovery_too():
    rig = JobRig()
    rig.hello(0)
    rig.report(0)
    rig.fault(FaultKind.KILL, 0, generation=NO_GENERATION)
    rig.replace(0)
    rig.tick(601.0)
    assert "node 1 did not join" in rig.all_of(JobEnded)[0].reason


def test_a_slow_rank_is_not_a_node_that_did_not_join():
    rig = JobRig()
    rig.set_rank(3, state=RankState.STARTING)
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    rig.tick(601.0)
    assert phase(rig) is Phase.FORMING


@pytest.mark.parametrize("told_late", [False, True])
def test_a_rank_that_died_while_forming_does_not_count_as_arrived(told_late: bool):
    """Its agent says so at once, before the report of its levels, or only after the opening."""
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
    rig.report(0)
    if told_late:
        rig.report(1)
        assert phase(rig) is Phase.STARTING
    else:
        rig.set_rank(3, state=RankState.STARTING)
        rig.report(1)
    rig.fault(FaultKind.KILL, 0, generation=NO_GENERATION)
    rig.set_rank(3, state=RankState.READY)
    if told_late:
        rig.leave(1, 2, 3, step=0)
    rig.report(1)
    assert phase(rig) is Phase.RECOVERING, "rank 0 is dead, whatever its last report says"
    generation = rig.state.generation
    rig.set_rank(0, state=RankState.ABSENT, pid=0)
    rig.report(0)
    rig.replace(0)
    assert phase(rig) is Phase.STARTING
    assert rig.state.generation == generation + 1
    assert rig.now_of(GenerationOpened)[0].incarnations[0] == 2


def test_a_fresh_agent_does_not_count_with_the_reports_of_the_one_before():
    rig = JobRig()
    rig.hello(1)
    rig.report(1)
    rig.lose(1)
    rig.hello(0)
    rig.report(0)
    assert phase(rig) is Phase.FORMING
    rig.hello(1, pid=99)
    assert phase(rig) is Phase.FORMING, "its ranks have not reported yet"
    assert rig.now_of(Welcome)[0].ranks == {2: 1, 3: 1}


def test_a_user_exception_while_forming_ends_the_job_at_once():
    rig = JobRig()
    rig.hello(0)
    rig.report(0)
    rig.fault(FaultKind.EXCEPTION, 1, generation=NO_GENERATION, step=Step(0), error=USER_ERROR)
    (ended,) = rig.all_of(JobEnded)
    assert ended.exit_code == EXIT_USER_ERROR
    assert rig.state.end is not None and rig.state.end.fault is not None
    assert rig.state.end.fault.error == USER_ERROR


def test_a_process_that_ends_again_and_again_while_forming_spends_the_budget():
    rig = JobRig(per_hour=4)
    rig.hello(0)
    rig.report(0)
    for _ in range(20):
        rig.fault(FaultKind.EXIT, 1, generation=NO_GENERATION, step=Step(0))
        rig.replace(1)
        if rig.state.end is not None:
            break
    (ended,) = rig.all_of(JobEnded)
    assert ended.exit_code == EXIT_TRY_AGAIN
    assert "budget" in ended.reason
    assert len(rig.all_of(DecisionMade)) == 5


# --- opening -------------------------------------------------------------------------------------


def test_an_opening_is_durable_before_anybody_hears_of_it():
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    kinds = [type(o) for o in rig.outputs]
    assert kinds[0] is Persist
    assert isinstance(rig.outputs[0].event, GenerationOpened)
    assert kinds.index(Persist) < kinds.index(SendToNode)


def test_running_is_when_every_rank_has_resumed():
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    for number in (0, 1, 2):
        rig.resumed(number)
        rig.beat(0, 0)
        rig.beat(1, 0)
    assert phase(rig) is Phase.STARTING, "a heartbeat is not a resumed rank"
    rig.resumed(3)
    assert phase(rig) is Phase.RUNNING
    assert rig.now_of(GenerationRunning) == [GenerationRunning(generation=1, step=0)]


def test_generations_meet_at_the_nodes_in_turn():
    rig = JobRig().start()
    hosts = [rig.state.start.store_host]
    for number in range(3):
        rig.fault(FaultKind.EXCEPTION, number, error=error_of(ErrorClass.MEMORY))
        rig.leave(0, 1, 2, 3)
        hosts.append(rig.state.start.store_host)
        rig.enter()
    assert hosts == ["host-1", "host-0", "host-1", "host-0"]


# --- nodes ---------------------------------------------------------------------------------------


def test_a_short_absence_is_no_fault_and_the_node_is_told_where_the_job_stands():
    rig = JobRig().start()
    rig.lose(1)
    assert rig.now_of(NodeLeft)
    rig.tick(5.0)
    rig.hello(1)
    assert phase(rig) is Phase.RUNNING
    assert rig.now_of(StartGeneration) == [rig.state.start], "it may not have heard of it"
    assert not rig.all_of(FaultSeen)


def test_a_silent_node_is_lost_and_one_that_speaks_again_is_back():
    rig = JobRig().start()
    rig.now += 11.0
    rig.beat(0, 5)
    rig.tick_raw()
    assert [left.node for left in rig.now_of(NodeLeft)] == [1]
    rig.beat(1, 5)
    assert [joined.node for joined in rig.now_of(NodeJoined)] == [1]
    assert rig.now_of(Welcome), "asked to say again how it stands"


def test_a_node_away_for_long_is_a_fault_and_its_ranks_come_fresh():
    rig = JobRig().start()
    rig.lose(1)
    rig.tick(11.0)
    (seen,) = rig.all_of(FaultSeen)
    assert (seen.kind, seen.rank, seen.node) == ("node", None, 1)
    rig.leave(0, 1)
    assert phase(rig) is Phase.RECOVERING
    rig.hello(1, pid=99)
    assert rig.now_of(Welcome)[0].ranks == {2: 1, 3: 1}
    rig.replace(2)
    rig.replace(3)
    assert phase(rig) is Phase.STARTING
    rig.enter()
    (event,) = rig.all_of(Recovered)
    assert (event.kind, event.survivors_kept_pid) == ("node", True)


def test_a_node_that_left_in_a_recovery_and_is_back_gets_fresh_processes():
    """Its ranks say quiet, and are ended by the order that it missed: they do not count."""
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.lose(1)
    rig.leave(0, 1)
    rig.hello(1)
    orders = [(r.rank, r.incarnation) for r in rig.now_of(Interrupt)[0].replace]
    assert orders == [(2, 1), (3, 1)]
    rig.leave(2, 3)
    assert phase(rig) is Phase.RECOVERING
    rig.replace(2, 3)
    assert phase(rig) is Phase.STARTING


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_fresh_agent_within_the_silence_is_a_fault_at_once(nodes: int):
    rig = JobRig(nodes=nodes).start()
    last = nodes - 1
    rig.lose(last)
    rig.tick(1.0)
    rig.hello(last, pid=99)
    assert phase(rig) is Phase.RECOVERING
    assert [(s.kind, s.node) for s in rig.all_of(FaultSeen)] == [("node", last)]


def test_who_is_away_when_everybody_is_interrupted_comes_back_fresh():
    """Both agents died; the first one to be back is the fault, the other one is lost with it."""
    rig = JobRig().start()
    rig.lose(0)
    rig.lose(1)
    rig.hello(0, pid=98)
    assert {s.node for s in rig.all_of(FaultSeen)} == {0, 1}
    rig.replace(0, 1)
    rig.hello(1, pid=99)
    rig.replace(2, 3)
    rig.enter()
    assert rig.all_of(Recovered)[0].survivors_kept_pid


def coordinator_back() -> JobRig:
    """A coordinator that has its journal, and ranks that have trained on meanwhile."""
    rig = JobRig()
    lineage = Lineage().opened(Generation(1), Step(0)).opened(Generation(2), Step(5))
    rig.state = replace(rig.state, generation=Generation(2), lineage=lineage, steps_max=Step(5))
    for r in rig.reports:
        rig.set_rank(
            r,
            state=RankState.ACTIVE,
            generation=Generation(2),
            step=Step(7),
            snapshots=held((2, 6), (2, 7)),
        )
    return rig


def test_a_coordinator_that_comes_back_adopts_the_ranks_that_train():
    rig = coordinator_back()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    assert phase(rig) is Phase.RUNNING
    assert not rig.all_of(Interrupt) and not rig.all_of(GenerationOpened)
    for number in range(4):
        rig.returned(number)
    assert rig.all_of(JobEnded)[0].status == "finished"


def test_a_rank_that_returns_before_every_node_is_back_is_not_forgotten():
    rig = coordinator_back()
    rig.hello(1)
    rig.report(1)
    rig.returned(3)
    assert not rig.now_of(Dropped)
    rig.hello(0)
    rig.report(0)
    assert phase(rig) is Phase.RUNNING
    for number in (0, 1, 2):
        rig.returned(number)
    assert rig.all_of(JobEnded)[0].status == "finished"


def test_a_coordinator_that_comes_back_to_half_a_generation_opens_a_new_one():
    rig = coordinator_back()
    rig.set_rank(1, state=RankState.QUIET)
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    assert phase(rig) is Phase.RECOVERING
    assert [s.kind for s in rig.all_of(FaultSeen)] == [FaultKind.COORDINATOR]
    rig.leave(0, 1, 2, 3, step=7)
    rig.tick(1.0)
    start = rig.state.start
    assert start is not None
    assert (start.generation, start.step) == (3, 7)


def test_a_process_that_is_no_more_is_a_fault_by_its_level_alone():
    rig = JobRig().start()
    rig.set_rank(3, state=RankState.ABSENT, pid=0)
    rig.report(1)
    (seen,) = rig.all_of(FaultSeen)
    assert (seen.kind, seen.rank) == ("exit", 3)
    assert [(r.rank, r.incarnation) for r in rig.state_orders(1)] == [(3, 1)]


def test_a_node_that_stops_in_order_is_a_fault_at_once():
    rig = JobRig().start()
    rig.set_rank(2, state=RankState.GONE, pid=0)
    rig.set_rank(3, state=RankState.GONE, pid=0)
    rig.report(1)
    assert phase(rig) is Phase.RECOVERING
    rig.from_node(1, Bye(node=NodeId(1)))
    rig.lose(1)
    rig.leave(0, 1)
    rig.hello(1, pid=99)
    rig.replace(2, 3)
    assert phase(rig) is Phase.STARTING


def test_an_old_ready_on_the_way_is_no_missing_process():
    rig = JobRig()
    for n in (0, 1):
        rig.hello(n)
        rig.report(n)
    rig.report(0, heard=0)
    assert phase(rig) is Phase.STARTING


def test_a_node_that_stays_away_ends_the_job_with_try_again():
    rig = JobRig().start()
    rig.lose(1)
    for _ in range(13):
        rig.tick(10.0)
    (ended,) = rig.all_of(JobEnded)
    assert ended.exit_code == EXIT_TRY_AGAIN
    assert "node 1 did not come back" in ended.reason


# --- logs and notes ------------------------------------------------------------------------------


def test_each_logged_step_is_recorded_once():
    rig = JobRig().start()
    for step in (1, 2, 2, 1, 3):
        logged = (LoggedStep(step=Step(step), values={"loss": 1.0}),)
        rig.from_node(0, Heartbeat(node=NodeId(0), steps={}, logged=logged))
    assert [s.step for s in rig.all_of(StepLogged)] == [1, 2, 3]


def test_progress_refills_the_budget():
    rig = JobRig().start()
    rig.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1, 2, 3)
    rig.enter()
    assert rig.state.budget.tokens == pytest.approx(29.0)
    rig.beat(0, 7)
    assert rig.state.steps_max == 5, "not before every rank"
    rig.beat(1, 6)
    assert rig.state.steps_max == 6
    assert rig.state.budget.tokens == 30.0


def test_a_note_becomes_an_event():
    rig = JobRig().start()
    rig.from_node(1, Noted(node=NodeId(1), topic="x", text="y", rank=Rank(2)))
    assert rig.now_of(Note) == [Note(topic="x", text="y", node=1, rank=2)]


# --- the end -------------------------------------------------------------------------------------


def test_the_job_has_finished_when_every_rank_returned():
    rig = JobRig().start()
    for number in (0, 1, 2):
        rig.returned(number)
    assert phase(rig) is Phase.RUNNING
    rig.returned(3)
    (ended,) = rig.all_of(JobEnded)
    assert (ended.status, ended.exit_code, ended.steps) == ("finished", 0, 9)
    assert [m.finished for m in rig.now_of(FinishJob)] == [True, True]
    for n in (0, 1):
        rig.from_node(n, Bye(node=NodeId(n)))
    assert [e.exit_code for e in rig.now_of(EndProcess)] == [0]


def test_the_final_digest_does_not_depend_on_the_order_of_messages():
    digests = set()
    for order in permutations(range(4)):
        rig = JobRig().start()
        for number in order:
            rig.returned(number)
        digests.add(rig.all_of(JobEnded)[0].final_digest)
    assert len(digests) == 1


def test_an_incident_is_closed_before_the_job_ends():
    """A rank died after it had returned: the generation after it has no step to do."""
    rig = JobRig().start()
    rig.returned(0)
    rig.fault(FaultKind.KILL, 1)
    rig.leave(0, 2, 3)
    rig.replace(1)
    for number in range(4):
        rig.resumed(number)
        rig.returned(number)
    kinds = [type(e) for e in rig.all_of((Recovered, JobEnded))]
    assert kinds == [Recovered, JobEnded]


def test_a_fault_after_the_end_is_a_note():
    rig = JobRig().start()
    for number in range(4):
        rig.returned(number)
    rig.fault(FaultKind.KILL, 2)
    assert [n.topic for n in rig.now_of(Note)] == ["after the end"]
    assert not rig.all_of(FaultSeen)


def test_the_job_ends_exactly_once():
    rig = JobRig().start()
    rig.feed(StopRequested("Ctrl-C", 130))
    rig.feed(StopRequested("Ctrl-C", 130))
    for number in range(4):
        rig.returned(number)
    for n in (0, 1):
        rig.from_node(n, Bye(node=NodeId(n)))
        rig.lose(n)
    rig.tick(1.0)
    rig.tick(100.0)
    assert len(rig.all_of(JobEnded)) == 1
    assert len(rig.all_of(EndProcess)) == 1


def test_a_node_that_does_not_say_goodbye_is_not_waited_for_for_ever():
    rig = JobRig().start()
    rig.feed(StopRequested("Ctrl-C", 130))
    rig.from_node(0, Bye(node=NodeId(0)))
    rig.tick(5.0)
    assert phase(rig) is Phase.ENDING
    rig.tick(2.0)
    assert [e.exit_code for e in rig.now_of(EndProcess)] == [130]


def test_a_node_that_is_away_at_the_end_is_told_when_it_is_back():
    rig = JobRig().start()
    rig.lose(1)
    rig.feed(StopRequested("Ctrl-C", 130))
    rig.from_node(0, Bye(node=NodeId(0)))
    assert phase(rig) is Phase.ENDING
    rig.hello(1)
    assert [m.finished for m in rig.now_of(FinishJob)] == [False]
    rig.from_node(1, Bye(node=NodeId(1)))
    assert phase(rig) is Phase.ENDED


def test_a_stop_does_not_wait_for_code_behind_the_function():
    rig = JobRig().start()
    for number in range(4):
        rig.returned(number)
    rig.tick(100.0)
    assert phase(rig) is Phase.ENDING
    rig.feed(StopRequested("Ctrl-C", 130))
    assert [m.finished for m in rig.now_of(FinishJob)] == [False, False]
    rig.tick(7.0)
    assert [e.exit_code for e in rig.now_of(EndProcess)] == [0], "it had finished"


@pytest.mark.parametrize("where", ["empty", "forming", "starting", "running", "recovering"])
def test_a_stop_ends_the_job_in_every_phase(where: str):
    rig = JobRig()
    if where == "forming":
        rig.hello(0)
        rig.report(0)
    elif where == "starting":
        for n in (0, 1):
            rig.hello(n)
            rig.report(n)
    elif where != "empty":
        rig.start()
        if where == "recovering":
            rig.fault(FaultKind.KILL, 1)
    rig.feed(StopRequested("SIGTERM", 143))
    (ended,) = rig.all_of(JobEnded)
    assert (ended.status, ended.exit_code) == ("stopped", 143)
    for n in rig.state.membership.connected_nodes:
        rig.from_node(n, Bye(node=n))
    rig.tick(7.0)
    assert [e.exit_code for e in rig.all_of(EndProcess)] == [143]
