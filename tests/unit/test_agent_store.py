"""An agent's hands in the store: what stops a job from beginning anew, and a store that comes back;
what a run of another layout left in memory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepfast.agent import memory
from stepfast.agent.durable import DurableWork
from stepfast.checkpoint import owner
from stepfast.checkpoint.arena import job_slots
from stepfast.checkpoint.catalog import committed, verify
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.owner import StoreOwner
from stepfast.cli.run import _remove_slots
from stepfast.config import JobConfig
from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import JobSettings
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    NodeInput,
    NodeNoted,
    SlotNotWritten,
    SlotWritten,
    StoreUnusable,
)
from stepfast.core.outputs import CommitShards, WriteSlot
from stepfast.core.terms import Generation, JobId, Rank
from stepfast.errors import EXIT_USER_ERROR
from stepfast.runtime.disk import SystemDisk
from unit.stored_checkpoints import Slots, snap

TWO = "2 ranks, 2 per node"
THREE = "3 ranks, 3 per node"


class Agent:
    """The hands of node 0, with two ranks' slots; each order is waited for."""

    def __init__(self, base: Path) -> None:
        self.noted: list[str] = []
        self.slots = Slots(base / "made")
        self.slot_root = base / "memory" / "node-0"
        self.slot_root.mkdir(parents=True)
        memory.settle_layout(self.slot_root, TWO)
        self.store = DirectoryStore(base / "store")
        self.opened: DirectoryStore | None = None  # in its place, through a disk of the test's own
        self.settings = JobSettings(
            job_id=JobId("job"),
            world_size=2,
            nproc_per_node=2,
            job_dir=str(base),
            device="cpu",
            recovery="on",
            hang="recover",
            hang_floor_s=None,
            hang_ceiling_s=60.0,
            heartbeat_interval_s=0.5,
            snapshot_interval_steps=1,
            memory_dir=str(base / "memory"),
            preload=(),
            faults=(),
            checkpoints=CheckpointSettings(url=self.store.url, keep_last=9),
        )

    def seal(self, step: int) -> None:
        for rank in range(2):
            path = self.slot_root / f"rank-{rank}" / "slot-0.safetensors"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self.slots.content(snap(step), rank))

    def do(self, order: Callable[[DurableWork], None], *, is_job_over: bool = False) -> NodeInput:
        async def wait() -> NodeInput:
            given: asyncio.Queue[NodeInput] = asyncio.Queue()
            work = DurableWork(self.settings, self.slot_root, given.put_nowait)
            if self.opened is not None:
                work._opened = self.opened, StoreOwner(self.opened, self.settings.job_id)
            order(work)
            while isinstance(answer := await given.get(), NodeNoted):
                self.noted.append(answer.text)
            work.close(is_job_over=is_job_over)
            return answer

        return asyncio.run(wait())

    def list(self, *, is_job_over: bool = False) -> NodeInput:
        return self.do(lambda work: work.list_checkpoints(), is_job_over=is_job_over)

    def as_job(self, name: str) -> None:
        self.settings = msgspec.structs.replace(self.settings, job_id=JobId(name))

    def keep_last(self, count: int) -> None:
        settings = msgspec.structs.replace(self.settings.checkpoints, keep_last=count)
        self.settings = msgspec.structs.replace(self.settings, checkpoints=settings)

    def refusal(self) -> str:
        answer = self.list()
        assert isinstance(answer, StoreUnusable), answer
        return answer.reason

    def write(self, step: int) -> list[NodeInput]:
        self.seal(step)
        orders = [WriteSlot(Rank(rank), snap(step)) for rank in range(2)]
        return [self.do(lambda work: work.write(order)) for order in orders]

    def save(self, step: int, *known: int) -> CommitEnded:
        """`known`: steps that the node knows to be committed."""
        told = self.write(step)
        shards = tuple(t.shard for t in told if isinstance(t, SlotWritten))
        assert len(shards) == 2, told
        order = CommitShards(snap(step), shards, frozenset(), known=frozenset(map(snap, known)))
        ended = self.do(lambda work: work.commit(order))
        assert isinstance(ended, CommitEnded)
        return ended


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def manifests(agent: Agent) -> list[Path]:
    return sorted(agent.store.root.glob("step-*/manifest.json"))


def test_a_new_store_is_a_first_start(agent: Agent) -> None:
    assert agent.list() == CheckpointsListed((), ())
    agent.save(5)
    assert agent.list() == CheckpointsListed((snap(5),), (), Generation(1))


def test_where_no_checkpoint_can_be_read_nothing_begins_anew(agent: Agent) -> None:
    agent.save(5)
    agent.save(6)
    newest = manifests(agent)[-1]
    newest.write_bytes(newest.read_bytes()[:-9])
    answer = agent.list()
    assert isinstance(answer, CheckpointsListed) and answer.checkpoints == (snap(5),)
    assert len(answer.problems) == 1 and str(newest) in answer.problems[0], "named, with the reason"
    manifests(agent)[0].write_bytes(b"")
    assert isinstance(agent.list(), CheckpointsListed), "memory is there to go on from"
    for rank in range(2):
        (agent.slot_root / f"rank-{rank}" / "slot-0.safetensors").unlink()
    assert "of 2 checkpoints none can be read" in agent.refusal()
    assert str(manifests(agent)[0]) in agent.refusal()


def test_what_is_passed_over_is_named_with_its_reason(agent: Agent) -> None:
    """Newer than the good one: without a manifest, with an empty one, with garbage in it."""
    for step in (5, 6, 7, 8):
        agent.save(step)
    _, unfinished, empty, garbage = manifests(agent)
    unfinished.unlink()
    empty.write_bytes(b"")
    garbage.write_bytes(b'{"step": 8}')
    answer = agent.list()
    assert isinstance(answer, CheckpointsListed) and answer.checkpoints == (snap(5),)
    named = {path.parent.name for path in (unfinished, empty, garbage)}
    assert len(answer.problems) == 3
    assert {next(n for n in named if n in text) for text in answer.problems} == named
    assert any("never committed" in text for text in answer.problems)


def test_a_store_that_cannot_be_listed_is_not_an_empty_one(agent: Agent) -> None:
    agent.store.root.symlink_to(agent.store.root)
    assert "Too many levels of symbolic links" in agent.refusal()


class Mount(SystemDisk):
    """One that lacks some calls, as mounts of object stores do."""

    def __init__(self, lacking: frozenset[str]) -> None:
        self.lacking = lacking

    def _check(self, call: str, number: int) -> None:
        if call in self.lacking:
            raise OSError(number, os.strerror(number))

    def rename(self, source: str, target: str) -> None:
        self._check("rename", errno.ENOSYS)
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._check("link", errno.EPERM)
        super().link(source, target)

    def rename_new(self, source: str, target: str) -> None:
        self._check("rename_new", errno.EINVAL)
        super().rename_new(source, target)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        if "reserve" not in self.lacking:
            super().reserve(descriptor, size_bytes)


CALLS = ("rename", "link", "rename_new", "reserve")


@pytest.mark.parametrize("lacking", [*((call,) for call in CALLS), ("link", "rename_new"), CALLS])
def test_a_mount_that_lacks_calls_serves_or_is_refused_at_the_start(
    agent: Agent, lacking: tuple[str, ...]
) -> None:
    mount = DirectoryStore(agent.store.root, Mount(frozenset(lacking)))
    agent.opened = mount
    if "rename" in lacking or {"link", "rename_new"} <= set(lacking):
        assert "the checkpoint store cannot be used" in agent.refusal()
        return
    assert agent.list() == CheckpointsListed((), ())
    assert agent.save(5).reason is None
    assert committed(agent.store) == [snap(5)]
    assert verify(agent.store, snap(5)) == []


def test_a_store_that_is_back_takes_the_next_checkpoint(agent: Agent) -> None:
    """For some checkpoints a plain file lies where the store was."""
    agent.save(5)
    away = agent.store.root.rename(agent.store.root.with_name("away"))
    agent.store.root.write_text("no directory")
    for step in (6, 7):
        for told in agent.write(step):
            assert isinstance(told, SlotNotWritten)
            assert str(agent.store.root) in told.reason and "Not a directory" in told.reason
    agent.store.root.unlink()
    away.rename(agent.store.root)
    assert agent.save(8).reason is None
    assert committed(agent.store) == [snap(8), snap(5)]
    assert verify(agent.store, snap(8)) == []


def test_memory_of_another_layout_is_set_aside_until_the_job_has_chosen(agent: Agent) -> None:
    root = agent.slot_root
    assert memory.settle_layout(root, TWO).problem is None
    agent.seal(5)
    settled = memory.settle_layout(root, TWO)
    assert settled.problem is None and settled.is_held, "its own is kept"
    foreseen = memory.look(root, THREE)
    assert foreseen.own is None and foreseen.other == root, "only looked at"
    said = memory.settle_layout(root, THREE).problem
    assert said is not None and "step 5" in said and TWO in said and THREE in said
    assert foreseen.problem == said
    assert not memory.look(root, THREE).is_held, "no rank of this layout sees it"
    agent.settings = msgspec.structs.replace(agent.settings, world_size=3, nproc_per_node=3)
    assert "the store has no checkpoint to reshard from" in agent.refusal()
    foreseen = memory.look(root, TWO)
    assert foreseen.is_held and foreseen.own is not None and foreseen.own != root
    settled = memory.settle_layout(root, TWO)
    assert settled.problem is None and settled.is_held and settled.own == root, "there again"
    memory.settle_layout(root, THREE)
    memory.remove_set_aside(root)
    assert not memory.has_set_aside(root)
    settled = memory.settle_layout(root, TWO)
    assert settled.problem is None and not settled.is_held


def test_another_jobs_checkpoints_are_gone_on_from_and_stay(agent: Agent) -> None:
    agent.keep_last(1)
    agent.list()
    assert agent.save(5).removed == frozenset() and agent.save(6).removed == {snap(5)}
    agent.list(is_job_over=True)
    agent.as_job("other")
    answer = agent.list(is_job_over=True)
    assert answer == CheckpointsListed((snap(6),), (), Generation(1)), "above which it begins"
    assert agent.noted == [], "the first one ended in order: nobody is waited for"
    agent.save(7)
    assert agent.save(8).removed == {snap(7)}
    assert committed(agent.store) == [snap(8), snap(6)]


def test_a_second_job_is_refused_and_the_first_one_goes_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    monkeypatch.setattr(owner, "_POLL_S", 0.02)

    async def both() -> NodeInput:
        given: asyncio.Queue[NodeInput] = asyncio.Queue()
        first = DurableWork(agent.settings, agent.slot_root, given.put_nowait)
        first.list_checkpoints()
        assert isinstance(await given.get(), CheckpointsListed)
        agent.as_job("other")
        second = DurableWork(agent.settings, agent.slot_root, given.put_nowait)
        second.list_checkpoints()
        while isinstance(answer := await given.get(), NodeNoted):
            assert "it was job job's" in answer.text
        for work in (first, second):
            work.close(is_job_over=False)
        return answer

    refused = asyncio.run(both())
    assert isinstance(refused, StoreUnusable) and refused.exit_code == EXIT_USER_ERROR
    assert "is job job's, which writes its checkpoints there, and lives" in refused.reason
    agent.as_job("job")
    assert agent.save(6).reason is None


def test_a_job_whose_store_was_taken_writes_nothing_more(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off for so long that it was taken for dead, and comes back."""
    monkeypatch.setattr(owner, "LIMIT_S", 0.0)
    agent.list()
    agent.save(5)
    agent.as_job("other")
    assert isinstance(agent.list(), CheckpointsListed) and len(agent.noted) == 1
    agent.as_job("job")
    for told in agent.write(6):
        assert isinstance(told, SlotNotWritten) and "job other's, which has taken it" in told.reason
    assert committed(agent.store) == [snap(5)]


def test_where_the_newest_is_damaged_strictness_refuses(agent: Agent) -> None:
    agent.save(5)
    agent.save(6)
    newest = manifests(agent)[-1]
    newest.write_bytes(b"{}")
    for rank in range(2):
        (agent.slot_root / f"rank-{rank}" / "slot-0.safetensors").unlink()
    assert isinstance(agent.list(), CheckpointsListed)
    strict = msgspec.structs.replace(agent.settings.checkpoints, is_strict=True)
    agent.settings = msgspec.structs.replace(agent.settings, checkpoints=strict)
    assert str(newest) in agent.refusal() and "without --strict" in agent.refusal()


def test_checkpoints_that_somebody_removed_are_missed_at_the_next_commit(agent: Agent) -> None:
    """One with its directory, one by its manifest; one that is damaged is there, and named
    elsewhere.
    """
    for step in (5, 6, 7, 8):
        assert agent.save(step, *range(5, step)).vanished == frozenset()
    gone, torn, damaged, _ = manifests(agent)
    shutil.rmtree(gone.parent)
    torn.unlink()
    damaged.write_bytes(b"")
    assert agent.save(9, 5, 6, 7, 8).vanished == {snap(5), snap(6)}
    agent.store.root.rename(agent.store.root.with_name("moved"))
    ended = agent.save(10, 8, 9)
    assert (ended.vanished, ended.reason) == ({snap(8), snap(9)}, None)


def test_what_another_process_removed_from_memory_is_made_again(agent: Agent) -> None:
    memory.settle_layout(agent.slot_root, TWO)
    assert memory.holds_nothing(agent.slot_root.parent)
    agent.seal(5)
    assert not memory.holds_nothing(agent.slot_root.parent)
    memory.mend(agent.slot_root, TWO)
    assert agent.slot_root.exists() and not memory.holds_nothing(agent.slot_root.parent)
    shutil.rmtree(agent.slot_root.parent)
    memory.mend(agent.slot_root, TWO)
    agent.seal(6)
    assert memory.settle_layout(agent.slot_root, TWO).problem is None, "it is known whose they are"
    assert memory.settle_layout(agent.slot_root, THREE).problem is not None
    assert not memory.holds_nothing(agent.slot_root.parent), "set aside, they lie there too"


def test_a_mark_alone_keeps_no_memory(agent: Agent, tmp_path: Path) -> None:
    config = JobConfig(memory_dir=str(tmp_path))
    (tmp_path / "job-id").write_text("job")
    slots = job_slots(config.memory_dir, JobId("job"))
    agent.slot_root = slots / "node-0"
    for kept in (True, False):
        slots.mkdir(exist_ok=True)
        memory.mend(agent.slot_root, TWO)
        (slots / "kept").touch()
        if kept:
            agent.seal(5)
        _remove_slots(config, tmp_path)
        assert slots.exists() is kept
        shutil.rmtree(slots, ignore_errors=True)
