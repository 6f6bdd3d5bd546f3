"""One step of the node in the making: the state so far and the outputs so far."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from stepfast.core.messages import FromAgent, NodeReport, Noted, RankState, ToRank
from stepfast.core.node_state import LocalRank, NodeState
from stepfast.core.outputs import Output, SendToCoordinator, SendToRank
from stepfast.core.terms import Rank, Step
from stepfast.core.timeouts import LearnedLimits, Timeouts


class NodeTurn:
    """State and outputs of one step; lives for one call of `node.step`."""

    def __init__(self, state: NodeState, now: float) -> None:
        """Begin from `state` at `now`."""
        self.state = state
        self.now = now
        self.outputs: list[Output] = []

    @property
    def timeouts(self) -> Timeouts:
        """The job's limits; known since the welcome."""
        assert self.state.timeouts is not None, "not welcomed yet"
        return self.state.timeouts

    @property
    def limits(self) -> LearnedLimits:
        """What the phases have taken so far."""
        assert self.state.limits is not None, "not welcomed yet"
        return self.state.limits

    def update(self, **changes: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # replace checks

    def set_rank(self, rank: Rank, **changes: object) -> LocalRank:
        """Replace fields of one local rank."""
        local = self.state.ranks[rank]
        local = replace(local, **changes)  # type: ignore[arg-type]  # replace checks
        self.update(ranks={**self.state.ranks, rank: local})
        return local

    def emit(self, output: Output) -> None:
        """Add an output."""
        self.outputs.append(output)

    def tell(self, message: FromAgent) -> None:
        """Add a message to the coordinator."""
        self.emit(SendToCoordinator(message))

    def tell_rank(self, rank: Rank, message: ToRank) -> None:
        """Add a message to a rank."""
        self.emit(SendToRank(rank, message))

    def note(self, topic: str, text: str, rank: Rank | None = None) -> None:
        """Add an event in words."""
        self.tell(Noted(node=self.state.node, topic=topic, text=text, rank=rank))

    def tell_report_if_changed(self) -> None:
        """Say the node's levels where they differ from what was said last; steps alone travel with
        heartbeats.
        """
        if not self.state.connected or self.state.settings is None:
            return
        report = NodeReport(
            node=self.state.node,
            ranks=tuple(local.report() for _, local in sorted(self.state.ranks.items())),
            heard=self.state.heard,
            store_port=self.state.store_port,
            checkpoints=self.state.checkpoints,
            store_below=self.state.store_below,
        )
        if self.state.told is not None and _without_steps(report) == _without_steps(
            self.state.told
        ):
            return
        self.update(told=report)
        self.tell(report)


def _without_steps(report: NodeReport) -> NodeReport:
    """The report without what changes at every turn of the loop."""
    levels = tuple(
        msgspec.structs.replace(r, step=Step(0)) if r.state is RankState.ACTIVE else r
        for r in report.ranks
    )
    return msgspec.structs.replace(report, ranks=levels)
