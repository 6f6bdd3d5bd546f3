"""The node's part in durable checkpoints: slots that are being written to the store, commits that
it was asked for.

Works on a `NodeTurn` of the node's machine (`core.node`). Owns: which slot of a rank is written,
one at a time; what the coordinator is told of it, and told again.
Does not own: bytes and threads (`agent.durable`).
Invariant: a slot that is being written is pinned: its rank's process, and the one after it, keep
it.
"""

from __future__ import annotations

from stepfast.core.durable import CHECKPOINT_LIMIT_S
from stepfast.core.messages import (
    CheckpointAt,
    CheckpointFailed,
    CheckpointMissed,
    CommitCheckpoint,
    CommitDone,
    PersistSlots,
    RankCheckpointAt,
    RankSealed,
    RankState,
    RankUnpin,
    ShardWritten,
    StoreRefused,
)
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    LocalRank,
    SlotNotWritten,
    SlotWritten,
    StoreUnusable,
    Writing,
)
from stepfast.core.node_turn import NodeTurn
from stepfast.core.outputs import CommitShards, ListCheckpoints, WriteSlot
from stepfast.core.terms import Rank, SnapshotId, Step

_WRITTEN_MAX = 2  # of each rank; told again when a coordinator comes back


def look_into_store(turn: NodeTurn) -> None:
    """After the first welcome: which checkpoints are there."""
    settings = turn.state.settings
    assert settings is not None, "after the welcome"
    if settings.checkpoints.url and not turn.state.store_asked:
        turn.update(checkpoints=None, store_asked=True)
        turn.emit(ListCheckpoints())


def listed(turn: NodeTurn, given: CheckpointsListed) -> None:
    """The store answered."""
    turn.update(checkpoints=given.checkpoints, store_below=given.below)
    for problem in given.problems:
        turn.note("checkpoint passed over", problem)


def store_unusable(turn: NodeTurn, given: StoreUnusable) -> None:
    """The job cannot begin here; told until it is heard."""
    refusal = StoreRefused(node=turn.state.node, reason=given.reason, exit_code=given.exit_code)
    turn.update(store_refusal=refusal)
    turn.tell(refusal)


def tell_again(turn: NodeTurn) -> None:
    """What stands and might not have been heard."""
    if turn.state.store_refusal is not None:
        turn.tell(turn.state.store_refusal)
    for _, local in sorted(turn.state.ranks.items()):
        for message in local.written:
            turn.tell(message)
    if turn.state.committed is not None:
        turn.tell(turn.state.committed)


def checkpoint_at(turn: NodeTurn, order: CheckpointAt) -> None:
    """Pass an announced step on, unless a rank here has passed it."""
    inside = [
        local
        for _, local in sorted(turn.state.ranks.items())
        if local.state is RankState.ACTIVE and local.generation == order.generation
    ]
    if any(local.step >= order.step for local in inside):
        turn.tell(CheckpointMissed(step=order.step))
        return
    for local in inside:
        turn.tell_rank(local.rank, RankCheckpointAt(step=order.step))


def sealed(turn: NodeTurn, rank: Rank, message: RankSealed) -> None:
    """A slot that is due: write it, unless the one before is still being written."""
    local = turn.state.ranks[rank]
    if local.writing is None:
        _write(turn, local, message.snapshot)
        return
    if local.writing.checkpoint == message.snapshot:
        return
    before = local.writing.checkpoint.step
    reason = f"rank {rank}: the checkpoint of step {before} was still being written"
    turn.tell(CheckpointFailed(checkpoint=message.snapshot, rank=rank, reason=reason))
    turn.tell_rank(rank, RankUnpin(snapshot=message.snapshot))


def returned(turn: NodeTurn, rank: Rank, step: Step) -> None:
    """The rank's last step becomes durable, in the name of the generation that reached it."""
    settings = turn.state.settings
    assert settings is not None, "after the welcome"
    if not settings.checkpoints.url or step == 0:
        return
    local = turn.state.ranks[rank]
    slot = max((s for s in local.snapshots if s.step == step), default=None)
    if slot is None:
        missing = SnapshotId(local.generation, step)
        reason = f"rank {rank}: no slot holds the last step"
        turn.tell(CheckpointFailed(checkpoint=missing, rank=rank, reason=reason))
    else:
        _write_in_turn(turn, local, slot)


def persist(turn: NodeTurn, order: PersistSlots) -> None:
    """The ranks are no more, and their slots hold still."""
    for rank, slot in sorted(order.sources.items()):
        local = turn.state.ranks.get(rank)
        if local is not None:
            _write_in_turn(turn, local, slot)


def _write_in_turn(turn: NodeTurn, local: LocalRank, slot: SnapshotId) -> None:
    """Write it, behind what is being written; where that is done already, say so again."""
    if any(told.checkpoint == slot for told in local.written):
        tell_again(turn)
    elif local.writing is None:
        _write(turn, local, slot)
    elif local.writing.checkpoint != slot:
        turn.set_rank(local.rank, write_next=Writing(checkpoint=slot, since=turn.now))


def slot_written(turn: NodeTurn, given: SlotWritten) -> None:
    """Tell it, and let the slot go."""
    local = turn.state.ranks.get(given.rank)
    if local is None or local.writing is None or local.writing.checkpoint != given.checkpoint:
        return  # given up before
    told = ShardWritten(checkpoint=given.checkpoint, shard=given.shard, seconds=given.seconds)
    turn.set_rank(given.rank, written=(*local.written, told)[-_WRITTEN_MAX:])
    turn.tell(told)
    _end_writing(turn, given.rank)


def slot_not_written(turn: NodeTurn, given: SlotNotWritten) -> None:
    """The checkpoint will not be; the rank trains on."""
    local = turn.state.ranks.get(given.rank)
    if local is None or local.writing is None or local.writing.checkpoint != given.checkpoint:
        return
    reason = f"rank {given.rank}: {given.reason}"
    turn.tell(CheckpointFailed(checkpoint=given.checkpoint, rank=given.rank, reason=reason))
    _end_writing(turn, given.rank)


def overdue(turn: NodeTurn) -> None:
    """A store that does not answer: the write is given up, its thread is left to itself."""
    for rank, local in sorted(turn.state.ranks.items()):
        if local.writing is not None and turn.now - local.writing.since > CHECKPOINT_LIMIT_S:
            reason = f"not written within {CHECKPOINT_LIMIT_S:g} s"
            slot_not_written(turn, SlotNotWritten(rank, local.writing.checkpoint, reason))


def commit(turn: NodeTurn, order: CommitCheckpoint) -> None:
    """Asked twice, done once."""
    done = turn.state.committed
    if done is not None and done.checkpoint == order.checkpoint:
        turn.tell(done)
    elif turn.state.committing != order.checkpoint:
        turn.update(committing=order.checkpoint)
        in_flight = {x.checkpoint for r in turn.state.ranks.values() for x in r.in_flight}
        turn.emit(CommitShards(order.checkpoint, order.shards, frozenset(in_flight)))


def commit_ended(turn: NodeTurn, given: CommitEnded) -> None:
    """Committed, or not."""
    if turn.state.committing == given.checkpoint:
        turn.update(committing=None)
    if given.reason is not None:
        turn.tell(CheckpointFailed(checkpoint=given.checkpoint, rank=None, reason=given.reason))
        return
    done = CommitDone(
        checkpoint=given.checkpoint,
        name=given.name,
        size_bytes=given.size_bytes,
        seconds=given.seconds,
    )
    known = set(turn.state.checkpoints or ()) - given.removed
    turn.update(committed=done, checkpoints=tuple(sorted(known | {given.checkpoint})))
    turn.tell(done)


def _write(turn: NodeTurn, local: LocalRank, slot: SnapshotId) -> None:
    turn.set_rank(local.rank, writing=Writing(checkpoint=slot, since=turn.now))
    turn.emit(WriteSlot(local.rank, slot))


def _end_writing(turn: NodeTurn, rank: Rank) -> None:
    local = turn.state.ranks[rank]
    assert local.writing is not None, "a write ends that had begun"
    checkpoint, following = local.writing.checkpoint, local.write_next
    local = turn.set_rank(rank, writing=None, write_next=None)
    turn.tell_rank(rank, RankUnpin(snapshot=checkpoint))
    if following is not None:
        _write(turn, local, following.checkpoint)
