"""An agent's metrics: the levels of its node's machine, and what turns take on its ranks.

Owns: names, units and meaning of what `/metrics` of an agent says. Names begin with
`stepfast_node_`, so that a sum over a job never counts what the coordinator says as well. Does not
own: the port.
Invariant: one thread may ask while another tells.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from stepfast.core.messages import RankState
from stepfast.observe.exposition import (
    GAUGE,
    HISTOGRAM,
    Family,
    Histogram,
    Sample,
    by_label,
    page,
)
from stepfast.observe.metrics import STEP_BOUNDS_S

VERDICTS = ("healthy", "unhealthy", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLevels:
    """Where a node stands now."""

    generation: int = 0
    step: int = 0  # that all its ranks have completed
    ranks: Counter[RankState] = field(default_factory=Counter)
    is_connected: bool = False
    health: Mapping[str, str] = field(default_factory=dict)  # the last verdict of each check


class NodeMetrics:
    """Everything that an agent's `/metrics` says."""

    def __init__(self) -> None:
        """No turn seen yet."""
        self._lock = threading.Lock()
        self._steps = Histogram(STEP_BOUNDS_S)

    def turn_took(self, seconds: float) -> None:
        """A rank has completed a turn that was not its first in a generation."""
        with self._lock:
            self._steps.observe(seconds)

    def page(self, levels: NodeLevels) -> str:
        """The page. From any thread."""
        return page(self.families(levels))

    def families(self, levels: NodeLevels) -> tuple[Family, ...]:
        """What there is, also what has no sample yet."""
        with self._lock:
            steps = tuple(self._steps.samples())
        ranks = {state.value: levels.ranks[state] for state in RankState}
        health = tuple(
            Sample(float(verdict == found), (("check", check), ("verdict", verdict)))
            for check, found in sorted(levels.health.items())
            for verdict in VERDICTS
        )
        return (
            Family(
                name="stepfast_node_generation",
                kind=GAUGE,
                text="The newest generation that a rank of this node entered.",
                samples=(Sample(levels.generation),),
            ),
            Family(
                name="stepfast_node_step",
                kind=GAUGE,
                text="The newest step that all ranks of this node have completed.",
                samples=(Sample(levels.step),),
            ),
            Family(
                name="stepfast_node_step_seconds",
                kind=HISTOGRAM,
                text="What a step takes on a rank of this node; the first of each generation is not"
                " counted.",
                samples=steps,
            ),
            Family(
                name="stepfast_node_ranks",
                kind=GAUGE,
                text="This node's ranks by the state of their processes.",
                labels=("state",),
                samples=by_label("state", ranks),
            ),
            Family(
                name="stepfast_node_coordinator_connected",
                kind=GAUGE,
                text="1 while the agent holds its connection to the coordinator.",
                samples=(Sample(float(levels.is_connected)),),
            ),
            Family(
                name="stepfast_node_health",
                kind=GAUGE,
                text="The last verdict of each health check: 1 for the one that holds.",
                labels=("check", "verdict"),
                samples=health,
            ),
        )
