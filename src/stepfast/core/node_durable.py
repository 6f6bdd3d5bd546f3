"""The node's part in durable checkpoints: what the store holds, announced steps, commits.

Works on a `NodeTurn` of the node's machine (`core.node`). Owns: what the coordinator is told of
them, and told again. Does not own: the writes (`core.node_writes`), bytes and threads
(`agent.durable`).
"""

from __future__ import annotations

from stepfast.core.durable import QUIET_AFTER_S, STALL_LIMIT_S
from stepfast.core.messages import (
    CheckpointAt,
    CheckpointFailed,
    CheckpointMissed,
    CheckpointsHeld,
    CommitCheckpoint,
    CommitDone,
    RankCheckpointAt,
    RankSkipped,
    RankState,
    StoreRefused,
)
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    StoreUnusable,
)
from stepfast.core.node_turn import NodeTurn
from stepfast.core.outputs import CommitShards, ListCheckpoints
from stepfast.core.terms import Rank

_COMMITTING_MAX = 3  # threads of commits that hang are left to themselves, and so many at most


def look_into_store(turn: NodeTurn) -> None:
    """After the first welcome: which checkpoints are there."""
    settings = turn.state.settings
    assert settings is not None, "after the welcome"
    if settings.checkpoints.url and not turn.state.store_asked:
        turn.update(checkpoints=None, store_asked=True, listing_since=turn.now)
        turn.emit(ListCheckpoints())


def listed(turn: NodeTurn, given: CheckpointsListed) -> None:
    """The store answered."""
    turn.update(checkpoints=given.checkpoints, store_below=given.below, listing_since=None)
    for problem in given.problems:
        turn.note("checkpoint passed over", problem)


def store_unusable(turn: NodeTurn, given: StoreUnusable) -> None:
    """No job can begin here; told until it is heard."""
    refusal = StoreRefused(node=turn.state.node, reason=given.reason, exit_code=given.exit_code)
    turn.update(store_refusal=refusal, listing_since=None)
    turn.tell(refusal)


def listing_overdue(turn: NodeTurn) -> None:
    """A store that neither answers nor fails: said, then taken for one that fails."""
    asked_at = turn.state.listing_since
    if asked_at is None:
        return
    quiet_s = turn.now - asked_at
    if quiet_s > STALL_LIMIT_S:
        reason = f"the checkpoint store cannot be used: no answer for {STALL_LIMIT_S:g} s"
        store_unusable(turn, StoreUnusable(reason))
    elif quiet_s > QUIET_AFTER_S and not turn.state.listing_is_quiet:
        text = f"it has not answered for {QUIET_AFTER_S:g} s; given up after {STALL_LIMIT_S:g} s"
        turn.note("checkpoint store", text)
        turn.update(listing_is_quiet=True)


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


def skipped(turn: NodeTurn, rank: Rank, message: RankSkipped) -> None:
    """One rank is enough: what it does not keep will not be whole."""
    if message.is_late:
        turn.tell(CheckpointMissed(step=message.snapshot.step))
        return
    reason = f"rank {rank}: {message.reason}"
    turn.tell(CheckpointFailed(checkpoint=message.snapshot, rank=rank, reason=reason, is_skip=True))


def commit(turn: NodeTurn, order: CommitCheckpoint) -> None:
    """Asked twice, done once."""
    done = turn.state.committed
    if done is not None and done.checkpoint == order.checkpoint:
        turn.tell(done)
    elif order.checkpoint in turn.state.committing:
        pass  # its end will be told
    elif len(turn.state.committing) >= _COMMITTING_MAX:
        reason = f"{_COMMITTING_MAX} earlier commits hang in the store"
        turn.tell(CheckpointFailed(checkpoint=order.checkpoint, rank=None, reason=reason))
    else:
        turn.update(committing=(*turn.state.committing, order.checkpoint))
        in_flight = {x for r in turn.state.ranks.values() for x in r.in_flight}
        known, void = frozenset(turn.state.checkpoints or ()), frozenset(order.void)
        turn.emit(
            CommitShards(
                order.checkpoint, order.shards, frozenset(in_flight), known=known, void=void
            )
        )


def commit_ended(turn: NodeTurn, given: CommitEnded) -> None:
    """Committed, or not."""
    committing = tuple(c for c in turn.state.committing if c != given.checkpoint)
    turn.update(committing=committing)
    if given.reason is not None:
        turn.tell(CheckpointFailed(checkpoint=given.checkpoint, rank=None, reason=given.reason))
        return
    done = CommitDone(
        checkpoint=given.checkpoint,
        name=given.name,
        size_bytes=given.size_bytes,
        seconds=given.seconds,
        removed=tuple(sorted(given.removed)),
        vanished=tuple(sorted(given.vanished)),
    )
    known = set(turn.state.checkpoints or ()) - given.removed - given.vanished
    turn.update(committed=done, checkpoints=tuple(sorted(known | {given.checkpoint})))
    turn.tell(done)


def held(turn: NodeTurn, order: CheckpointsHeld) -> None:
    """Another node has committed; what this one committed meanwhile is there all the same."""
    if turn.state.checkpoints is None:
        return  # this node looks itself
    own = turn.state.committed
    known = {*order.checkpoints} | (set() if own is None else {own.checkpoint})
    turn.update(checkpoints=tuple(sorted(known)))
