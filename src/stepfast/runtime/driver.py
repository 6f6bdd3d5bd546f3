"""The one driver: feeds a machine and performs its outputs, in production and in simulation alike.

Outputs of one step are performed in a fixed order: persist, send, act, record. So what was decided
is durable before anybody hears of it, and others act on it before this process spends time on its
own records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from stepfast.core.outputs import (
    Output,
    Persist,
    Record,
    SendToAgent,
    SendToCoordinator,
    SendToNode,
    SendToRank,
)
from stepfast.runtime.ports import Clock

S = TypeVar("S")
I = TypeVar("I")  # noqa: E741  # the input of the machine; S, I as in (state, input)

_PERSIST, _SEND, _ACT, _RECORD = range(4)
_CLASS_OF: dict[type, int] = {
    Persist: _PERSIST,
    SendToNode: _SEND,
    SendToCoordinator: _SEND,
    SendToRank: _SEND,
    SendToAgent: _SEND,
    Record: _RECORD,
}


class Performer(Protocol):
    """The hands of a shell: does what one output orders; must not raise for a peer that is gone."""

    def perform(self, output: Output) -> None:
        """Carry out one order."""
        ...


def in_order(outputs: tuple[Output, ...]) -> list[Output]:
    """The outputs of one step as they are performed; stable within a class."""
    return sorted(outputs, key=lambda o: _CLASS_OF.get(type(o), _ACT))


class Driver(Generic[S, I]):
    """Holds a machine's state. Not thread-safe: one owner feeds it, or a lock around `feed`
    does.
    """

    def __init__(
        self,
        step: Callable[[S, I, float], tuple[S, tuple[Output, ...]]],
        state: S,
        performer: Performer,
        clock: Clock,
    ) -> None:
        """Begin at `state`."""
        self._step = step
        self._performer = performer
        self._clock = clock
        self.state = state

    def feed(self, given: I) -> None:
        """One step: the state changes first, then the outputs are performed in order."""
        self.state, outputs = self._step(self.state, given, self._clock.monotonic())
        for output in in_order(outputs):
            self._performer.perform(output)
