"""The rank's machine: how one process goes through generations. `step(state, input, now)`.

    ENTERING -> WAITING -> ACTIVE -> (returned) RETURNED -> ENDING
                   ^          | raised or told to leave
                   +- LEAVING <

Owns: when the main thread is woken, released, or the process ended. Does not own: threads, signals,
groups. Invariants: the main thread runs user code only while ACTIVE or LEAVING; a generation is
left once and reported quiet once; an order of an older generation changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from stepfast.core.faults import ErrorClass, ExceptionReport
from stepfast.core.messages import (
    RankDigests,
    RankEntered,
    RankFinish,
    RankLeave,
    RankNoted,
    RankQuiet,
    RankRaised,
    RankReturned,
    RankStart,
    TensorDigest,
)
from stepfast.core.outputs import (
    AbortGroups,
    EndProcess,
    Output,
    ReleaseMain,
    SendToAgent,
    SignalMain,
)
from stepfast.core.terms import NO_GENERATION, Generation, Rank, Step
from stepfast.errors import EXIT_TRY_AGAIN

# a signal can be swallowed (a destructor, a callback); it is sent until the thread arrives
_DIGESTS_PER_MESSAGE = 200  # of at most some 400 bytes each, so that a message keeps its limit
_SIGNAL_INTERVAL_S = 0.02


class Place(StrEnum):
    """Where the main thread is."""

    ENTERING = "entering"  # runs the script's own top level
    WAITING = "waiting"  # in the wrapper, out of any generation
    ACTIVE = "active"  # runs the user's function
    LEAVING = "leaving"  # still runs it, and is being got out
    RETURNED = "returned"  # in the wrapper; the generation's groups still stand
    ENDING = "ending"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """Everything the rank's decisions depend on."""

    pid: int
    interrupt_grace_s: float
    place: Place = Place.ENTERING
    rank: Rank = Rank(0)
    generation: Generation = NO_GENERATION  # the one being run, or last left
    left_at: float | None = None  # when the first sign to leave came
    signal_at: float | None = None
    finish: RankFinish | None = None


@dataclass(frozen=True, slots=True)
class MainEntered:
    """Input: the main thread reached the resilient function."""


@dataclass(frozen=True, slots=True)
class MainReturned:
    """Input: the user's function returned."""

    step: Step
    digests: tuple[TensorDigest, ...]


@dataclass(frozen=True, slots=True)
class MainRaised:
    """Input: an exception came out of it (or out of the script, before)."""

    step: Step
    error: ExceptionReport


@dataclass(frozen=True, slots=True)
class MainInterrupted:
    """Input: `Interrupted` came out of it."""


@dataclass(frozen=True, slots=True)
class MainQuiet:
    """Input: the generation's groups are dissolved."""

    keep_obstacle: str | None
    build_has_collectives: bool
    unusable: str | None = None  # why this process can be in no other generation


@dataclass(frozen=True, slots=True)
class Ordered:
    """Input: an order of the agent."""

    order: RankStart | RankLeave | RankFinish


@dataclass(frozen=True, slots=True)
class AgentLost:
    """Input: the agent is gone; nobody could stop or restart this process any more."""


@dataclass(frozen=True, slots=True)
class RankTick:
    """Input: time went by."""


RankInput = (
    MainEntered
    | MainReturned
    | MainRaised
    | MainInterrupted
    | MainQuiet
    | Ordered
    | AgentLost
    | RankTick
)


def step(
    state: ProcessState, given: RankInput, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    """One step of the rank. Pure; `now` is monotonic seconds of this machine."""
    match given:
        case MainEntered():
            return _entered(state)
        case MainReturned():
            return _returned(state, given)
        case MainRaised():
            return _raised(state, given, now)
        case MainInterrupted():
            return _arrived(state)
        case MainQuiet():
            return _quiet(state, given, now)
        case Ordered(order):
            return _ordered(state, order, now)
        case AgentLost():
            return replace(state, place=Place.ENDING), (
                EndProcess(EXIT_TRY_AGAIN, "the agent is gone"),
            )
        case RankTick():
            return _tick(state, now)


def next_deadline(state: ProcessState) -> float | None:
    """When the next tick is due; None: no tick is needed."""
    return state.signal_at


def _entered(state: ProcessState) -> tuple[ProcessState, tuple[Output, ...]]:
    if state.finish is not None:
        return replace(state, place=Place.ENDING), (ReleaseMain(state.finish),)
    return replace(state, place=Place.WAITING), (SendToAgent(RankEntered(pid=state.pid)),)


def _returned(state: ProcessState, given: MainReturned) -> tuple[ProcessState, tuple[Output, ...]]:
    if state.place is Place.LEAVING:
        return _arrived(state)
    assert state.place is Place.ACTIVE, f"returned while {state.place}"
    parts = (
        SendToAgent(
            RankDigests(
                generation=state.generation, digests=given.digests[at : at + _DIGESTS_PER_MESSAGE]
            )
        )
        for at in range(0, len(given.digests), _DIGESTS_PER_MESSAGE)
    )
    told = RankReturned(generation=state.generation, rank=state.rank, step=given.step, digests=())
    return replace(state, place=Place.RETURNED), (*parts, SendToAgent(told))


def _raised(
    state: ProcessState, given: MainRaised, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    told = SendToAgent(RankRaised(generation=state.generation, step=given.step, error=given.error))
    if state.place in (Place.ENTERING, Place.ENDING):
        return state, (told,)  # the script failed outside the function; the process ends by it
    if state.place is Place.LEAVING:
        # Told to leave already: what rises now is mostly a consequence. Said, and not held against
        # anybody.
        text = f"{given.error.type}: {given.error.message}"
        quiet = given.error.error_class is ErrorClass.COLLECTIVE
        note = () if quiet else (SendToAgent(RankNoted(topic="raised while leaving", text=text)),)
        left, outputs = _arrived(state)
        return left, (*note, *outputs)
    left = replace(state, place=Place.LEAVING, left_at=now, signal_at=None)
    return left, (AbortGroups(state.generation), told)


def _arrived(state: ProcessState) -> tuple[ProcessState, tuple[Output, ...]]:
    """The main thread is in the wrapper; it dissolves the groups next and then says that it is
    quiet.
    """
    return replace(state, signal_at=None), ()


def _quiet(
    state: ProcessState, given: MainQuiet, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    if state.place is not Place.LEAVING:
        return state, ()  # told already: an order to leave and the function's own end crossed
    told = RankQuiet(
        generation=state.generation,
        keep_obstacle=given.keep_obstacle,
        build_has_collectives=given.build_has_collectives,
        interrupt_s=now - state.left_at if state.left_at is not None else 0.0,
        unusable=given.unusable,
    )
    if state.finish is not None:
        return replace(state, place=Place.ENDING), (ReleaseMain(state.finish),)
    waiting = replace(state, place=Place.WAITING, left_at=None, signal_at=None)
    return waiting, (SendToAgent(told),)


def _ordered(
    state: ProcessState, order: RankStart | RankLeave | RankFinish, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    match order:
        case RankStart():
            if state.place is not Place.WAITING or order.generation <= state.generation:
                return state, ()
            active = replace(
                state, place=Place.ACTIVE, generation=order.generation, rank=order.rank
            )
            return active, (ReleaseMain(order),)
        case RankLeave(generation=generation):
            if generation < state.generation:
                return state, ()
            return _leave(state, order, now)
        case RankFinish():
            return _finish(state, order, now)


def _leave(
    state: ProcessState, order: RankLeave, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    if state.place is Place.RETURNED:
        left = replace(state, place=Place.LEAVING, left_at=now)
        return left, (AbortGroups(state.generation), ReleaseMain(order))
    if state.place is not Place.ACTIVE:
        return state, ()
    left = replace(state, place=Place.LEAVING, left_at=now, signal_at=now + state.interrupt_grace_s)
    return left, (AbortGroups(state.generation),)


def _finish(
    state: ProcessState, order: RankFinish, now: float
) -> tuple[ProcessState, tuple[Output, ...]]:
    """Finished: go on behind the function. Otherwise get out and end; a script not yet entered ends
    at once.
    """
    match state.place:
        case Place.ENTERING | Place.ENDING:
            if order.finished:
                return state, ()
            return replace(state, finish=order), (EndProcess(EXIT_TRY_AGAIN, "the job is over"),)
        case Place.WAITING | Place.RETURNED:
            ending = replace(state, place=Place.ENDING, finish=order)
            return ending, (ReleaseMain(order),)
        case Place.ACTIVE | Place.LEAVING:
            signal_at = state.signal_at if state.signal_at is not None else now
            left_at = state.left_at if state.left_at is not None else now
            leaving = replace(
                state, place=Place.LEAVING, finish=order, left_at=left_at, signal_at=signal_at
            )
            return leaving, (AbortGroups(state.generation),)


def _tick(state: ProcessState, now: float) -> tuple[ProcessState, tuple[Output, ...]]:
    if state.place is not Place.LEAVING or state.signal_at is None or now < state.signal_at:
        return state, ()
    again = replace(state, signal_at=now + _SIGNAL_INTERVAL_S)
    return again, (AbortGroups(state.generation), SignalMain(state.generation))
