"""The checkpoint store of the world: slow, sometimes failing, and never wrong about what it holds.

A slot's content here is the list of generations in which its steps were made: what two ranks hold
of one step is one state if these are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stepfast.core.durable import ShardFile
from stepfast.core.node_state import CheckpointsListed, CommitEnded, SlotNotWritten, SlotWritten
from stepfast.core.outputs import CommitShards, ListCheckpoints, WriteSlot
from stepfast.core.terms import Rank, SnapshotId

if TYPE_CHECKING:
    from property.world import Agent, World

State = tuple[int, ...]
_FAILURES = 0.05  # of the writes that are not of the last step
_KEPT = 3


class WorldStore:
    """What outlives every process and every machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shards: dict[tuple[SnapshotId, Rank], State] = {}
        self.committed: dict[SnapshotId, Mapping[Rank, State]] = {}

    def perform(self, agent: Agent, order: ListCheckpoints | WriteSlot | CommitShards) -> None:
        """The agent's threads: later, and as one input."""
        delay = self.world.delay
        match order:
            case ListCheckpoints():
                self._later(agent, delay(0.001, 0.1), self._listing)
            case WriteSlot():
                state = self.world.slots[order.rank].get(order.checkpoint)
                self._later(agent, delay(0.005, 0.2), lambda: self._write(order, state))
            case CommitShards():
                self._later(agent, delay(0.005, 0.1), lambda: self._commit(order))

    def _later(self, agent: Agent, after_s: float, work: Any) -> None:
        def run() -> None:
            if agent.is_alive:  # its threads end with it
                agent.feed(work())

        self.world.at(after_s, run)

    def _listing(self) -> Any:
        return CheckpointsListed(tuple(sorted(self.committed)))

    def _write(self, order: WriteSlot, state: State | None) -> Any:
        is_last = order.checkpoint.step >= self.world.shape.steps
        if not is_last and self.world.random.random() < _FAILURES:
            return SlotNotWritten(order.rank, order.checkpoint, "no space left")
        if state is None or self.world.slots[order.rank].get(order.checkpoint) != state:
            self.world.watcher.slot_taken(order)
            return SlotNotWritten(order.rank, order.checkpoint, "the slot was taken away")
        self.shards[order.checkpoint, order.rank] = state
        shard = ShardFile(
            rank=order.rank,
            name=f"rank-{order.rank}",
            size_bytes=1,
            digest="",
            layout_digest="",
            block_bytes=1,
            blocks="",
        )
        return SlotWritten(order.rank, order.checkpoint, shard, 0.1)

    def _commit(self, order: CommitShards) -> Any:
        ranks = sorted(shard.rank for shard in order.shards)
        assert ranks == sorted(self.world.slots), "a commit without every rank"
        states = {r: self.shards[order.checkpoint, r] for r in ranks}
        assert len(set(states.values())) == 1, f"a checkpoint of different states: {states}"
        assert len(states[ranks[0]]) == order.checkpoint.step, "a state of another step"
        self.committed[order.checkpoint] = states
        removed = sorted(self.committed)[:-_KEPT]
        for old in removed:
            del self.committed[old]
        return CommitEnded(
            checkpoint=order.checkpoint,
            name="name",
            size_bytes=1,
            seconds=0.1,
            removed=frozenset(removed),
        )
