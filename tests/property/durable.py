"""The checkpoint store of the world: slow, sometimes failing, and never wrong about what it holds.

A slot's content here is the list of generations in which its steps were made: what two ranks hold
of one step is one state if these are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepfast.core.durable import ShardFile
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    SlotNotWritten,
    SlotWritten,
    WriteSigns,
)
from stepfast.core.outputs import CancelWrite, CommitShards, ListCheckpoints, WriteSlot
from stepfast.core.terms import Rank, SnapshotId

if TYPE_CHECKING:
    from property.world import Agent, World

State = tuple[int, ...]
_FAILURES = 0.05  # of the writes that are not of the last step
_KEPT = 3


@dataclass(slots=True, eq=False)
class _Write:
    """One thread that writes a slot."""

    agent: Agent
    order: WriteSlot
    is_hung: bool
    signs: int = 0


class WorldStore:
    """What outlives every process and every machine."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shards: dict[tuple[SnapshotId, Rank], State] = {}
        self.committed: dict[SnapshotId, Mapping[Rank, State]] = {}
        self.commits: list[tuple[float, SnapshotId]] = []  # every one there ever was, and when
        self.writes: list[_Write] = []
        self.most_writes = 0  # under way at one time
        self.hung: set[Rank] = set()  # whose writes never end

    def perform(
        self, agent: Agent, order: ListCheckpoints | WriteSlot | CancelWrite | CommitShards
    ) -> None:
        """The agent's threads: later, and as one input."""
        delay = self.world.delay
        match order:
            case ListCheckpoints():
                self._later(agent, delay(0.001, 0.1), self._listing)
            case WriteSlot():
                self._begin_write(agent, order)
            case CancelWrite():
                self._call_off(agent, order)
            case CommitShards():
                self._later(agent, delay(0.005, 0.1), lambda: self._commit(order))

    def _begin_write(self, agent: Agent, order: WriteSlot) -> None:
        state = self.world.slots[order.rank].get(order.checkpoint)
        write = _Write(agent, order, is_hung=order.rank in self.hung)
        self.writes.append(write)
        self.most_writes = max(self.most_writes, len(self.writes))
        write_s = self.world.shape.write_s
        after_s = write_s[order.rank] if write_s else self.world.delay(0.005, 0.2)
        if not write.is_hung:
            self.world.at(
                after_s, lambda: self._end_write(write, lambda: self._write(order, state))
            )

    def _call_off(self, agent: Agent, order: CancelWrite) -> None:
        """At its next piece the thread sees it; one that hangs never does."""
        for write in self.writes:
            called = (write.agent, write.order.rank, write.order.checkpoint)
            if called == (agent, order.rank, order.checkpoint) and not write.is_hung:
                told = SlotNotWritten(order.rank, order.checkpoint, "called off")
                self.world.at(0.003, lambda write=write: self._end_write(write, lambda: told))

    def _end_write(self, write: _Write, work: Any) -> None:
        if write not in self.writes:
            return  # it has ended already
        self.writes.remove(write)
        if write.agent.is_alive:  # its threads end with it
            write.agent.feed(work())

    def signs(self, agent: Agent) -> tuple[WriteSigns, ...]:
        """What the writes of one agent have taken so far: one piece for each tick."""
        mine = [write for write in self.writes if write.agent is agent]
        for write in mine:
            write.signs += not write.is_hung
        return tuple(WriteSigns(w.order.rank, w.order.checkpoint, w.signs) for w in mine)

    def heal(self) -> None:
        """What hung goes on."""
        self.hung.clear()
        for write in [w for w in self.writes if w.is_hung]:
            write.is_hung = False
            state = self.world.slots[write.order.rank].get(write.order.checkpoint)
            self._end_write(write, lambda w=write, s=state: self._write(w.order, s))

    def _later(self, agent: Agent, after_s: float, work: Any) -> None:
        def run() -> None:
            if agent.is_alive:  # its threads end with it
                agent.feed(work())

        self.world.at(after_s, run)

    def _listing(self) -> Any:
        return CheckpointsListed(tuple(sorted(self.committed)))

    def _write(self, order: WriteSlot, state: State | None) -> Any:
        is_last = order.checkpoint.step >= self.world.shape.steps
        is_reliable = is_last or bool(self.world.shape.write_s)
        if not is_reliable and self.world.random.random() < _FAILURES:
            return SlotNotWritten(order.rank, order.checkpoint, "no space left")
        if state is None or self.world.slots[order.rank].get(order.checkpoint) != state:
            self.world.watcher.slot_taken(order)
            return SlotNotWritten(order.rank, order.checkpoint, "the slot was taken away")
        self.shards[order.checkpoint, order.rank] = state
        shard = ShardFile(
            rank=order.rank,
            name=f"rank-{order.rank}",
            size_bytes=1,
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
        self.commits.append((self.world.now, order.checkpoint))
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
