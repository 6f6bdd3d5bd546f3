"""Who is there: nodes and ranks as levels, folded from what agents report.

Owns: the views and the questions asked of them. Does not own decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from stepfast.core.messages import (
    Bye,
    EvidenceGiven,
    FaultReported,
    FromAgent,
    Heartbeat,
    NodeReport,
    RankReport,
    RankState,
    ShardWritten,
)
from stepfast.core.placement import ranks_of
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What the coordinator knows of one node."""

    host: str
    pid: int
    connected: bool
    seen_at: float
    lost_at: float | None = None
    store_port: int | None = None
    heard: Generation = NO_GENERATION  # what it was told before, its report takes into account
    gone: bool = False  # said goodbye
    knows_checkpoints: bool = True  # it has looked into the checkpoint store

    @property
    def can_host_store(self) -> bool:
        """Whether the next generation could meet here."""
        return self.connected and self.store_port is not None


@dataclass(frozen=True, slots=True)
class Membership:
    """All nodes that ever joined and all ranks they reported."""

    nodes: Mapping[NodeId, NodeView] = field(default_factory=dict)
    ranks: Mapping[Rank, RankReport] = field(default_factory=dict)

    def joined(
        self, node: NodeId, *, host: str, pid: int, now: float, ranks: Collection[Rank]
    ) -> Membership:
        """A node's agent is connected (again). Until it reports, none of its ranks counts as
        there.
        """
        view = NodeView(host=host, pid=pid, connected=True, seen_at=now)
        unknown = {
            r: msgspec.structs.replace(report, state=RankState.ABSENT)
            for r, report in self.ranks.items()
            if r in ranks
        }
        return replace(self, nodes={**self.nodes, node: view}, ranks={**self.ranks, **unknown})

    def seen(self, node: NodeId, now: float) -> Membership:
        """A sign of life."""
        return self._with(node, seen_at=now)

    def lost(self, node: NodeId, now: float) -> Membership:
        """The connection ended; the node may come back."""
        return self._with(node, connected=False, lost_at=now, store_port=None)

    def said_goodbye(self, node: NodeId) -> Membership:
        """The node has ended its ranks."""
        return self._with(node, gone=True)

    def reported(self, report: NodeReport) -> Membership:
        """Take over one node's levels."""
        told = self._with(
            report.node,
            store_port=report.store_port,
            heard=report.heard,
            knows_checkpoints=report.checkpoints is not None,
        )
        return replace(told, ranks={**self.ranks, **{r.rank: r for r in report.ranks}})

    def store_taken(self, node: NodeId) -> Membership:
        """The node's ready store is used by a generation from now on."""
        return self._with(node, store_port=None)

    def _with(self, node: NodeId, **changes: object) -> Membership:
        view = replace(self.nodes[node], **changes)  # type: ignore[arg-type]  # replace checks
        return replace(self, nodes={**self.nodes, node: view})

    @property
    def connected_nodes(self) -> tuple[NodeId, ...]:
        """Nodes that can be told something, in order."""
        return tuple(
            n for n, view in sorted(self.nodes.items()) if view.connected and not view.gone
        )

    def store_host(self, generation: Generation) -> NodeId | None:
        """The node at which the generation meets: turn by turn, so that no node is special."""
        able = [n for n, view in sorted(self.nodes.items()) if view.can_host_store]
        return able[generation % len(able)] if able else None


def is_ready_to_start(report: RankReport, left: Generation) -> bool:
    """Whether a rank waits for the generation after `left`: fresh, or out of it."""
    if report.state is RankState.READY:
        return True
    return report.state is RankState.QUIET and report.generation <= left


def is_fresh(report: RankReport) -> bool:
    """Whether the process has not been in any generation."""
    return report.generation == NO_GENERATION


def speaks_for(node: NodeId, message: FromAgent, nproc_per_node: int) -> bool:
    """Whether an agent says something of its own node and ranks alone."""
    spoken_of: Collection[int | None]
    match message:
        case NodeReport():
            spoken_of = [report.rank for report in message.ranks]
        case EvidenceGiven():
            spoken_of = [evidence.rank for evidence in message.evidence]
        case FaultReported():
            spoken_of = [message.fault.rank]
        case ShardWritten():
            spoken_of = [message.shard.rank]
        case Heartbeat():
            spoken_of = list(message.steps)
        case Bye():
            spoken_of = list(message.failed)
        case _:
            spoken_of = [getattr(message, "rank", None)]
    is_its_own = getattr(message, "node", node) == node
    return is_its_own and {*spoken_of} - {None} <= {*ranks_of(node, nproc_per_node)}
