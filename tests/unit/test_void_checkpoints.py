"""Checkpoints that the job will never go on from again: they cost no good one its place.

The job's machine, the node's machine, an agent's hands and a store on the disk, one behind the
other as in a job.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfast.checkpoint.catalog import committed
from stepfast.core.durable import PASSING_LIMIT_S, CheckpointSettings
from stepfast.core.faults import ErrorClass, FaultKind
from stepfast.core.messages import CommitCheckpoint, CommitDone, ShardWritten, StartGeneration
from stepfast.core.node_state import CommitEnded, FromJob
from stepfast.core.outputs import CommitShards
from stepfast.core.terms import SnapshotId
from unit.core.rigs import JobRig, NodeRig, error_of, held
from unit.core.test_durable import damaged, enter_without_resuming, fresh_job
from unit.stored_checkpoints import snap
from unit.test_agent_store import Agent


class OneNode:
    """A job of one node with two ranks, which finds checkpoints in its store."""

    def __init__(self, base: Path, keep_last: int, *found: SnapshotId) -> None:
        self.agent = Agent(base)
        self.agent.keep_last(keep_last)
        self.agent.slots.save(self.agent.store, *found)
        self.settings = CheckpointSettings(url="store", interval_s=60.0)
        self.begin()

    def begin(self) -> None:
        """A new run of the job, with nothing in memory."""
        there = tuple(sorted(committed(self.agent.store)))
        self.job: JobRig = fresh_job(self.settings, there, nodes=1)
        self.node = NodeRig(checkpoints=self.settings).ready()

    @property
    def start(self) -> StartGeneration:
        assert self.job.state.start is not None
        return self.job.state.start

    def find_damage(self) -> None:
        """What the ranks were to go on from cannot be read."""
        enter_without_resuming(self.job)
        damaged(self.job, 0)
        self.job.leave(0, 1)

    def fall_back_to(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """A fault that says nothing of the store; this is what memory has behind it."""
        for number in self.job.reports:
            self.job.set_rank(number, snapshots=snapshots)
        self.job.fault(FaultKind.EXCEPTION, 0, error=error_of(ErrorClass.IO))
        self.job.leave(0, 1)

    def write(self, step: int) -> SnapshotId:
        """Every rank's file of this generation; the commit is ordered."""
        checkpoint = snap(step, self.job.state.generation)
        for shard in self.agent.slots.write(self.agent.store, checkpoint):
            told = ShardWritten(checkpoint=checkpoint, shard=shard, seconds=0.1)
            self.job.from_node(0, told)
        return checkpoint

    def commit(self) -> None:
        """The order that was given last, as a node carries it out."""
        order = self.job.all_of(CommitCheckpoint)[-1]
        self.node.feed(FromJob(order))
        (shards,) = self.node.now_of(CommitShards)
        ended = self.agent.do(lambda work: work.commit(shards))
        assert isinstance(ended, CommitEnded) and ended.reason is None, ended
        self.node.feed(ended)
        (done,) = self.node.now_of(CommitDone)
        self.job.from_node(0, done)

    def save(self, step: int) -> list[SnapshotId]:
        """What there is behind one more checkpoint, newest first."""
        self.job.enter()
        self.write(step)
        self.commit()
        return committed(self.agent.store)


def test_a_damaged_one_costs_no_good_one_its_place(tmp_path: Path) -> None:
    """The first one behind it, by time, is further than the damaged one was."""
    job = OneNode(tmp_path, 2, snap(10), snap(20))
    assert job.start.checkpoint == snap(20)
    job.find_damage()
    assert job.start.checkpoint == snap(10)
    there = job.save(25)
    assert snap(10) in there, "the only one that was ever read"
    assert there[0] == snap(25, 3)


def test_damaged_ones_go_with_the_place_that_they_would_have_had(tmp_path: Path) -> None:
    job = OneNode(tmp_path, 2, snap(10), snap(20))
    job.find_damage()
    job.save(25)
    assert job.save(30) == [snap(30, 3), snap(25, 3)]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_an_abandoned_one_costs_no_good_one_its_place(tmp_path: Path, keep_last: int) -> None:
    """It was committed while the job went back behind it, for one rank's memory was lost."""
    job = OneNode(tmp_path, keep_last, snap(10), snap(20))
    job.find_damage()
    first = job.start
    assert first.checkpoint == snap(10)
    job.job.enter()
    ahead = job.write(40)
    job.fall_back_to(held((first.generation, 11)))
    assert job.start.step == 11, "memory is not waited for"
    job.commit()
    assert committed(job.agent.store)[0] == ahead
    there = job.save(50)
    good = [s for s in there if job.job.state.lineage.admits(s)]
    assert len(good) == min(keep_last, 2), there


def test_a_commit_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    job = OneNode(tmp_path, 1, snap(10))
    job.job.enter()
    job.write(20)
    before = job.start
    job.fall_back_to(())
    job.job.tick(PASSING_LIMIT_S - 1.0)
    assert job.start is before
    job.job.tick(2.0)
    assert job.start.checkpoint == snap(10) and job.start is not before


def test_a_newer_one_that_is_being_committed_is_waited_for(tmp_path: Path) -> None:
    """Else it takes the place of the one that ranks are reading."""
    job = OneNode(tmp_path, 1, snap(10))
    job.job.enter()
    newer = job.write(20)
    before = job.start
    job.fall_back_to(())
    assert job.start is before, "not from the one that is about to go"
    job.commit()
    assert committed(job.agent.store) == [newer]
    assert job.start.checkpoint == newer
