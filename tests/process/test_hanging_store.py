"""A store that takes nothing and gives no error: the agent's own threads really hang in it, in a
call of a disk and in a request that a service accepts and never answers. Time alone is the test's.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from process.s3_server import BUCKET, Proxy, environment_of, running_server
from stepfast.agent import durable
from stepfast.agent.durable import DurableWork
from stepfast.checkpoint.catalog import committed, verify
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.owner import StoreOwner
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.core.durable import (
    DRAIN_LIMIT_S,
    QUIET_AFTER_S,
    STALL_LIMIT_S,
    CheckpointSettings,
)
from stepfast.core.job_state import FromNode, Phase
from stepfast.core.messages import (
    CancelCheckpoint,
    CheckpointFailed,
    CommitCheckpoint,
    CommitDone,
    FinishJob,
    Noted,
    PersistSlots,
    RankLeave,
    RankReturned,
    RankSealed,
    RankState,
    RankUnpin,
    ShardWritten,
)
from stepfast.core.node_state import FromJob, NodeInput, NodeTick, SlotWritten
from stepfast.core.node_writes import ABANDONED_MAX
from stepfast.core.outputs import (
    CancelWrite,
    CommitShards,
    SendToCoordinator,
    SendToNode,
    WriteSlot,
)
from stepfast.core.terms import Generation, NodeId, Rank
from stepfast.events import CheckpointLost, JobEnded
from stepfast.runtime.disk import SystemDisk
from stepfast.runtime.ports import Buffer
from unit.core.rigs import JobRig, NodeRig, held
from unit.stored_checkpoints import snap
from unit.test_agent_store import Agent

WRITER = "stepfast-write-0"
LIMIT_S = 20.0  # of the test itself; nothing waits for it where all is well
TAKEN_UP = (ShardWritten, CheckpointFailed, CommitDone)
CARRIED_OUT = (CancelCheckpoint, CommitCheckpoint, PersistSlots, FinishJob)


class Gate:
    """Who calls `pass_through` while it is shut waits, as in a call that nothing interrupts."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._arrived = threading.Semaphore(0)

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()

    def pass_through(self) -> None:
        if not self._is_open.is_set():
            self._arrived.release()
            self._is_open.wait()

    async def has_caught(self) -> None:
        """Return when one more waits there."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=LIMIT_S)


class HangingDisk(SystemDisk):
    """Takes nothing of rank 0's files while the gate is shut."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._held: set[int] = set()

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        is_held = threading.current_thread().name == WRITER
        (self._held.add if is_held else self._held.discard)(descriptor)
        return descriptor

    def write(self, descriptor: int, data: Buffer) -> int:
        if descriptor in self._held:
            self._gate.pass_through()
        return super().write(descriptor, data)


class Node:
    """The machines of a job of one node, with the real hands of its agent."""

    def __init__(self, agent: Agent, store: CheckpointStore) -> None:
        self.agent = agent
        told = CheckpointSettings(url=store.url, interval_steps=1, keep_last=9)
        self.job = JobRig(nodes=1, checkpoints=told).start()
        self.rig = NodeRig(checkpoints=told).ready().active()
        self.ended: asyncio.Queue[NodeInput] = asyncio.Queue()
        settings = msgspec.structs.replace(agent.settings, checkpoints=told)
        self.work = DurableWork(settings, agent.slot_root, self._given)
        owner = StoreOwner(store, agent.settings.job_id)
        owner.cover(Generation(1))
        self.work._opened = store, owner

    def _given(self, given: NodeInput) -> None:
        self.perform(self.rig.feed(given))
        self.ended.put_nowait(given)

    def perform(self, outputs: list[Any]) -> None:
        for output in outputs:
            match output:
                case WriteSlot():
                    self.work.write(output)
                case CancelWrite():
                    self.work.cancel(output)
                case CommitShards():
                    self.work.commit(output)
                case SendToCoordinator(message) if isinstance(message, TAKEN_UP):
                    self.perform(self.job.feed(FromNode(NodeId(0), message)))
                case SendToNode(message=message) if isinstance(message, CARRIED_OUT):
                    self.perform(self.rig.feed(FromJob(message)))

    def seal(self, rank: int, step: int) -> None:
        """A slot of its own for each step, for a write that hangs has the older one open."""
        where = self.agent.slot_root / f"rank-{rank}" / f"slot-{step}.safetensors"
        where.parent.mkdir(exist_ok=True)
        where.write_bytes(self.agent.slots.content(snap(step), rank))
        self.perform(self.rig.say(rank, RankSealed(snapshot=snap(step))))

    def tick(self, after_s: float) -> None:
        self.rig.now += after_s
        self.perform(self.job.tick(after_s))
        self.perform(self.rig.feed(NodeTick(frozenset(), self.work.signs())))

    async def end_of_work(self) -> NodeInput:
        return await asyncio.wait_for(self.ended.get(), LIMIT_S)

    async def has_committed(self, step: int) -> None:
        while snap(step) not in self.job.state.durable.committed:
            await self.end_of_work()

    def is_training(self) -> bool:
        """Nobody was told to leave, and the job is as it was."""
        return self.job.state.phase is Phase.RUNNING and not self.rig.all_of(RankLeave)


def writers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == WRITER]


async def hang(node: Node, gate: Gate, step: int) -> None:
    """A write of rank 0 stands in the store, is spoken of and given up."""
    failures = len(node.rig.all_of(CheckpointFailed))
    node.seal(0, step)
    await gate.has_caught()
    node.tick(1.0)
    unpins = len(node.rig.all_of(RankUnpin))
    node.tick(QUIET_AFTER_S + 1.0)
    (said,) = node.rig.now_of(Noted)
    assert f"it has taken nothing of step {step} for" in said.text
    assert len(node.rig.all_of(RankUnpin)) == unpins, "it may still come"
    node.tick(STALL_LIMIT_S)
    assert node.rig.all_of(RankUnpin)[-1].snapshot == snap(step), "the slot is free"
    (failed,) = node.rig.all_of(CheckpointFailed)[failures:]
    assert failed.checkpoint == snap(step) and "the store took nothing" in failed.reason
    assert node.job.all_of(CheckpointLost)[-1].step == step
    assert node.is_training()


async def hang_until_off(node: Node, gate: Gate) -> None:
    gate.shut()
    for step in range(1, ABANDONED_MAX + 1):
        await hang(node, gate, step)
        assert len(writers()) == step
        node.seal(1, step + 100)
        assert isinstance(await node.end_of_work(), SlotWritten), "others write on"
    assert all(thread.daemon for thread in writers()), "they keep no agent alive"
    for step in (ABANDONED_MAX + 1, ABANDONED_MAX + 2):
        node.seal(0, step)
        assert "checkpoints are off" in node.rig.all_of(CheckpointFailed)[-1].reason
        assert node.rig.all_of(RankUnpin)[-1].snapshot == snap(step)
        assert len(writers()) == ABANDONED_MAX, "no thread more"
    off = [n for n in node.rig.all_of(Noted) if n.topic == "checkpoints are off"]
    assert len(off) == 1 and node.is_training()
    gate.open()
    for _ in range(ABANDONED_MAX):
        await node.end_of_work()
    told = [m.checkpoint for m in node.rig.all_of(ShardWritten) if m.shard.rank == 0]
    assert told == [], "nobody counts on what was given up"
    assert node.rig.all_of(Noted)[-1].topic == "checkpoints are on again"
    for rank in range(2):
        node.seal(rank, 200)
    await node.has_committed(200)
    node.work.close(is_job_over=False)


def test_writes_that_hang_in_a_disk_cost_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    gate, agent = Gate(), Agent(tmp_path)
    store = DirectoryStore(agent.store.root, HangingDisk(gate))

    async def scenario() -> None:
        await hang_until_off(Node(agent, store), gate)

    try:
        asyncio.run(scenario())
    finally:
        gate.open()
    for thread in writers():
        thread.join(LIMIT_S)
    assert not writers()
    assert verify(agent.store, snap(200)) == []


# --- a service that accepts and never answers ----------------------------------------------------


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with running_server() as port:
        yield port


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def proxy(server_port: int, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the service, through the gate."""
    proxy = Proxy(server_port)
    for name, value in environment_of(proxy).items():
        monkeypatch.setenv(name, value)
    proxy.plan = lambda method, path: gate.pass_through()
    yield proxy
    gate.open()
    proxy.close()


def in_service(tmp_path: Path, name: str) -> tuple[Agent, CheckpointStore]:
    return Agent(tmp_path), open_store(f"s3://{BUCKET}/{name}")


def test_a_service_that_is_back_takes_the_next_checkpoint(
    tmp_path: Path, proxy: Proxy, gate: Gate
) -> None:
    agent, store = in_service(tmp_path, "back")

    async def scenario() -> None:
        node = Node(agent, store)
        gate.shut()
        await hang(node, gate, 6)
        gate.open()
        await node.end_of_work()
        for rank in range(2):
            node.seal(rank, 7)
        await node.has_committed(7)
        assert node.is_training()
        node.work.close(is_job_over=False)

    asyncio.run(scenario())
    assert committed(store) == [snap(7)] and verify(store, snap(7)) == []


def test_a_job_whose_last_step_hangs_ends_within_its_bounds_and_keeps_its_memory(
    tmp_path: Path, proxy: Proxy, gate: Gate
) -> None:
    agent, store = in_service(tmp_path, "last")

    async def scenario() -> Node:
        node = Node(agent, store)
        began = node.job.now
        gate.shut()
        for rank in range(2):
            done = RankReturned(
                generation=Generation(1), rank=Rank(rank), step=snap(9).step, digests=()
            )
            node.job.returned(rank)
            node.job.set_rank(rank, state=RankState.RETURNED, snapshots=held((1, 9)))
            node.perform(node.rig.say(rank, done, snapshots=held((1, 9))))
            await gate.has_caught()
        node.job.report(0)
        node.tick(1.0)
        assert not node.job.all_of(JobEnded), "it may still come"
        node.tick(STALL_LIMIT_S)
        (ended,) = node.job.all_of(JobEnded)
        assert "step 9 is done but could not be made durable" in ended.reason
        for rank in range(2):
            node.job.set_rank(rank, state=RankState.GONE, pid=0)
        node.perform(node.job.report(0))
        assert node.job.all_of(PersistSlots), "tried once more, beside the threads that hang"
        await gate.has_caught()
        await gate.has_caught()
        node.tick(DRAIN_LIMIT_S + 1.0)
        assert node.job.all_of(FinishJob)[-1].keep_memory
        assert node.rig.state.is_job_over
        assert node.job.now - began < STALL_LIMIT_S + DRAIN_LIMIT_S + 5.0
        node.work.close(is_job_over=False)
        return node

    asyncio.run(scenario())


AGENT = """
import asyncio, sys
from pathlib import Path
from stepfast.agent.durable import DurableWork
from stepfast.core.durable import CheckpointSettings
from stepfast.core.node_state import CheckpointsListed
from stepfast.core.outputs import WriteSlot
from stepfast.core.terms import Rank
from unit.core.rigs import settings
from unit.stored_checkpoints import snap

async def main(what, url, slot_root):
    told = settings(nodes=1, checkpoints=CheckpointSettings(url=url))
    given = asyncio.Queue()
    work = DurableWork(told, Path(slot_root), given.put_nowait)
    work.list_checkpoints()
    listed = await given.get()
    assert isinstance(listed, CheckpointsListed), listed
    print("listed", flush=True)
    sys.stdin.readline()
    if what == "write":
        work.write(WriteSlot(Rank(0), snap(9)))
    else:
        work.list_checkpoints()
    print("begun", flush=True)
    sys.stdin.readline()
    work.close(is_job_over=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("what", "hangs_at"), [("write", "/"), ("list", "manifest.json")])
def test_an_agent_ends_though_its_store_answers_nothing(
    tmp_path: Path, proxy: Proxy, gate: Gate, what: str, hangs_at: str
) -> None:
    """Where one thread of it asks, and where several ask at once."""
    agent, store = in_service(tmp_path, f"end-{what}")
    agent.slots.save(store, snap(7), snap(8))
    agent.seal(9)
    proxy.plan = lambda method, path: gate.pass_through() if hangs_at in path else None
    command = [sys.executable, "-c", AGENT, what, store.url, str(agent.slot_root)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, cwd=Path(__file__).parent.parent)
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "listed\n"
        gate.shut()
        print("go on", file=process.stdin, flush=True)
        assert process.stdout.readline() == "begun\n"
        asyncio.run(gate.has_caught())
        began = time.monotonic()
        print("go on", file=process.stdin, flush=True)
        assert process.wait(LIMIT_S) == 0
        assert time.monotonic() - began < durable._RELEASE_LIMIT_S + 3.0
    finally:
        process.kill()
        process.communicate()
