"""One process's way through generations: every input at every place does what it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepfast.core import rank as machine
from stepfast.core.faults import ErrorClass
from stepfast.core.messages import (
    RankEntered,
    RankFinish,
    RankLeave,
    RankNoted,
    RankQuiet,
    RankRaised,
    RankReturned,
    RankStart,
)
from stepfast.core.outputs import AbortGroups, EndProcess, ReleaseMain, SendToAgent, SignalMain
from stepfast.core.rank import (
    AgentLost,
    MainEntered,
    MainInterrupted,
    MainQuiet,
    MainRaised,
    MainReturned,
    Ordered,
    Place,
    RankTick,
)
from stepfast.core.terms import Generation, NodeId, Rank, Step
from unit.core.rigs import RankRig, error_of, settings


def start(generation: int) -> RankStart:
    return RankStart(
        generation=Generation(generation),
        rank=Rank(2),
        local_rank=0,
        world_size=4,
        local_world_size=2,
        node=NodeId(1),
        step=Step(5),
        source=None,
        store_host="host",
        store_port=7000,
        keep=False,
        slot_directory="slots",
        log_path="log",
        settings=settings(),
    )


LEAVE = Ordered(RankLeave(generation=Generation(3)))
OLD_LEAVE = Ordered(RankLeave(generation=Generation(2)))
START, OLD_START = Ordered(start(4)), Ordered(start(3))
FINISHED, END = Ordered(RankFinish(finished=True)), Ordered(RankFinish(finished=False))
RAISED = MainRaised(Step(5), error_of(ErrorClass.USER))
COLLATERAL = MainRaised(Step(5), error_of(ErrorClass.COLLECTIVE))
RETURNED = MainReturned(Step(9), ())
QUIET = MainQuiet(None, False)


def at(place: Place, **changes: Any) -> RankRig:
    """A rig whose process is there, in generation 3 (or out of it)."""
    rig = RankRig()
    signal_at = rig.now + 0.03 if place is Place.LEAVING else None
    rig.state = replace(
        rig.state, place=place, generation=Generation(3), rank=Rank(2), signal_at=signal_at
    )
    rig.state = replace(rig.state, **changes)
    return rig


def shape(outputs: list[Any]) -> list[Any]:
    """Outputs as what they are, messages by their type."""
    return [type(o.message) if isinstance(o, SendToAgent) else type(o) for o in outputs]


SAME = "same"
# (place, input) -> (place after, outputs). What is not named here can not happen: the main thread
# is somewhere else by then.
TABLE: list[tuple[Place, Any, Place, list[Any]]] = [
    (Place.ENTERING, MainEntered(), Place.WAITING, [RankEntered]),
    (Place.ENTERING, RAISED, Place.ENTERING, [RankRaised]),
    (Place.ENTERING, START, Place.ENTERING, []),
    (Place.ENTERING, LEAVE, Place.ENTERING, []),
    (Place.ENTERING, FINISHED, Place.ENTERING, []),
    (Place.ENTERING, END, Place.ENTERING, [EndProcess]),
    (Place.ENTERING, RankTick(), Place.ENTERING, []),
    (Place.WAITING, START, Place.ACTIVE, [ReleaseMain]),
    (Place.WAITING, OLD_START, Place.WAITING, []),
    (Place.WAITING, LEAVE, Place.WAITING, []),
    (Place.WAITING, FINISHED, Place.ENDING, [ReleaseMain]),
    (Place.WAITING, END, Place.ENDING, [ReleaseMain]),
    (Place.WAITING, QUIET, Place.WAITING, []),
    (Place.WAITING, RankTick(), Place.WAITING, []),
    (Place.ACTIVE, RETURNED, Place.RETURNED, [RankReturned]),
    (Place.ACTIVE, RAISED, Place.LEAVING, [RankRaised, AbortGroups]),
    (Place.ACTIVE, COLLATERAL, Place.LEAVING, [RankRaised, AbortGroups]),
    (Place.ACTIVE, LEAVE, Place.LEAVING, [AbortGroups]),
    (Place.ACTIVE, OLD_LEAVE, Place.ACTIVE, []),
    (Place.ACTIVE, START, Place.ACTIVE, []),
    (Place.ACTIVE, FINISHED, Place.LEAVING, [AbortGroups]),
    (Place.ACTIVE, END, Place.LEAVING, [AbortGroups]),
    (Place.ACTIVE, QUIET, Place.ACTIVE, []),
    (Place.ACTIVE, RankTick(), Place.ACTIVE, []),
    (Place.LEAVING, MainInterrupted(), Place.LEAVING, []),
    (Place.LEAVING, RETURNED, Place.LEAVING, []),
    (Place.LEAVING, RAISED, Place.LEAVING, [RankNoted]),
    (Place.LEAVING, COLLATERAL, Place.LEAVING, []),
    (Place.LEAVING, LEAVE, Place.LEAVING, []),
    (Place.LEAVING, START, Place.LEAVING, []),
    (Place.LEAVING, QUIET, Place.WAITING, [RankQuiet]),
    (Place.LEAVING, END, Place.LEAVING, [AbortGroups]),
    (Place.LEAVING, RankTick(), Place.LEAVING, []),
    (Place.RETURNED, LEAVE, Place.LEAVING, [AbortGroups, ReleaseMain]),
    (Place.RETURNED, OLD_LEAVE, Place.RETURNED, []),
    (Place.RETURNED, START, Place.RETURNED, []),
    (Place.RETURNED, FINISHED, Place.ENDING, [ReleaseMain]),
    (Place.RETURNED, END, Place.ENDING, [ReleaseMain]),
    (Place.RETURNED, RankTick(), Place.RETURNED, []),
    (Place.ENDING, START, Place.ENDING, []),
    (Place.ENDING, LEAVE, Place.ENDING, []),
    (Place.ENDING, FINISHED, Place.ENDING, []),
    (Place.ENDING, END, Place.ENDING, [EndProcess]),
    (Place.ENDING, RAISED, Place.ENDING, [RankRaised]),
    (Place.ENDING, QUIET, Place.ENDING, []),
    (Place.ENDING, RankTick(), Place.ENDING, []),
]


@pytest.mark.parametrize(
    ("place", "given", "after", "outputs"),
    TABLE,
    ids=[f"{p}-{i}-{type(g).__name__}" for i, (p, g, _, _) in enumerate(TABLE)],
)
def test_every_input_at_every_place(place: Place, given: Any, after: Place, outputs: list[Any]):
    rig = at(place)
    assert shape(rig.feed(given)) == outputs
    assert rig.state.place is after


@pytest.mark.parametrize("place", list(Place))
def test_without_an_agent_the_process_ends_wherever_it_is(place: Place):
    rig = at(place)
    assert shape(rig.feed(AgentLost())) == [EndProcess]
    assert rig.state.place is Place.ENDING


@pytest.mark.parametrize("place", [p for p in Place if p not in (Place.ACTIVE, Place.LEAVING)])
def test_a_function_that_does_not_run_can_not_return(place: Place):
    with pytest.raises(AssertionError):
        at(place).feed(RETURNED)


def test_the_signal_comes_after_the_grace_and_until_the_thread_arrives():
    rig = at(Place.ACTIVE)
    rig.feed(LEAVE)
    assert machine.next_deadline(rig.state) == pytest.approx(rig.now + 0.03)
    rig.now += 0.02
    assert rig.feed(RankTick()) == []
    for _ in range(3):
        rig.now = machine.next_deadline(rig.state)
        assert shape(rig.feed(RankTick())) == [AbortGroups, SignalMain]
    rig.feed(MainInterrupted())
    assert machine.next_deadline(rig.state) is None
    rig.now += 1.0
    assert rig.feed(RankTick()) == []


def test_quiet_says_how_long_leaving_took():
    rig = at(Place.ACTIVE)
    rig.feed(LEAVE)
    rig.now += 0.5
    rig.feed(MainInterrupted())
    quiet = MainQuiet("a mesh of one's own", True, "a CUDA graph")
    (told,) = [o.message for o in rig.feed(quiet)]
    assert told.interrupt_s == pytest.approx(0.5)
    assert (told.generation, told.keep_obstacle) == (3, "a mesh of one's own")
    assert told.build_has_collectives and told.unusable == "a CUDA graph"


def test_one_generation_after_the_other():
    rig = RankRig()
    rig.feed(MainEntered())
    for generation in (1, 2, 5):
        rig.feed(Ordered(start(generation)))
        assert rig.state.place is Place.ACTIVE
        rig.feed(Ordered(RankLeave(generation=Generation(generation))))
        rig.feed(MainInterrupted())
        rig.feed(QUIET)
    told = [m.generation for m in rig.all_of(RankQuiet)]
    assert told == [1, 2, 5]


def test_leaving_is_reported_quiet_once_where_return_and_order_cross():
    """The order finds the function returned, the main thread finds itself leaving: both come."""
    rig = at(Place.ACTIVE)
    rig.feed(RETURNED)
    rig.feed(LEAVE)
    rig.feed(QUIET)
    rig.feed(START)
    assert rig.feed(QUIET) == []
    assert rig.state.place is Place.ACTIVE
    assert len(rig.all_of(RankQuiet)) == 1


def test_an_end_while_running_waits_for_the_main_thread():
    rig = at(Place.ACTIVE)
    rig.feed(END)
    rig.feed(MainInterrupted())
    assert shape(rig.feed(QUIET)) == [ReleaseMain]
    assert rig.state.place is Place.ENDING


def test_an_end_that_came_before_the_function_was_reached():
    rig = RankRig()
    rig.feed(END)
    assert shape(rig.feed(MainEntered())) == [ReleaseMain]
