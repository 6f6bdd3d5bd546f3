"""Durable checkpoints in the machines: gathered, committed once, waited for, never wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from stepfast.core.durable import (
    COMMIT_LIMIT_S,
    DRAIN_LIMIT_S,
    CheckpointSettings,
    Durable,
    ShardFile,
)
from stepfast.core.faults import ErrorClass, FaultKind
from stepfast.core.job_state import Phase, StopRequested
from stepfast.core.messages import (
    Bye,
    CheckpointAt,
    CheckpointFailed,
    CheckpointMissed,
    CommitCheckpoint,
    CommitDone,
    FinishJob,
    NodeReport,
    PersistSlots,
    RankCheckpointAt,
    RankSealed,
    RankStart,
    RankState,
    RankUnpin,
    ShardWritten,
    StartGeneration,
    StoreRefused,
)
from stepfast.core.node import COORDINATOR_RETURN_LIMIT_S
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    CoordinatorConnected,
    CoordinatorLost,
    FromJob,
    NodeStopRequested,
    RankEnded,
    RankForked,
    SlotNotWritten,
    SlotWritten,
    StoreUnusable,
)
from stepfast.core.node_writes import STALL_LIMIT_S
from stepfast.core.outputs import (
    CommitShards,
    EndProcess,
    ListCheckpoints,
    SendToNode,
    WriteSlot,
)
from stepfast.core.recovery import Lineage
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN
from stepfast.events import (
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRejected,
    GenerationOpened,
    JobEnded,
    Note,
)
from unit.core.rigs import JobRig, NodeRig, error_of, held

BY_STEPS = CheckpointSettings(url="store", interval_steps=4)
BY_TIME = CheckpointSettings(url="store", interval_s=60.0)
STRICT = CheckpointSettings(url="store", is_strict=True)


def at(generation: int, step: int) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


def shard(number: int) -> ShardFile:
    return ShardFile(
        rank=Rank(number),
        name=f"rank-{number}.safetensors",
        size_bytes=100,
        layout_digest="layout",
        block_bytes=1 << 20,
        blocks="",
    )


def written(rig: JobRig, number: int, checkpoint: SnapshotId) -> Any:
    message = ShardWritten(checkpoint=checkpoint, shard=shard(number), seconds=0.5)
    return rig.from_node(number // rig.nproc, message)


def commit_done(checkpoint: SnapshotId) -> CommitDone:
    return CommitDone(checkpoint=checkpoint, name="name", size_bytes=400, seconds=0.1)


def job(settings: CheckpointSettings = BY_STEPS, **more: Any) -> JobRig:
    return JobRig(checkpoints=settings, **more).start()


# --- the job: gathering and committing -----------------------------------------------------------


def test_a_checkpoint_is_committed_by_one_node_when_every_shard_is_written():
    rig = job()
    for number in range(3):
        written(rig, number, at(1, 8))
        assert not rig.now_of(CommitCheckpoint)
    written(rig, 3, at(1, 8))
    (order,) = rig.now_of(CommitCheckpoint)
    assert order.checkpoint == at(1, 8)
    assert [s.rank for s in order.shards] == [0, 1, 2, 3]
    rig.from_node(0, commit_done(at(1, 8)))
    (event,) = rig.now_of(CheckpointCommitted)
    assert (event.step, event.generation, event.size_bytes) == (8, 1, 400)


def test_a_shard_told_again_changes_nothing():
    rig = job()
    for number in (0, 1, 2, 3, 3, 0):
        written(rig, number, at(1, 8))
    assert len(rig.all_of(CommitCheckpoint)) == 1
    rig.from_node(0, commit_done(at(1, 8)))
    rig.from_node(0, commit_done(at(1, 8)))
    for number in range(4):
        written(rig, number, at(1, 8))
    assert len(rig.all_of(CommitCheckpoint)) == 1
    assert len(rig.all_of(CheckpointCommitted)) == 1


def test_a_commit_whose_node_goes_away_is_another_nodes():
    rig = job()
    for number in range(4):
        written(rig, number, at(1, 8))
    (first,) = [o for o in rig.outputs if isinstance(o, SendToNode)]
    rig.lose(first.node)
    rig.tick(0.1)
    (second,) = [
        o
        for o in rig.outputs
        if isinstance(o, SendToNode) and isinstance(o.message, CommitCheckpoint)
    ]
    assert second.node != first.node


def test_a_commit_is_asked_for_again_where_its_node_was_away_between_two_looks():
    rig = job()
    for number in range(4):
        written(rig, number, at(1, 8))
    (first,) = [o for o in rig.outputs if isinstance(o, SendToNode)]
    rig.lose(first.node)
    rig.hello(first.node)
    rig.tick(0.1)
    orders = [o for o in rig.outputs if isinstance(o, SendToNode)]
    assert any(isinstance(o.message, CommitCheckpoint) for o in orders)


def test_a_commit_that_takes_for_ever_is_given_up():
    rig = job()
    for number in range(4):
        written(rig, number, at(1, 8))
    rig.tick(COMMIT_LIMIT_S + 1.0)
    assert "not committed within" in rig.now_of(CheckpointLost)[0].reason


def test_a_failed_shard_loses_the_checkpoint_and_nothing_else():
    rig = job()
    written(rig, 0, at(1, 8))
    failed = CheckpointFailed(checkpoint=at(1, 8), rank=Rank(1), reason="no space left")
    rig.from_node(0, failed)
    rig.from_node(0, failed)
    (event,) = rig.all_of(CheckpointLost)
    assert (event.step, event.rank, event.reason) == (8, 1, "no space left")
    assert rig.state.phase is Phase.RUNNING
    for number in range(4):
        written(rig, number, at(1, 12))
    assert len(rig.all_of(CommitCheckpoint)) == 1


@pytest.mark.parametrize("order", sorted(itertools.permutations(range(4))))
def test_ranks_that_fare_differently_have_one_outcome(order: tuple[int, ...]):
    """Two ranks fail for reasons of their own, in any order with the others' success."""
    rig = job()
    reasons = {1: "input/output error", 2: "file exists"}
    for number in order:
        if number in reasons:
            node, rank = number // rig.nproc, Rank(number)
            failed = CheckpointFailed(checkpoint=at(1, 8), rank=rank, reason=reasons[number])
            rig.from_node(node, failed)
        else:
            written(rig, number, at(1, 8))
    (event,) = rig.all_of(CheckpointLost)
    first = next(number for number in order if number in reasons)
    assert (event.rank, event.reason) == (first, reasons[first])
    assert not rig.all_of(CommitCheckpoint)
    assert rig.state.phase is Phase.RUNNING


def test_shards_of_an_abandoned_lineage_never_become_a_checkpoint():
    rig = job()
    for number in range(3):
        written(rig, number, at(1, 8))
    rig.fault(FaultKind.EXCEPTION)
    rig.leave(0, 1, 2, 3)
    assert rig.state.start.step == 5
    written(rig, 3, at(1, 8))
    assert not rig.all_of(CommitCheckpoint)


def test_the_gathering_is_bounded():
    durable = Durable()
    for step in range(1, 100):
        durable = durable.written(at(1, step), shard(0)).lost(at(2, step), "reason")
    assert len(durable.shards) <= 4
    assert len(durable.failed) <= 16


# --- the job: time -------------------------------------------------------------------------------


def test_time_announces_a_step_that_no_rank_has_reached():
    rig = job(BY_TIME)
    rig.beat(0, 40)
    rig.beat(1, 40)
    rig.tick(30.0)
    assert not rig.all_of(CheckpointAt)
    rig.tick(31.0)
    orders = rig.now_of(CheckpointAt)
    assert len(orders) == 2, "both nodes are told"
    assert orders[0].step > 40
    rig.tick(1.0)
    assert not rig.now_of(CheckpointAt), "once in an interval"


def test_a_missed_announcement_is_made_again_further_ahead():
    rig = job(BY_TIME)
    rig.beat(0, 40)
    rig.beat(1, 40)
    rig.tick(61.0)
    first = rig.now_of(CheckpointAt)[0].step
    rig.beat(0, int(first) + 1)
    rig.from_node(0, CheckpointMissed(step=first))
    second = rig.now_of(CheckpointAt)[0].step
    assert second > first + 2
    rig.from_node(1, CheckpointMissed(step=first))
    assert not rig.now_of(CheckpointAt), "the other node's word about the old one"


def test_an_announcement_that_a_fault_made_void_is_made_again_at_once():
    rig = job(BY_TIME)
    rig.tick(61.0)
    assert rig.now_of(CheckpointAt)
    rig.fault(FaultKind.EXCEPTION)
    rig.leave(0, 1, 2, 3)
    rig.enter()
    rig.tick(0.1)
    assert {o.generation for o in rig.now_of(CheckpointAt)} == {2}
    rig.tick(1.0)
    assert not rig.now_of(CheckpointAt), "once"


# --- the job: the last step ----------------------------------------------------------------------


def test_the_job_finishes_when_its_last_step_is_committed():
    rig = job()
    for number in range(4):
        rig.returned(number)
    assert not rig.all_of(JobEnded)
    for number in range(4):
        written(rig, number, at(1, 9))
    assert not rig.all_of(JobEnded)
    rig.from_node(1, commit_done(at(1, 9)))
    (end,) = rig.now_of(JobEnded)
    assert (end.status, end.exit_code) == ("finished", EXIT_FINISHED)


def test_the_last_step_may_have_been_committed_before():
    rig = job()
    for number in range(4):
        written(rig, number, at(1, 9))
    rig.from_node(1, commit_done(at(1, 9)))
    for number in range(4):
        rig.returned(number)
    assert len(rig.now_of(JobEnded)) == 1


def test_a_last_step_that_cannot_be_made_durable_is_no_success():
    rig = job()
    for number in range(4):
        rig.returned(number)
    rig.from_node(
        0, CheckpointFailed(checkpoint=at(1, 9), rank=Rank(0), reason="no space left on device")
    )
    (end,) = rig.all_of(JobEnded)
    assert (end.status, end.exit_code) == ("failed", EXIT_TRY_AGAIN)
    assert "step 9 is done but could not be made durable: no space left on device" in end.reason
    assert "no memory holds it" in end.reason, "the slots were removed: nothing was reported"


def test_a_last_step_that_memory_holds_is_said_to_be_kept():
    rig = job()
    for number in range(4):
        rig.set_rank(number, snapshots=(at(1, 9),))
        rig.returned(number)
    rig.all_report()
    rig.from_node(0, CheckpointFailed(checkpoint=at(1, 9), rank=Rank(0), reason="disk full"))
    (end,) = rig.all_of(JobEnded)
    assert end.reason.endswith(
        "disk full (make room or reach the store, and run again: the state is kept in memory)"
    )


def test_a_job_without_a_store_or_without_a_step_waits_for_nothing():
    for settings, step in ((CheckpointSettings(), 9), (BY_STEPS, 0)):
        rig = job(settings)
        for number in range(4):
            rig.returned(number, step=step)
        assert len(rig.all_of(JobEnded)) == 1


# --- the job: going on from the store ------------------------------------------------------------


def fresh_job(
    settings: CheckpointSettings,
    checkpoints: Any,
    snapshots: tuple[SnapshotId, ...] = (),
    **more: Any,
) -> JobRig:
    """A new run whose nodes found `checkpoints` in the store and `snapshots` in memory."""
    rig = JobRig(checkpoints=settings, **more)
    for number in rig.reports:
        rig.set_rank(number, snapshots=snapshots)
    for node in range(rig.state.nodes):
        rig.hello(node)
        report = NodeReport(
            node=NodeId(node),
            ranks=tuple(rig.reports[r] for r in rig.ranks_of(node)),
            heard=Generation(0),
            store_port=7000 + node,
            checkpoints=checkpoints,
        )
        rig.from_node(node, report)
    return rig


def test_a_job_goes_on_from_the_newest_checkpoint_and_above_its_generation():
    rig = fresh_job(BY_STEPS, (at(3, 40), at(4, 20)))
    start = rig.state.start
    assert (start.step, start.checkpoint, start.generation) == (20, at(4, 20), 5)
    (event,) = rig.all_of(GenerationOpened)
    assert event.source == "checkpoint"


@pytest.mark.parametrize(("memory_step", "expected"), [(40, None), (39, at(1, 40)), (41, None)])
def test_memory_wins_where_it_is_as_new(memory_step: int, expected: SnapshotId | None):
    rig = fresh_job(BY_STEPS, (at(1, 40),), held((1, memory_step)))
    assert rig.state.start.checkpoint == expected
    assert rig.state.start.step == max(memory_step, 40)


def test_nothing_begins_before_every_node_has_looked_into_the_store():
    rig = fresh_job(BY_STEPS, None)
    assert rig.state.start is None
    for node in range(2):
        rig.report(node)
    assert rig.state.start is not None


def test_a_store_that_cannot_be_used_ends_the_job_before_it_begins():
    rig = JobRig(checkpoints=BY_STEPS)
    rig.hello(0)
    rig.from_node(0, StoreRefused(node=NodeId(0), reason="the checkpoint store cannot be used: x"))
    (end,) = rig.all_of(JobEnded)
    assert (end.status, end.exit_code) == ("failed", EXIT_TRY_AGAIN)
    assert "cannot be used" in end.reason


def test_a_store_that_is_away_when_an_agent_comes_back_ends_no_running_job():
    rig = job()
    rig.from_node(0, StoreRefused(node=NodeId(0), reason="the checkpoint store cannot be used: x"))
    assert not rig.all_of(JobEnded)
    assert [note.topic for note in rig.now_of(Note)] == ["checkpoint store"]


def damaged(rig: JobRig, number: int) -> Any:
    error = error_of(ErrorClass.CHECKPOINT, type="stepfast.errors.CheckpointDamaged")
    return rig.fault(FaultKind.EXCEPTION, number, error=error)


def enter_without_resuming(rig: JobRig) -> None:
    for number in rig.reports:
        rig.set_rank(number, state=RankState.ACTIVE, generation=rig.state.generation)
    rig.all_report()


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks():
    rig = fresh_job(BY_STEPS, (at(1, 20), at(1, 40)))
    enter_without_resuming(rig)
    damaged(rig, 2)
    damaged(rig, 3)
    (event,) = rig.all_of(CheckpointRejected)
    assert (event.step, event.reason) == (40, "bad batch")
    rig.leave(0, 1, 2, 3)
    start: StartGeneration = rig.state.start
    assert (start.step, start.checkpoint) == (20, at(1, 20))


def test_a_damaged_checkpoint_is_an_error_where_that_is_wished():
    rig = fresh_job(STRICT, (at(1, 20), at(1, 40)))
    enter_without_resuming(rig)
    damaged(rig, 2)
    (end,) = rig.all_of(JobEnded)
    assert end.status == "failed"
    assert "without --strict" in end.reason


def test_where_no_checkpoint_can_be_used_the_job_does_not_begin_anew():
    rig = fresh_job(BY_STEPS, (at(1, 40),))
    enter_without_resuming(rig)
    damaged(rig, 2)
    rig.leave(0, 1, 2, 3)
    (end,) = rig.all_of(JobEnded)
    assert "none of 1 checkpoints can be used; refusing to start over" in end.reason


def test_a_collateral_io_error_rejects_nothing():
    rig = fresh_job(BY_STEPS, (at(1, 40),))
    enter_without_resuming(rig)
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.IO))
    assert not rig.all_of(CheckpointRejected)


# --- the node ------------------------------------------------------------------------------------


def node_rig() -> NodeRig:
    return NodeRig(checkpoints=BY_STEPS).ready().active()


def slot_written(number: int, checkpoint: SnapshotId) -> SlotWritten:
    return SlotWritten(Rank(number), checkpoint, shard(number), 0.5)


def test_the_store_is_looked_into_once_and_the_report_says_what_is_there():
    rig = NodeRig(checkpoints=BY_STEPS).connect()
    assert len(rig.all_of(ListCheckpoints)) == 1
    assert rig.all_of(NodeReport)[-1].checkpoints is None
    rig.feed(CheckpointsListed((at(1, 4),), ("step-000000008-gen-0001: torn",)))
    assert rig.now_of(NodeReport)[-1].checkpoints == (at(1, 4),)
    rig.welcome()
    assert len(rig.all_of(ListCheckpoints)) == 1
    assert not NodeRig().connect().all_of(ListCheckpoints), "no store, nothing to look into"


def test_an_unusable_store_is_told_and_told_again():
    rig = NodeRig(checkpoints=BY_STEPS).connect()
    rig.feed(StoreUnusable("permission denied"))
    assert rig.now_of(StoreRefused)[0].reason == "permission denied"
    rig.feed(CoordinatorConnected())
    rig.welcome()
    assert rig.now_of(StoreRefused)


def test_a_due_slot_is_written_told_and_let_go():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    (order,) = rig.now_of(WriteSlot)
    assert (order.rank, order.checkpoint) == (0, at(1, 8))
    rig.feed(slot_written(0, at(1, 8)))
    assert rig.now_of(ShardWritten)[0].shard.rank == 0
    assert rig.now_of(RankUnpin)[0].snapshot == at(1, 8)
    rig.feed(CoordinatorConnected())
    rig.welcome()
    assert rig.now_of(ShardWritten), "told again"


def test_a_slot_that_is_due_while_another_is_written_is_given_up():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    rig.say(0, RankSealed(snapshot=at(1, 12)))
    assert not rig.now_of(WriteSlot)
    assert rig.now_of(CheckpointFailed)[0].checkpoint == at(1, 12)
    assert rig.now_of(RankUnpin)[0].snapshot == at(1, 12)


def test_a_failed_write_is_told_and_the_slot_let_go():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    rig.feed(SlotNotWritten(Rank(0), at(1, 8), "disk full"))
    assert rig.now_of(CheckpointFailed)[0].reason == "rank 0: disk full"
    assert rig.now_of(RankUnpin)
    rig.feed(slot_written(0, at(1, 8)))
    assert not rig.now_of(ShardWritten), "too late"


def test_a_write_that_never_ends_is_given_up():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    rig.tick(STALL_LIMIT_S + 1.0)
    assert "the store took nothing for" in rig.now_of(CheckpointFailed)[0].reason


def test_the_fresh_process_keeps_the_slot_that_is_being_written():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    ended = {"exit_code": None, "signal": 9, "log_tail": "", "snapshots": held((1, 8))}
    rig.feed(RankEnded(rank=Rank(0), incarnation=1, **ended))
    from unit.core.test_node import interrupt, quiet  # the words of a recovery

    rig.feed(interrupt(1, (0, 1)))
    rig.feed(RankForked(Rank(0), 2, 2000))
    rig.say(0, rig_entered(2000))
    rig.say(1, quiet())
    rig.active(generation=2, step=8)
    starts = {s.rank: s for s in rig.now_of(RankStart)}
    assert starts[Rank(0)].pinned == (at(1, 8),)
    assert starts[Rank(1)].pinned == ()
    rig.feed(slot_written(0, at(1, 8)))
    assert rig.now_of(ShardWritten) and rig.now_of(RankUnpin)


def rig_entered(pid: int) -> Any:
    from unit.core.rigs import node_message

    return node_message("entered", pid=pid)


def test_the_last_step_is_written_for_the_generation_that_reached_it():
    rig = node_rig()
    rig.say(0, returned_message(9), snapshots=held((1, 8), (1, 9)))
    (order,) = rig.now_of(WriteSlot)
    assert order.checkpoint == at(1, 9)
    rig.say(1, returned_message(9), snapshots=held((1, 8)))
    assert "no slot holds the last step" in rig.now_of(CheckpointFailed)[0].reason


def returned_message(step: int) -> Any:
    from stepfast.core.messages import RankReturned

    return RankReturned(generation=Generation(1), rank=Rank(0), step=Step(step), digests=())


def test_the_last_step_waits_for_the_write_before_it():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    rig.say(0, returned_message(9), snapshots=held((1, 8), (1, 9)))
    assert not rig.now_of(WriteSlot)
    rig.feed(slot_written(0, at(1, 8)))
    assert rig.now_of(WriteSlot)[0].checkpoint == at(1, 9)


def test_an_announced_step_is_passed_on_unless_a_rank_has_passed_it():
    rig = node_rig()
    rig.feed(FromJob(CheckpointAt(generation=Generation(1), step=Step(20))))
    assert len(rig.now_of(RankCheckpointAt)) == 2
    rig.feed(FromJob(CheckpointAt(generation=Generation(1), step=Step(5))))
    assert rig.now_of(CheckpointMissed)[0].step == 5
    assert not rig.now_of(RankCheckpointAt)
    rig.feed(FromJob(CheckpointAt(generation=Generation(7), step=Step(50))))
    assert not rig.now_of(RankCheckpointAt), "another generation's"


def test_a_commit_is_done_once_and_told_as_often_as_asked():
    rig = node_rig()
    rig.say(1, RankSealed(snapshot=at(1, 12)))
    order = FromJob(CommitCheckpoint(checkpoint=at(1, 8), shards=(shard(0), shard(1))))
    rig.feed(order)
    (told,) = rig.now_of(CommitShards)
    assert told.in_flight == frozenset({at(1, 12)})
    rig.feed(order)
    assert not rig.now_of(CommitShards)
    done = {"checkpoint": at(1, 8), "name": "n", "size_bytes": 2, "seconds": 0.1}
    rig.feed(CommitEnded(**done, removed=frozenset({at(1, 4)})))
    assert rig.now_of(CommitDone)
    assert rig.now_of(NodeReport)[-1].checkpoints == (at(1, 8),)
    rig.feed(order)
    assert rig.now_of(CommitDone) and not rig.now_of(CommitShards)


def test_a_commit_that_failed_is_told():
    rig = node_rig()
    rig.feed(FromJob(CommitCheckpoint(checkpoint=at(1, 8), shards=())))
    done = {"checkpoint": at(1, 8), "name": "n", "size_bytes": 2, "seconds": 0.1}
    rig.feed(CommitEnded(**done, reason="rank-0.safetensors is missing"))
    (told,) = rig.now_of(CheckpointFailed)
    assert (told.rank, told.reason) == (None, "rank-0.safetensors is missing")


# --- the account ---------------------------------------------------------------------------------


def test_the_newest_is_of_the_newest_generation_on_the_lineage():
    lineage = Lineage().opened(Generation(4), Step(30)).opened(Generation(5), Step(60))
    durable = Durable().told_of([at(3, 40), at(3, 20), at(4, 50)])
    assert durable.newest(lineage) == at(4, 50)
    assert durable.refused(at(4, 50)).newest(lineage) == at(3, 20), "40 was abandoned at 30"
    assert durable.holds(Step(50), lineage)
    assert not durable.holds(Step(40), lineage)


# --- an ending job -------------------------------------------------------------------------------


def stopped(rig: JobRig) -> Any:
    return rig.feed(StopRequested("SIGTERM", 143))


def ranks_end(rig: JobRig, steps: tuple[int, ...] = (4, 5)) -> None:
    for number in rig.reports:
        rig.set_rank(number, state=RankState.GONE, pid=0, snapshots=held(*((1, s) for s in steps)))
    rig.all_report()


def drained(rig: JobRig, step: int) -> None:
    for number in rig.reports:
        written(rig, number, at(1, step))


def test_a_stopped_job_makes_its_newest_state_durable_before_its_nodes_leave():
    rig = job()
    stopped(rig)
    assert all(f.drain for f in rig.now_of(FinishJob))
    ranks_end(rig)
    orders = rig.all_of(PersistSlots)
    assert [(o.checkpoint, dict(o.sources)) for o in orders] == [
        (at(1, 5), {0: at(1, 5), 1: at(1, 5)}),
        (at(1, 5), {2: at(1, 5), 3: at(1, 5)}),
    ]
    drained(rig, 5)
    assert rig.now_of(CommitCheckpoint)
    rig.from_node(0, commit_done(at(1, 5)))
    orders = rig.now_of(FinishJob)
    assert [(o.drain, o.keep_memory) for o in orders] == [(False, False)] * 2


def test_what_cannot_be_made_durable_stays_in_memory():
    rig = job()
    stopped(rig)
    ranks_end(rig)
    rig.from_node(1, CheckpointFailed(checkpoint=at(1, 5), rank=Rank(3), reason="disk full"))
    assert all(f.keep_memory and not f.drain for f in rig.now_of(FinishJob))


def test_a_store_that_never_answers_holds_no_ending_job():
    rig = job()
    stopped(rig)
    ranks_end(rig)
    rig.tick(DRAIN_LIMIT_S + 1.0)
    assert all(f.keep_memory for f in rig.now_of(FinishJob))


def test_a_second_signal_waits_for_nothing():
    rig = job()
    stopped(rig)
    stopped(rig)
    assert all(f.keep_memory and not f.drain for f in rig.now_of(FinishJob))


def test_what_is_durable_already_is_not_written_again():
    rig = job()
    for number in range(4):
        written(rig, number, at(1, 5))
    rig.from_node(0, commit_done(at(1, 5)))
    stopped(rig)
    ranks_end(rig)
    assert not rig.all_of(PersistSlots)
    assert all(not f.keep_memory and not f.drain for f in rig.now_of(FinishJob)[-2:])


def test_a_job_that_fails_drains_too_and_one_that_never_began_does_not():
    rig = job(per_hour=0)
    rig.fault(FaultKind.EXCEPTION)
    rig.leave(0, 1, 2, 3)
    assert rig.all_of(JobEnded)[0].status == "failed"
    assert all(f.drain for f in rig.all_of(FinishJob))
    early = JobRig(checkpoints=BY_STEPS)
    early.hello(0)
    stopped(early)
    assert not any(f.drain for f in early.all_of(FinishJob))


def test_what_an_earlier_run_left_stays_where_this_one_ended_before_it_could_use_it():
    for steps in ((4, 5), (4, 6)):  # not looked at yet; not common
        rig = JobRig(checkpoints=BY_STEPS)
        lineage = Lineage().opened(Generation(3), Step(0))
        rig.state = replace(rig.state, generation=Generation(3), lineage=lineage, steps_max=Step(5))
        for node in range(2):
            rig.hello(node)
        if steps == (4, 6):
            rig.set_rank(0, snapshots=held((3, 4)))
            rig.set_rank(1, snapshots=held((3, 6)))
            rig.all_report()
        else:
            rig.from_node(0, StoreRefused(node=NodeId(0), reason="no such place"))
        for number in rig.reports:
            rig.set_rank(number, pid=0, snapshots=())
        rig.all_report()
        assert rig.all_of(JobEnded)
        assert not rig.all_of(PersistSlots)
        orders = [o for o in rig.all_of(FinishJob) if not o.drain]
        assert orders
        assert all(o.keep_memory for o in orders)


DRAIN = FromJob(FinishJob(finished=False, exit_code=1, reason="over", drain=True))
DRAINED = FromJob(FinishJob(finished=False, exit_code=1, reason="over"))
FINISHED = FromJob(FinishJob(finished=True, exit_code=0, reason="finished"))
STOP = NodeStopRequested("SIGTERM")


@pytest.mark.parametrize(
    ("inputs", "keeps"),
    [
        ((DRAIN, STOP), True),
        ((STOP, DRAIN), True),
        ((DRAIN, DRAINED), False),
        ((DRAIN, DRAINED, STOP), False),
        ((STOP, DRAINED), False),
        ((FINISHED, STOP), False),
        ((FINISHED,), False),
    ],
)
def test_slots_stay_where_a_node_leaves_before_it_heard_that_they_are_durable(inputs, keeps):
    rig = node_rig()
    for given in inputs:
        rig.feed(given)
    assert rig.state.finish is not None
    assert rig.state.finish.keep_memory is keeps


def test_slots_stay_where_the_coordinator_goes_away_while_they_are_written():
    rig = node_rig()
    rig.feed(DRAIN)
    rig.feed(CoordinatorLost())
    rig.tick(COORDINATOR_RETURN_LIMIT_S + 1.0)
    assert rig.state.finish is not None
    assert rig.state.finish.keep_memory


def test_a_draining_node_ends_its_ranks_and_stays():
    rig = node_rig()
    rig.feed(FromJob(FinishJob(finished=False, exit_code=1, reason="over", drain=True)))
    for number in (0, 1):
        rig.feed(
            RankEnded(
                rank=Rank(number),
                incarnation=1,
                exit_code=1,
                signal=None,
                log_tail="",
                snapshots=held((1, 5)),
            )
        )
    assert not rig.all_of(EndProcess)
    assert all(r.pid == 0 for r in rig.all_of(NodeReport)[-1].ranks)
    sources = {Rank(0): at(1, 5), Rank(1): at(1, 5)}
    rig.feed(FromJob(PersistSlots(checkpoint=at(1, 5), sources=sources)))
    assert [w.rank for w in rig.now_of(WriteSlot)] == [0, 1]
    rig.feed(slot_written(0, at(1, 5)))
    assert rig.now_of(ShardWritten)
    rig.feed(FromJob(CommitCheckpoint(checkpoint=at(1, 5), shards=())))
    assert rig.now_of(CommitShards)
    rig.feed(FromJob(FinishJob(finished=False, exit_code=1, reason="over")))
    assert rig.now_of(EndProcess) and rig.now_of(Bye)
