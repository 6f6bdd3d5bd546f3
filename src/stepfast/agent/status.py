"""What an agent says of itself over HTTP: whether its loop turns, whether it holds its connection.

Owns: the pages. Does not own: the numbers (`observe.node_metrics`), the port that shows them.
Invariants: no page waits for the event loop, so an agent that hangs is said to hang; no page of
health depends on whether training gets on, which is the job's to judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from stepfast.core.messages import FromRank, PhaseBegan, RankState
from stepfast.core.node_state import LocalRank, NodeState
from stepfast.core.terms import NO_GENERATION
from stepfast.core.timeouts import TURN
from stepfast.observe.exposition import CONTENT_TYPE
from stepfast.observe.node_metrics import NodeLevels, NodeMetrics
from stepfast.runtime.ports import Clock
from stepfast.runtime.status_port import Page, alive

_IN_GENERATION = (RankState.ACTIVE, RankState.RETURNED)


class NodeStatus:
    """The pages of one agent. Told by the loop, asked from any thread."""

    def __init__(self, clock: Clock, state: Callable[[], NodeState]) -> None:
        """`state`: as it stands; it is replaced whole, never changed."""
        self._clock = clock
        self._state = state
        self._metrics = NodeMetrics()
        self._turned_at = clock.monotonic()
        self.health: Mapping[str, str] = {}  # the last verdict of each check; replaced whole

    def turned(self) -> None:
        """The loop came by."""
        self._turned_at = self._clock.monotonic()

    def heard(self, local: LocalRank | None, message: FromRank) -> None:
        """A rank said something; `local` is as it was before."""
        if not isinstance(message, PhaseBegan) or message.turn_s is None or local is None:
            return
        if local.turn_phase == TURN and local.generation == message.generation:
            self._metrics.turn_took(message.turn_s)

    def metrics(self) -> Page:
        """For Prometheus."""
        levels = levels_of(self._state(), self.health)
        return Page(self._metrics.page(levels), content_type=CONTENT_TYPE)

    def livez(self) -> Page:
        """Whether this process can do anything at all."""
        return alive(self._clock.monotonic() - self._turned_at)

    def healthz(self) -> Page:
        """Whether the coordinator can tell it anything, too."""
        page = self.livez()
        if page.is_ok and not self._state().connected:
            return Page("not connected to the coordinator\n", is_ok=False)
        return page

    def pages(self) -> Mapping[str, Callable[[], Page]]:
        """By path."""
        return {"/livez": self.livez, "/healthz": self.healthz, "/metrics": self.metrics}


def levels_of(state: NodeState, health: Mapping[str, str]) -> NodeLevels:
    """What metrics say of the node's state."""
    ranks = state.ranks.values()
    steps = [local.step for local in ranks if local.state in _IN_GENERATION]
    return NodeLevels(
        generation=max((local.generation for local in ranks), default=NO_GENERATION),
        step=min(steps, default=0),
        ranks=Counter(local.state for local in ranks),
        is_connected=state.connected,
        health=health,
    )
