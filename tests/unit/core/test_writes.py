"""Who writes which slot, and what becomes of a step that not every rank writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepfast.core.durable import (
    GATHERING_LIMIT_S,
    QUIET_AFTER_S,
    STALL_LIMIT_S,
    CheckpointSettings,
)
from stepfast.core.faults import FaultKind
from stepfast.core.messages import (
    CancelCheckpoint,
    CheckpointAt,
    CheckpointFailed,
    CheckpointMissed,
    CommitCheckpoint,
    NodeReport,
    Noted,
    PersistSlots,
    RankCancel,
    RankReturned,
    RankSealed,
    RankSkipped,
    RankState,
    RankUnpin,
    ShardWritten,
    StartGeneration,
    StoreRefused,
)
from stepfast.core.node_state import FromJob, NodeTick, SlotNotWritten, WriteSigns
from stepfast.core.node_writes import ABANDONED_MAX
from stepfast.core.outputs import CancelWrite, WriteSlot
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.events import CheckpointCommitted, CheckpointLost, JobEnded, Note
from unit.core.rigs import JobRig, NodeRig, held
from unit.core.test_durable import at, commit_done, shard, slot_written, written

BY_STEPS = CheckpointSettings(url="store", interval_steps=4)
BY_TIME = CheckpointSettings(url="store", interval_s=60.0)


def job(settings: CheckpointSettings = BY_STEPS) -> JobRig:
    return JobRig(checkpoints=settings).start()


def skip(rig: JobRig, number: int, checkpoint: SnapshotId) -> None:
    told = CheckpointFailed(
        checkpoint=checkpoint, rank=Rank(number), reason=f"rank {number}: busy", is_skip=True
    )
    rig.from_node(number // rig.nproc, told)


# --- the job -------------------------------------------------------------------------------------


def test_what_one_rank_skips_is_cancelled_on_every_node_at_once():
    rig = job()
    written(rig, 0, at(1, 8))
    skip(rig, 3, at(1, 8))
    orders = rig.now_of(CancelCheckpoint)
    assert [o.checkpoint for o in orders] == [at(1, 8)] * 2, "both nodes"
    assert all(o.not_before > 8 for o in orders), "ranks go on together, at a step ahead of all"
    for number in range(4):
        written(rig, number, at(1, 8))
    assert not rig.all_of(CommitCheckpoint), "nobody counts on it any more"
    skip(rig, 2, at(1, 8))
    assert not rig.now_of(CancelCheckpoint), "once"


def test_skips_that_were_under_way_move_the_common_step_no_further():
    rig = job()
    skip(rig, 3, at(1, 8))
    first = rig.now_of(CancelCheckpoint)[0].not_before
    skip(rig, 3, at(1, first - 1))
    assert rig.now_of(CancelCheckpoint)[0].not_before == first
    skip(rig, 3, at(1, first + 4))
    assert rig.now_of(CancelCheckpoint)[0].not_before > first + 4


def test_ranks_that_stay_apart_are_brought_together_further_ahead_each_time():
    rig = job()
    ahead = []
    step = 8
    for _ in range(12):
        rig.now += 1000.0
        skip(rig, 3, at(1, step))
        told = rig.now_of(CancelCheckpoint)[0].not_before
        ahead.append(told - step)
        step = told
    assert ahead == sorted(ahead) and ahead[-1] > 500
    assert max(ahead) <= 1024 + 2, "bounded"
    for number in range(4):
        written(rig, number, at(1, step + 4))
    rig.from_node(0, commit_done(at(1, step + 4)))
    skip(rig, 3, at(1, step + 8))
    assert rig.now_of(CancelCheckpoint)[0].not_before <= step + 16, "a commit begins anew"


def test_many_skips_are_one_event_and_one_note_with_their_number():
    rig = job()
    for step in range(8, 80, 4):
        skip(rig, 3, at(1, step))
    assert len(rig.all_of(CheckpointLost)) == 1
    for number in range(4):
        written(rig, number, at(1, 84))
    rig.from_node(0, commit_done(at(1, 84)))
    assert rig.now_of(CheckpointCommitted)
    assert "18 due steps were skipped" in rig.now_of(Note)[0].text


def test_a_failed_write_is_cancelled_elsewhere_and_sets_nobody_apart():
    rig = job()
    failed = CheckpointFailed(checkpoint=at(1, 8), rank=Rank(1), reason="no space left")
    rig.from_node(0, failed)
    assert {o.not_before for o in rig.now_of(CancelCheckpoint)} == {0}


def test_a_failure_from_before_a_ranks_return_does_not_count_against_its_last_step():
    """Said by rank 3 before it returned, heard behind the return of rank 0."""
    rig = job()
    rig.returned(0)
    skip(rig, 3, at(1, 9))
    assert not rig.now_of(CancelCheckpoint), "a last step is never called off"
    for number in (1, 2, 3):
        rig.returned(number)
    assert not rig.all_of(JobEnded)
    for number in range(4):
        written(rig, number, at(1, 9))
    assert rig.now_of(CommitCheckpoint)


def test_by_time_the_next_waits_for_the_one_that_is_written():
    rig = job(BY_TIME)
    rig.tick(61.0)
    step = rig.now_of(CheckpointAt)[0].step
    for _ in range(5):
        rig.tick(61.0)
        assert not rig.now_of(CheckpointAt)
    for number in range(4):
        written(rig, number, at(1, step))
    rig.from_node(0, commit_done(at(1, step)))
    rig.tick(0.1)
    assert rig.now_of(CheckpointAt), "at once, for it is long due"


def test_by_time_the_next_comes_where_the_one_before_was_given_up_or_never_gathered():
    rig = job(BY_TIME)
    rig.tick(61.0)
    first = rig.now_of(CheckpointAt)[0].step
    rig.from_node(0, CheckpointFailed(checkpoint=at(1, first), rank=Rank(0), reason="full"))
    rig.tick(61.0)
    assert rig.now_of(CheckpointAt)
    rig.tick(GATHERING_LIMIT_S + 1.0)
    assert "not written by every rank" in rig.now_of(CheckpointLost)[0].reason
    assert rig.now_of(CheckpointAt)


def test_a_node_that_was_away_hears_of_the_announced_step():
    rig = job(BY_TIME)
    rig.tick(61.0)
    step = rig.now_of(CheckpointAt)[0].step
    rig.lose(1)
    rig.hello(1)
    assert [o.step for o in rig.now_of(CheckpointAt)] == [step]


def test_an_announced_step_that_one_rank_missed_is_cancelled_for_the_others():
    rig = job(BY_TIME)
    rig.tick(61.0)
    step = rig.now_of(CheckpointAt)[0].step
    rig.from_node(1, CheckpointMissed(step=step))
    assert rig.now_of(CancelCheckpoint)[0].checkpoint == at(1, step)
    assert rig.now_of(CheckpointAt)[0].step > step


# --- the node ------------------------------------------------------------------------------------


def node_rig() -> NodeRig:
    return NodeRig(checkpoints=BY_STEPS).ready().active()


def cancel(rig: NodeRig, checkpoint: SnapshotId, not_before: int = 0) -> None:
    rig.feed(FromJob(CancelCheckpoint(checkpoint=checkpoint, not_before=Step(not_before))))


def test_a_step_that_a_rank_skips_is_told():
    rig = node_rig()
    rig.say(0, RankSkipped(snapshot=at(1, 8), reason="busy"))
    (told,) = rig.now_of(CheckpointFailed)
    assert (told.is_skip, told.rank, told.reason) == (True, 0, "rank 0: busy")
    rig.say(0, RankSkipped(snapshot=at(1, 8), reason="late", is_late=True))
    assert rig.now_of(CheckpointMissed) and not rig.now_of(CheckpointFailed)


def test_a_cancelled_write_is_called_off_and_its_slot_let_go_at_once():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    cancel(rig, at(1, 8), 20)
    assert rig.now_of(CancelWrite) == [CancelWrite(Rank(0), at(1, 8))]
    assert [c.not_before for c in rig.now_of(RankCancel)] == [20, 20]
    assert rig.now_of(RankUnpin)[0].snapshot == at(1, 8)
    rig.say(0, RankSealed(snapshot=at(1, 20)))
    assert rig.now_of(WriteSlot)[0].checkpoint == at(1, 20), "its thread is not waited for"
    rig.feed(SlotNotWritten(Rank(0), at(1, 8), "called off"))
    assert not rig.now_of(CheckpointFailed) and rig.rank(0).writing.checkpoint == at(1, 20)
    assert rig.rank(0).abandoned == ()


def test_a_slot_that_is_sealed_when_it_is_cancelled_already_is_not_written():
    rig = node_rig()
    cancel(rig, at(1, 8))
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    assert not rig.now_of(WriteSlot)
    assert rig.now_of(RankUnpin)


def test_the_last_step_is_written_though_it_was_cancelled():
    rig = node_rig()
    cancel(rig, at(1, 9))
    done = RankReturned(generation=Generation(1), rank=Rank(0), step=Step(9), digests=())
    rig.say(0, done, snapshots=held((1, 8), (1, 9)))
    assert rig.now_of(WriteSlot)[0].checkpoint == at(1, 9)
    cancel(rig, at(1, 9))
    assert not rig.now_of(CancelWrite)
    rig.feed(slot_written(0, at(1, 9)))
    assert rig.now_of(ShardWritten)[0].shard == shard(0)


def signs(rig: NodeRig, count: int, after_s: float) -> None:
    rig.now += after_s
    rig.feed(NodeTick(frozenset(), (WriteSigns(Rank(0), at(1, 8), count),)))


def test_a_write_that_moves_may_take_as_long_as_it_likes():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    for count in range(100):
        signs(rig, count, QUIET_AFTER_S - 1.0)
    assert rig.rank(0).writing is not None
    assert not [n for n in rig.all_of(Noted) if n.topic == "checkpoint store"]


def test_a_store_that_takes_nothing_is_spoken_of_once_and_then_given_up():
    rig = node_rig()
    rig.say(0, RankSealed(snapshot=at(1, 8)))
    for _ in range(3):
        signs(rig, 0, QUIET_AFTER_S * 0.7)
    (said,) = [n for n in rig.all_of(Noted) if n.topic == "checkpoint store"]
    assert "it has taken nothing of step 8" in said.text
    signs(rig, 1, 1.0)
    assert "goes on" in rig.now_of(Noted)[0].text
    signs(rig, 1, STALL_LIMIT_S + 1.0)
    assert rig.now_of(CheckpointFailed)[0].checkpoint == at(1, 8)
    assert rig.now_of(RankUnpin) and rig.now_of(CancelWrite)


def hang(rig: NodeRig, step: int) -> None:
    rig.say(0, RankSealed(snapshot=at(1, step)))
    rig.tick(STALL_LIMIT_S + 1.0)


def test_threads_that_hang_are_bounded_and_checkpoints_off_until_one_ends():
    rig = node_rig()
    for number in range(ABANDONED_MAX):
        hang(rig, 8 + number)
    (off,) = [n for n in rig.all_of(Noted) if n.topic == "checkpoints are off"]
    assert off.rank == 0
    rig.say(0, RankSealed(snapshot=at(1, 20)))
    assert not rig.now_of(WriteSlot)
    assert "checkpoints are off" in rig.now_of(CheckpointFailed)[0].reason
    assert rig.now_of(RankUnpin)[0].snapshot == at(1, 20)
    rig.say(1, RankSealed(snapshot=at(1, 20)))
    assert rig.now_of(WriteSlot), "each rank has its own"
    rig.feed(SlotNotWritten(Rank(0), at(1, 8), "late"))
    assert rig.now_of(Noted)[0].topic == "checkpoints are on again"
    rig.say(0, RankSealed(snapshot=at(1, 24)))
    assert rig.now_of(WriteSlot)


def test_the_threads_that_hang_are_counted_over_processes():
    from unit.core.test_node import ended, interrupt

    rig = node_rig()
    hang(rig, 8)
    rig.feed(ended(0))
    rig.feed(interrupt(1, (0, 1)))
    assert [w.checkpoint for w in rig.rank(0).abandoned] == [at(1, 8)]


def test_a_slot_that_is_written_again_while_its_first_write_hangs_is_the_second_ones():
    rig = node_rig()
    hang(rig, 8)
    rig.feed(FromJob(PersistSlots(checkpoint=at(1, 8), sources={Rank(0): at(1, 8)})))
    assert rig.now_of(WriteSlot) == [WriteSlot(Rank(0), at(1, 8), attempt=1)]
    signs(rig, 7, STALL_LIMIT_S - 1.0)  # of the first
    again = WriteSigns(Rank(0), at(1, 8), 1, attempt=1)
    rig.feed(NodeTick(frozenset(), (again,)))
    rig.feed(SlotNotWritten(Rank(0), at(1, 8), "late"))
    assert not rig.outputs and rig.rank(0).abandoned == ()
    rig.feed(replace(slot_written(0, at(1, 8)), attempt=1))
    assert rig.now_of(ShardWritten) and rig.now_of(RankUnpin)


def test_a_store_that_never_says_what_it_holds_is_spoken_of_once_and_then_refused():
    rig = NodeRig(checkpoints=BY_STEPS).connect()
    for _ in range(3):
        rig.tick(QUIET_AFTER_S * 0.7)
    (said,) = rig.all_of(Noted)
    assert (said.topic, said.text[:16]) == ("checkpoint store", "it has not answe")
    rig.tick(STALL_LIMIT_S)
    assert "no answer for 300 s" in rig.now_of(StoreRefused)[0].reason
    rig.tick(STALL_LIMIT_S)
    assert not rig.now_of(StoreRefused), "once"


def test_a_node_whose_store_is_gone_holds_no_recovery():
    """Its agent was replaced, and cannot look; the others know what is there."""
    rig = job()
    rig.lose(1)
    rig.hello(1, pid=99)
    rig.leave(0, 1)
    for number in (2, 3):
        rig.set_rank(number, state=RankState.READY, pid=2000, incarnation=2, generation=0, step=0)
    report = NodeReport(
        node=NodeId(1),
        ranks=tuple(rig.reports[r] for r in rig.ranks_of(1)),
        heard=rig.state.generation,
        store_port=7009,
        checkpoints=None,  # it has not looked yet
    )
    rig.from_node(1, report)
    assert rig.now_of(StartGeneration), "it is not waited for"
    rig.from_node(1, StoreRefused(node=NodeId(1), reason="no answer"))
    assert rig.now_of(Note) and not rig.now_of(JobEnded)


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION])
def test_a_cancellation_in_a_recovery_is_of_the_old_generation_alone(kind: FaultKind):
    rig = job()
    rig.fault(kind)
    rig.leave(0, 1, 2, 3)
    skip(rig, 3, at(1, 4))
    assert {o.not_before for o in rig.now_of(CancelCheckpoint)} == {0}


def test_commits_that_hang_are_bounded():
    rig = node_rig()
    for step in (8, 12, 16):
        rig.feed(FromJob(CommitCheckpoint(checkpoint=at(1, step), shards=())))
        assert not rig.now_of(CheckpointFailed)
    rig.feed(FromJob(CommitCheckpoint(checkpoint=at(1, 20), shards=())))
    assert "3 earlier commits hang" in rig.now_of(CheckpointFailed)[0].reason
