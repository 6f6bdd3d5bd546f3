"""A store that takes nothing and gives no error: threads really hang in it, time is the test's."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from stepfast.agent.durable import DurableWork
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.owner import StoreOwner
from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import CheckpointFailed, Noted, RankSealed, RankUnpin, ShardWritten
from stepfast.core.node_state import NodeInput, NodeTick, SlotNotWritten, SlotWritten
from stepfast.core.node_writes import ABANDONED_MAX, QUIET_AFTER_S, STALL_LIMIT_S
from stepfast.core.outputs import CancelWrite, WriteSlot
from stepfast.runtime.disk import SystemDisk
from stepfast.runtime.ports import Buffer
from unit.core.rigs import NodeRig
from unit.stored_checkpoints import snap
from unit.test_agent_store import Agent

LIMIT_S = 20.0  # of the test itself; nothing waits for it


class HangingDisk(SystemDisk):
    """Takes nothing of rank 0's files until the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        self._held: set[int] = set()

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        self._held.discard(descriptor)
        if "rank-00000" in path:
            self._held.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: Buffer) -> int:
        if descriptor in self._held and not self.gate.is_set():
            self.arrived.release()
            self.gate.wait(LIMIT_S)
        return super().write(descriptor, data)


class Node:
    """The node's machine with the agent's hands."""

    def __init__(self, agent: Agent, disk: SystemDisk) -> None:
        self.agent = agent
        self.rig = NodeRig(checkpoints=CheckpointSettings(url="store", interval_steps=1))
        self.rig.ready().active()
        self.ended: asyncio.Queue[NodeInput] = asyncio.Queue()
        self.work = DurableWork(agent.settings, agent.slot_root, self._given)
        store = DirectoryStore(agent.store.root, disk)
        self.work._opened = store, StoreOwner(store, agent.settings.job_id)

    def _given(self, given: NodeInput) -> None:
        self._perform(self.rig.feed(given))
        self.ended.put_nowait(given)

    def _perform(self, outputs: list[Any]) -> None:
        for output in outputs:
            match output:
                case WriteSlot():
                    self.work.write(output)
                case CancelWrite():
                    self.work.cancel(output)

    def seal(self, rank: int, step: int) -> None:
        """A slot of its own for each step, for a write that hangs has the older one open."""
        where = self.agent.slot_root / f"rank-{rank}" / f"slot-{step}.safetensors"
        where.parent.mkdir(exist_ok=True)
        where.write_bytes(self.agent.slots.content(snap(step), rank))
        self._perform(self.rig.say(rank, RankSealed(snapshot=snap(step))))

    def tick(self, after_s: float) -> None:
        self.rig.now += after_s
        self._perform(self.rig.feed(NodeTick(frozenset(), self.work.signs())))

    async def end_of_a_write(self) -> NodeInput:
        return await asyncio.wait_for(self.ended.get(), LIMIT_S)


def writers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "stepfast-write-0"]


async def hang(node: Node, disk: HangingDisk, step: int) -> None:
    """A write of rank 0 stands in the store, is spoken of and given up."""
    node.seal(0, step)
    assert await asyncio.to_thread(disk.arrived.acquire, timeout=LIMIT_S)
    node.tick(1.0)
    node.tick(QUIET_AFTER_S + 1.0)
    (said,) = node.rig.now_of(Noted)
    assert f"it has taken nothing of step {step} for" in said.text
    assert not node.rig.now_of(RankUnpin)
    node.tick(STALL_LIMIT_S)
    assert [u.snapshot for u in node.rig.now_of(RankUnpin)] == [snap(step)], "the slot is free"
    (failed,) = node.rig.now_of(CheckpointFailed)
    assert failed.checkpoint == snap(step) and "the store took nothing" in failed.reason


async def scenario(agent: Agent, disk: HangingDisk) -> None:
    node = Node(agent, disk)
    for step in range(1, ABANDONED_MAX + 1):
        await hang(node, disk, step)
        assert len(writers()) == step
        node.seal(1, step)
        assert isinstance(await node.end_of_a_write(), SlotWritten), "others write on"
    assert all(thread.daemon for thread in writers()), "they keep no agent alive"
    for step in (ABANDONED_MAX + 1, ABANDONED_MAX + 2):
        node.seal(0, step)
        assert "checkpoints are off" in node.rig.now_of(CheckpointFailed)[0].reason
        assert [u.snapshot for u in node.rig.now_of(RankUnpin)] == [snap(step)]
        assert len(writers()) == ABANDONED_MAX, "no thread more"
    disk.gate.set()
    for _ in range(ABANDONED_MAX):
        given = await node.end_of_a_write()
        assert isinstance(given, SlotNotWritten) and "called off" in given.reason
    assert [n.topic for n in node.rig.all_of(Noted)][-1] == "checkpoints are on again"
    node.seal(0, 9)
    assert isinstance(await node.end_of_a_write(), SlotWritten)
    assert node.rig.now_of(ShardWritten)[0].checkpoint == snap(9)
    node.work.close(is_job_over=False)


def test_threads_that_hang_in_the_store_cost_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    disk = HangingDisk()
    agent = Agent(tmp_path)
    try:
        asyncio.run(scenario(agent, disk))
    finally:
        disk.gate.set()
    for thread in writers():
        thread.join(LIMIT_S)
    assert not writers()
    left = [n for n in agent.store.names() if "rank-00000" in n]
    assert len(left) == 1 and left[0].startswith("step-000000009"), "of the others nothing is left"
