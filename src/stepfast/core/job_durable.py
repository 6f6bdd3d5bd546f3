"""The job's handling of durable checkpoints: announce, gather, have them committed, and wait for
the last one.

Works on a `Turn` of the job's machine (`core.job`). Owns: when a step is announced, who commits.
Does not own: the account itself (`core.durable`).
Invariants: at most one commit is under way; a job with a checkpoint store finishes only when its
last step is committed.
"""

from __future__ import annotations

import math
from dataclasses import replace

from stepfast.core.durable import (
    COMMIT_LIMIT_S,
    DRAIN_LIMIT_S,
    GATHERING_LIMIT_S,
    Announcement,
    Commit,
)
from stepfast.core.job_state import Drain, Phase
from stepfast.core.job_turn import Turn
from stepfast.core.messages import (
    CancelCheckpoint,
    CheckpointAt,
    CheckpointFailed,
    CheckpointMissed,
    CheckpointsHeld,
    CommitCheckpoint,
    CommitDone,
    PersistSlots,
    ShardWritten,
    StoreRefused,
)
from stepfast.core.placement import ranks_of
from stepfast.core.recovery import choose_step
from stepfast.core.terms import NodeId, SnapshotId, Step
from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import (
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRejected,
    CheckpointsVanished,
    Note,
)

_ANNOUNCED_AHEAD_S = 1.0  # heartbeats and orders take so long, at the most, on the way
_MARGIN_STEPS_MAX = 1024
_ABSENT_LIMIT_S = 10.0  # an ending job waits so long for nodes that lost their connection
_KEPT_HINT = "make room or reach the store, and run again: the state is kept in memory"
_LOST_HINT = "no memory holds it: run again, from what is committed"


def shard_written(turn: Turn, message: ShardWritten) -> None:
    """Take a shard in; one of an abandoned lineage is of no use."""
    state = turn.state
    if not state.lineage.admits(message.checkpoint):
        return
    turn.update(durable=state.durable.written(message.checkpoint, message.shard))
    commit_if_whole(turn)


def failed(turn: Turn, message: CheckpointFailed) -> None:
    """A shard or a commit failed: the checkpoint is given up by all ranks, training goes on.

    What one rank skipped is of use to none. Without a word ranks that write at different speeds
    could skip different steps for ever, and nothing would be committed.
    """
    state = turn.state
    durable = state.durable
    checkpoint = message.checkpoint
    if checkpoint in durable.failed or checkpoint in durable.committed:
        return
    if message.rank is not None and state.returned and message.rank not in state.returned:
        return  # it writes its last step once more when it returns; then the word counts
    if message.is_skip:
        durable = durable.skipped()
    if not message.is_skip or durable.skips == 1:
        turn.record(
            CheckpointLost(
                step=checkpoint.step,
                generation=checkpoint.generation,
                rank=message.rank,
                reason=message.reason,
            )
        )
    turn.update(durable=durable.lost(checkpoint, message.reason))
    if message.rank is not None:
        _cancel(turn, checkpoint, is_skip=message.is_skip)
    commit_if_whole(turn)


def _cancel(turn: Turn, checkpoint: SnapshotId, *, is_skip: bool) -> None:
    """Nobody writes it any more; behind a skip all ranks go on together."""
    state = turn.state
    if state.returned or state.end is not None:
        return
    not_before = Step(0)
    if is_skip and checkpoint.generation == state.generation:
        not_before = _together_from(turn, checkpoint.step)
    order = CancelCheckpoint(checkpoint=checkpoint, not_before=not_before)
    for node in state.membership.connected_nodes:
        turn.send(node, order)


def _together_from(turn: Turn, skipped: Step) -> Step:
    """A step that no rank has reached when it hears of it. Where one had, and ranks are apart
    again, the next is further ahead.
    """
    state = turn.state
    durable = state.durable
    told = durable.together
    if told.generation == state.generation and skipped < told.step:
        return told.step  # skipped before the word came
    rounds = durable.rounds + 1
    step = _step_ahead(turn, min(2**rounds, _MARGIN_STEPS_MAX), reached=skipped)
    together = SnapshotId(state.generation, step)
    turn.update(durable=replace(durable, together=together, rounds=rounds))
    return step


def committed(turn: Turn, node: NodeId, message: CommitDone) -> None:
    """The manifest is in the store: from now on the job can go on from there."""
    durable = turn.state.durable
    if message.checkpoint not in durable.committed:
        if durable.skips > 1:
            text = f"{durable.skips} due steps were skipped while earlier ones were being written"
            turn.record(Note(topic="checkpoints skipped", text=text))
        turn.record(
            CheckpointCommitted(
                step=message.checkpoint.step,
                generation=message.checkpoint.generation,
                name=message.name,
                size_bytes=message.size_bytes,
                seconds=message.seconds,
            )
        )
        if message.vanished:
            steps = tuple(c.step for c in message.vanished)
            turn.record(CheckpointsVanished(steps=steps, url=turn.state.settings.checkpoints.url))
    gone = (*message.removed, *message.vanished)
    turn.update(durable=durable.done(message.checkpoint, gone))
    _tell_what_is_held(turn, besides=node)
    commit_if_whole(turn)


def _tell_what_is_held(turn: Turn, besides: NodeId) -> None:
    held = CheckpointsHeld(checkpoints=tuple(sorted(turn.state.durable.committed)))
    for node in turn.state.membership.connected_nodes:
        if node != besides:
            turn.send(node, held)


def missed(turn: Turn, message: CheckpointMissed) -> None:
    """Ranks were faster than the word: announce again, further ahead."""
    announced = turn.state.durable.announced
    if message.step != announced.step:
        return
    late = SnapshotId(announced.generation, announced.step)
    turn.update(durable=turn.state.durable.lost(late, "announced too late"))
    _cancel(turn, late, is_skip=False)
    _announce(turn, min(announced.margin_steps * 2, _MARGIN_STEPS_MAX))


def refused(turn: Turn, message: StoreRefused) -> None:
    """No job begins that could not keep what it does; one that runs goes on without."""
    if turn.state.phase is not Phase.FORMING:
        turn.record(Note(topic="checkpoint store", text=message.reason, node=message.node))
        return
    turn.end("failed", message.exit_code, f"node {message.node}: {message.reason}")


def rejected(turn: Turn, checkpoint: SnapshotId, reason: str) -> None:
    """A checkpoint was read and is damaged: an older one is used, or the job ends where that is
    wished.
    """
    state = turn.state
    if checkpoint in state.durable.rejected:
        return
    turn.record(
        CheckpointRejected(step=checkpoint.step, generation=checkpoint.generation, reason=reason)
    )
    turn.update(durable=state.durable.refused(checkpoint))
    if state.settings.checkpoints.is_strict:
        hint = "without --strict an older one is used"
        turn.end("failed", EXIT_TRY_AGAIN, f"{reason} ({hint})")


def commit_if_whole(turn: Turn) -> None:
    """Have one node commit what is whole; one at a time."""
    state = turn.state
    durable = state.durable
    if durable.commit is not None:
        return
    checkpoint = durable.whole(state.settings.world_size, state.lineage)
    nodes = state.membership.connected_nodes
    if checkpoint is None or not nodes:
        return
    node = nodes[checkpoint.step % len(nodes)]
    deadline = turn.now + COMMIT_LIMIT_S
    turn.update(
        durable=replace(durable, commit=Commit(checkpoint=checkpoint, node=node, deadline=deadline))
    )
    shards = tuple(s for _, s in sorted(durable.shards[checkpoint].items()))
    void = tuple(sorted(durable.void(state.lineage)))
    turn.send(node, CommitCheckpoint(checkpoint=checkpoint, shards=shards, void=void))


def node_is_back(turn: Turn, node: NodeId) -> None:
    """It may never have heard of the commit that it was asked for, nor of the step that was
    announced: it is told again.
    """
    state = turn.state
    commit = state.durable.commit
    if commit is not None and commit.node == node:
        turn.update(durable=replace(state.durable, commit=None))
    awaited = state.durable.awaits(state.generation)
    if awaited is not None and state.phase is Phase.RUNNING:
        turn.send(node, CheckpointAt(generation=state.generation, step=awaited.step))


def tick(turn: Turn) -> None:
    """Time: a commit whose node went away is another node's; a checkpoint may be due."""
    state = turn.state
    commit = state.durable.commit
    if commit is not None:
        view = state.membership.nodes.get(commit.node)
        if view is None or not view.connected:
            turn.update(durable=replace(state.durable, commit=None))
        elif turn.now > commit.deadline:
            reason = f"not committed within {COMMIT_LIMIT_S:g} s"
            failed(turn, CheckpointFailed(checkpoint=commit.checkpoint, rank=None, reason=reason))
    commit_if_whole(turn)
    _announce_if_due(turn)


def _announce_if_due(turn: Turn) -> None:
    state = turn.state
    interval_s = state.settings.checkpoints.interval_s
    if not state.settings.checkpoints.url or not interval_s or state.phase is not Phase.RUNNING:
        return
    announced = state.durable.announced
    is_due = turn.now - (announced.at or state.opened_at) >= interval_s
    if is_due and (late := state.durable.awaits(state.generation)) is not None:
        if turn.now - announced.at < max(interval_s, GATHERING_LIMIT_S):
            return  # one at a time; the next is due as soon as it is settled
        reason = f"not written by every rank within {GATHERING_LIMIT_S:g} s"
        failed(turn, CheckpointFailed(checkpoint=late, rank=None, reason=reason))
        _cancel(turn, late, is_skip=False)
    # The generation that was told is over, and nobody makes that step durable any more.
    is_void = announced.step >= 0 and announced.generation != state.generation
    if is_due or (is_void and not state.durable.holds(announced.step, state.lineage)):
        _announce(turn, announced.margin_steps)


def _step_ahead(turn: Turn, margin_steps: int, *, reached: int = 0) -> Step:
    """A step that no rank has reached, nor will before a word of now has come to it. `reached`:
    some rank has, as far as is known otherwise than by heartbeats.
    """
    state = turn.state
    reached = max([reached, *state.steps.values()])
    elapsed_s = max(turn.now - state.running_since, _ANNOUNCED_AHEAD_S)
    first = min(state.resumed.values(), default=reached)
    per_second = max(0, reached - first) / elapsed_s
    ahead = max(margin_steps, math.ceil(per_second * _ANNOUNCED_AHEAD_S) + 2)
    interval = state.settings.snapshot_interval_steps
    return Step(-(-(reached + ahead) // interval) * interval)


def announced(turn: Turn) -> SnapshotId:
    """The checkpoint that is announced and not settled yet; where there is none, one is."""
    state = turn.state
    if state.durable.awaits(state.generation) is None:
        _announce(turn, state.durable.announced.margin_steps)
    return SnapshotId(state.generation, turn.state.durable.announced.step)


def _announce(turn: Turn, margin_steps: int) -> None:
    state = turn.state
    before = state.durable.announced
    is_apart = before.generation == state.generation  # one that was given up is not due again
    told = Announcement(
        step=_step_ahead(turn, margin_steps, reached=before.step if is_apart else 0),
        generation=state.generation,
        at=turn.now,
        margin_steps=margin_steps,
    )
    turn.update(durable=replace(state.durable, announced=told))
    for node in state.membership.connected_nodes:
        turn.send(node, CheckpointAt(generation=state.generation, step=told.step))


def rank_returned(turn: Turn, step: Step) -> None:
    """The first one at its last step, which is written from now on."""
    if not turn.state.returned:
        turn.update(durable=turn.state.durable.begun_again(step))


def last_step_is_settled(turn: Turn) -> bool:
    """Whether the job may finish: every rank has returned, and its last step is committed. Ends the
    job where that cannot be had.
    """
    state = turn.state
    if not state.settings.checkpoints.url:
        return True
    steps = {r.step for r in state.returned.values()}
    if steps == {0}:
        return True  # not a step was made
    if len(steps) > 1:
        text = f"ranks returned at steps {sorted(steps)}: no common last step to be committed"
        turn.record(Note(topic="checkpoint", text=text))
        return True
    (step,) = steps
    if state.durable.holds(step, state.lineage):
        return True
    reason = state.durable.failure(step)
    if reason is not None:
        what = f"step {step} is done but could not be made durable: {reason}"
        hint = _KEPT_HINT if _is_in_memory(turn, step) else _LOST_HINT
        turn.end("failed", EXIT_TRY_AGAIN, f"{what} ({hint})")
    return False


def _is_in_memory(turn: Turn, step: Step) -> bool:
    """Whether every rank's slots hold the step, as far as their nodes have seen."""
    ranks = turn.state.membership.ranks.values()
    return all(any(s.step == step for s in report.snapshots) for report in ranks)


# --- an ending job -------------------------------------------------------------------------------


def advance_drain(turn: Turn) -> None:
    """The ranks are ended, then what their slots hold in common is made durable, then nodes may
    leave.
    """
    state = turn.state
    end = state.end
    assert end is not None, "draining without an end"
    nodes = state.membership.nodes
    there = [n for n, view in nodes.items() if view.connected and not view.gone]
    if turn.now > end.deadline:
        _end_drain(turn, f"not within {DRAIN_LIMIT_S:g} s")
    elif len(there) < state.nodes:
        if turn.now > end.deadline - DRAIN_LIMIT_S + _ABSENT_LIMIT_S:
            _end_drain(turn, "a node is away")
    elif end.drain is Drain.RANKS and _all_ranks_ended(turn):
        _drain_slots(turn)
    elif end.drain is Drain.STORE:
        assert end.drained is not None, "something is being written"
        if end.drained in state.durable.committed:
            turn.end_drain(keep_memory=False)
        elif (reason := state.durable.failed.get(end.drained)) is not None:
            _end_drain(turn, reason)


def _all_ranks_ended(turn: Turn) -> bool:
    reports = turn.state.membership.ranks.values()
    whole = len(reports) == turn.state.settings.world_size
    return whole and all(report.pid == 0 for report in reports)


def _drain_slots(turn: Turn) -> None:
    state = turn.state
    ranks = state.membership.ranks
    plan = choose_step({rank: r.snapshots for rank, r in ranks.items()}, state.lineage)
    stored = state.durable.newest(state.lineage)
    is_new = plan is not None and plan.step > (0 if stored is None else stored.step)
    if plan is None or not is_new:
        # An earlier run left what lies there, and this one ended before it looked or could use it.
        is_earlier = plan is None and state.start is None
        turn.end_drain(keep_memory=is_earlier)
        return
    assert state.end is not None, "draining without an end"
    checkpoint = max(plan.sources.values())  # they are one: a step is sealed by all or by none
    turn.update(
        end=replace(state.end, drain=Drain.STORE, drained=checkpoint),
        durable=state.durable.begun_again(plan.step),
    )
    for node in state.membership.connected_nodes:
        local = ranks_of(node, state.settings.nproc_per_node)
        sources = {r: plan.sources[r] for r in local}
        turn.send(node, PersistSlots(checkpoint=checkpoint, sources=sources))


def _end_drain(turn: Turn, reason: str) -> None:
    text = f"the newest state could not be made durable: {reason}; memory is left as it is"
    turn.record(Note(topic="checkpoint", text=text))
    turn.end_drain(keep_memory=True)
