"""A node that has to leave: a checkpoint first, then it is let go, and the job goes on."""

from __future__ import annotations

import pytest

from stepfast.core.durable import DRAIN_LIMIT_S, CheckpointSettings, ShardFile
from stepfast.core.job_state import Phase
from stepfast.core.messages import (
    Bye,
    CheckpointAt,
    CheckpointFailed,
    CommitDone,
    FinishJob,
    LeaveNow,
    NodeDraining,
    RankFinish,
    ShardWritten,
)
from stepfast.core.node_drain import ALONE_LIMIT_S
from stepfast.core.node_state import (
    CoordinatorConnected,
    CoordinatorLost,
    FromJob,
    NodeStopRequested,
)
from stepfast.core.outputs import EndProcess
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import DecisionMade
from unit.core.rigs import JobRig, NodeRig

STORE = CheckpointSettings(url="store", interval_steps=1000)
STOP = NodeStopRequested("SIGTERM", drains=True)


def commit(rig: JobRig, checkpoint: SnapshotId) -> None:
    for number in range(4):
        file = ShardFile(
            rank=Rank(number),
            name=f"rank-{number}.safetensors",
            size_bytes=100,
            layout_digest="layout",
            block_bytes=1 << 20,
            blocks="",
        )
        told = ShardWritten(checkpoint=checkpoint, shard=file, seconds=0.5)
        rig.from_node(number // 2, told)
    rig.from_node(0, CommitDone(checkpoint=checkpoint, name="name", size_bytes=400, seconds=0.1))


def draining(rig: JobRig, node: int = 1) -> list[CheckpointAt]:
    rig.from_node(node, NodeDraining(node=NodeId(node), reason="SIGTERM"))
    return rig.now_of(CheckpointAt)


def test_every_rank_is_told_of_a_step_ahead_and_the_node_leaves_when_that_is_committed():
    rig = JobRig(checkpoints=STORE).start()
    rig.beat(0, 20)
    rig.beat(1, 20)
    orders = draining(rig)
    assert len(orders) == 2 and orders[0].step > 20
    assert not draining(rig), "told twice, announced once"
    assert not rig.all_of(LeaveNow)
    commit(rig, SnapshotId(Generation(1), orders[0].step))
    assert len(rig.all_of(LeaveNow)) == 1
    assert rig.state.phase is Phase.RUNNING, "nobody is interrupted before"


def test_a_checkpoint_of_before_lets_nobody_go():
    rig = JobRig(checkpoints=STORE).start()
    commit(rig, SnapshotId(Generation(1), Step(4)))
    draining(rig)
    assert not rig.all_of(LeaveNow)


def test_one_that_failed_is_announced_again():
    rig = JobRig(checkpoints=STORE).start()
    first = draining(rig)[0].step
    failed = CheckpointFailed(
        checkpoint=SnapshotId(Generation(1), first), rank=Rank(2), reason="disk full"
    )
    rig.from_node(1, failed)
    again = rig.now_of(CheckpointAt)
    assert again and again[0].step > first
    commit(rig, SnapshotId(Generation(1), again[0].step))
    assert rig.all_of(LeaveNow)


def test_a_goodbye_is_the_fault_of_a_node_at_once_and_only_one():
    rig = JobRig(checkpoints=STORE).start()
    order = draining(rig)[0]
    commit(rig, SnapshotId(Generation(1), order.step))
    rig.from_node(1, Bye(node=NodeId(1)))
    assert rig.state.phase is Phase.RECOVERING
    rig.lose(1)
    rig.leave(0, 1)
    rig.hello(1, pid=10)
    rig.replace(2, 3)
    assert rig.state.phase is Phase.STARTING
    assert len(rig.all_of(DecisionMade)) == 1
    assert not rig.state.draining


def test_without_a_store_or_a_step_nothing_is_waited_for():
    rig = JobRig().start()
    draining(rig)
    assert rig.all_of(LeaveNow)
    forming = JobRig(checkpoints=STORE)
    forming.hello(0)
    draining(forming, 0)
    assert forming.all_of(LeaveNow)


# --- the node ------------------------------------------------------------------------------------


def active() -> NodeRig:
    return NodeRig(checkpoints=STORE).ready().active()


def test_a_node_asks_and_trains_on_until_it_is_let_go():
    rig = active()
    rig.feed(STOP)
    assert rig.now_of(NodeDraining) and rig.state.finish is None
    rig.tick(DRAIN_LIMIT_S - 1)
    assert rig.state.finish is None
    rig.feed(FromJob(LeaveNow()))
    assert len(rig.now_of(RankFinish)) == 2
    assert rig.state.finish.keep_memory and not rig.state.is_job_over
    assert rig.state.finish.exit_code == EXIT_TRY_AGAIN


@pytest.mark.parametrize("what", ["twice", "too long", "alone", "the job ends"])
def test_a_node_does_not_wait_for_ever(what: str):
    rig = active()
    rig.feed(STOP)
    match what:
        case "twice":
            rig.feed(STOP)
        case "too long":
            rig.tick(DRAIN_LIMIT_S + 1)
        case "alone":
            rig.feed(CoordinatorLost())
            rig.tick(ALONE_LIMIT_S + 1)
        case _:
            rig.feed(FromJob(FinishJob(finished=False, exit_code=1, reason="stopped")))
    assert rig.state.finish is not None


def test_a_coordinator_that_comes_back_is_told_again():
    rig = active()
    rig.feed(STOP)
    rig.feed(CoordinatorLost())
    rig.feed(CoordinatorConnected())
    assert rig.now_of(NodeDraining)


@pytest.mark.parametrize("begun", [NodeRig, lambda: NodeRig().ready().active()])
def test_with_nothing_to_be_kept_a_node_leaves_at_once(begun):
    rig = begun()
    rig.feed(STOP)
    assert rig.state.finish is not None
    assert not rig.all_of(NodeDraining)
    assert rig.all_of(EndProcess) or rig.all_of(RankFinish)
