"""The node's writes: slots on their way into the checkpoint store.

Works on a `NodeTurn` of the node's machine (`core.node`). Owns: which slot of a rank is written,
one at a time; when a write is given up; how many that hang may be left behind.
Does not own: bytes and threads (`agent.durable`), commits (`core.node_durable`).
Invariants: a slot that is being written is pinned: its rank's process, and the one after it, keep
it. No slot stays pinned for a write that is given up. A store that hangs costs each rank
`ABANDONED_MAX` writes, of two or three threads each, and no step of the training.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.core import node_durable
from stepfast.core.durable import QUIET_AFTER_S, STALL_LIMIT_S
from stepfast.core.messages import (
    CancelCheckpoint,
    CheckpointFailed,
    PersistSlots,
    RankCancel,
    RankSealed,
    RankState,
    RankUnpin,
    ShardWritten,
)
from stepfast.core.node_state import (
    LocalRank,
    SlotNotWritten,
    SlotWritten,
    WriteSigns,
    Writing,
)
from stepfast.core.node_turn import NodeTurn
from stepfast.core.outputs import CancelWrite, WriteSlot
from stepfast.core.terms import Rank, SnapshotId, Step

ABANDONED_MAX = 3  # of each rank: writes that hang in the store, where nothing can end them
_WRITTEN_MAX = 2  # of each rank; told again when a coordinator comes back
_CANCELLED_MAX = 8
_OFF = "checkpoints are off"


def sealed(turn: NodeTurn, rank: Rank, message: RankSealed) -> None:
    """A slot that is due: write it, unless the one before is still being written."""
    local = turn.state.ranks[rank]
    if message.snapshot in turn.state.cancelled:
        turn.tell_rank(rank, RankUnpin(snapshot=message.snapshot))
        return
    if local.writing is None:
        _write(turn, local, message.snapshot)
        return
    if local.writing.checkpoint == message.snapshot:
        return
    before = local.writing.checkpoint.step
    reason = f"rank {rank}: the checkpoint of step {before} was still being written"
    turn.tell(CheckpointFailed(checkpoint=message.snapshot, rank=rank, reason=reason, is_skip=True))
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
        node_durable.tell_again(turn)
    elif local.writing is None:
        _write(turn, local, slot)
    elif local.writing.checkpoint != slot:
        turn.set_rank(local.rank, write_next=slot)


def cancel(turn: NodeTurn, order: CancelCheckpoint) -> None:
    """Nobody writes it any more. A last step is written by all ranks as they return, whatever
    became of it before.
    """
    cancelled = (*turn.state.cancelled, order.checkpoint)
    turn.update(cancelled=cancelled[-_CANCELLED_MAX:])
    for rank, local in sorted(turn.state.ranks.items()):
        if local.state is RankState.RETURNED or local.pid == 0:
            continue
        told = RankCancel(snapshot=order.checkpoint, not_before=order.not_before)
        turn.tell_rank(rank, told)
        if local.writing is not None and local.writing.checkpoint == order.checkpoint:
            _abandon(turn, local)


def slot_written(turn: NodeTurn, given: SlotWritten) -> None:
    """Tell it, and let the slot go."""
    if not _ends_what_counts(turn, given):
        return
    local = turn.state.ranks[given.rank]
    told = ShardWritten(checkpoint=given.checkpoint, shard=given.shard, seconds=given.seconds)
    turn.set_rank(given.rank, written=(*local.written, told)[-_WRITTEN_MAX:])
    turn.tell(told)
    _end_writing(turn, given.rank)


def slot_not_written(turn: NodeTurn, given: SlotNotWritten) -> None:
    """The checkpoint will not be; the rank trains on."""
    if _ends_what_counts(turn, given):
        _tell_failed(turn, given.rank, given.checkpoint, given.reason)
        _end_writing(turn, given.rank)


def _ends_what_counts(turn: NodeTurn, given: SlotWritten | SlotNotWritten) -> bool:
    """Whether it is the rank's present write; else a thread has ended that nobody waits for."""
    local = turn.state.ranks.get(given.rank)
    if local is None:
        return False
    if local.writing is not None and local.writing.is_of(given):
        return True
    rest = tuple(writing for writing in local.abandoned if not writing.is_of(given))
    was_off = len(local.abandoned) >= ABANDONED_MAX
    turn.set_rank(given.rank, abandoned=rest)
    if was_off and len(rest) < ABANDONED_MAX:
        turn.note("checkpoints are on again", "a write to the store has ended", given.rank)
    return False


def heard_of(turn: NodeTurn, writes: tuple[WriteSigns, ...]) -> None:
    """Which writes move."""
    for told in writes:
        local = turn.state.ranks.get(told.rank)
        writing = None if local is None else local.writing
        if writing is None or not writing.is_of(told):
            continue
        if told.signs != writing.signs:
            moving = replace(writing, signs=told.signs, sign_at=turn.now, is_quiet=False)
            turn.set_rank(told.rank, writing=moving)
            if writing.is_quiet:
                turn.note("checkpoint store", f"step {told.checkpoint.step} goes on", told.rank)


def overdue(turn: NodeTurn) -> None:
    """A store that takes nothing: said, then given up, its thread left to itself."""
    for rank, local in sorted(turn.state.ranks.items()):
        writing = local.writing
        if writing is None:
            continue
        quiet_s = turn.now - writing.sign_at
        step = writing.checkpoint.step
        if quiet_s > STALL_LIMIT_S:
            reason = f"the store took nothing for {STALL_LIMIT_S:g} s; the write is given up"
            _tell_failed(turn, rank, writing.checkpoint, reason)
            _abandon(turn, local)
        elif quiet_s > QUIET_AFTER_S and not writing.is_quiet:
            text = (
                f"it has taken nothing of step {step} for {QUIET_AFTER_S:g} s; given up after"
                f" {STALL_LIMIT_S:g} s, and training goes on"
            )
            turn.note("checkpoint store", text, rank)
            turn.set_rank(rank, writing=replace(writing, is_quiet=True))


def _abandon(turn: NodeTurn, local: LocalRank) -> None:
    """Wait for the write no longer. Its thread may sit in a call that nothing interrupts."""
    assert local.writing is not None, "a write is given up that had begun"
    abandoned = (*local.abandoned, local.writing)
    turn.set_rank(local.rank, abandoned=abandoned)
    turn.emit(CancelWrite(local.rank, local.writing.checkpoint, local.writing.attempt))
    if len(abandoned) == ABANDONED_MAX:
        text = f"{ABANDONED_MAX} writes hang in the store; training goes on without checkpoints"
        turn.note(_OFF, f"{text} until one of them ends", local.rank)
    _end_writing(turn, local.rank)


def _write(turn: NodeTurn, local: LocalRank, slot: SnapshotId) -> None:
    hanging = len(local.abandoned)
    if hanging >= ABANDONED_MAX:
        reason = f"{_OFF}: {hanging} writes hang in the store"
        _tell_failed(turn, local.rank, slot, reason)
        turn.tell_rank(local.rank, RankUnpin(snapshot=slot))
        return
    attempt = 1 + max((w.attempt for w in local.abandoned if w.checkpoint == slot), default=-1)
    writing = Writing(checkpoint=slot, attempt=attempt, sign_at=turn.now)
    turn.set_rank(local.rank, writing=writing)
    turn.emit(WriteSlot(local.rank, slot, attempt))


def _end_writing(turn: NodeTurn, rank: Rank) -> None:
    local = turn.state.ranks[rank]
    assert local.writing is not None, "a write ends that had begun"
    checkpoint, following = local.writing.checkpoint, local.write_next
    local = turn.set_rank(rank, writing=None, write_next=None)
    turn.tell_rank(rank, RankUnpin(snapshot=checkpoint))
    if following is not None:
        _write(turn, local, following)


def _tell_failed(turn: NodeTurn, rank: Rank, checkpoint: SnapshotId, reason: str) -> None:
    told = CheckpointFailed(checkpoint=checkpoint, rank=rank, reason=f"rank {rank}: {reason}")
    turn.tell(told)
