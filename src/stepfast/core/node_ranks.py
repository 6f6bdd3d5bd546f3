"""What the node learns from its ranks: what they say, how they end, what the coordinator is told of
it.

Works on a `NodeTurn` of the node's machine (`core.node`). Owns: a rank's level and its faults.
"""

from __future__ import annotations

import msgspec

from stepfast.core import node_durable, node_watch, node_writes
from stepfast.core.faults import (
    ErrorClass,
    Fault,
    FaultKind,
    kind_of_end,
)
from stepfast.core.messages import (
    FaultReported,
    FirstStepDone,
    FromRank,
    Heartbeat,
    PhaseBegan,
    PhaseEnded,
    ProbeAnswer,
    RankChecked,
    RankDigests,
    RankEntered,
    RankLogged,
    RankNoted,
    RankQuiet,
    RankRaised,
    RankResumed,
    RankReturned,
    RankSealed,
    RankSkipped,
    RankState,
)
from stepfast.core.node_state import (
    LOGGED_STEPS_MAX,
    FromLocalRank,
    LocalRank,
    Milestone,
    RankEnded,
)
from stepfast.core.node_turn import NodeTurn
from stepfast.core.outputs import ForkRank
from stepfast.core.terms import NO_GENERATION, Rank, Step
from stepfast.events import AFTER_THE_END


def fork(turn: NodeTurn, rank: Rank) -> None:
    """Order a fresh process: it has been in no generation, and keeps nothing but the slots."""
    old = turn.state.ranks[rank]
    fresh = LocalRank(
        rank=rank,
        incarnation=old.incarnation + 1,
        forking=True,
        snapshots=old.snapshots,
        writing=old.writing,
        abandoned=old.abandoned,
        written=old.written,
    )
    turn.update(ranks={**turn.state.ranks, rank: fresh})
    turn.emit(ForkRank(rank, fresh.incarnation))


def from_rank(turn: NodeTurn, given: FromLocalRank) -> None:
    """Take in what a rank's process said; a process that is no more has nothing to say."""
    local = turn.state.ranks.get(given.rank)
    if local is None or local.incarnation != given.incarnation or local.state is RankState.ABSENT:
        return  # of a process that is no more
    if given.snapshots is not None:
        turn.set_rank(given.rank, snapshots=given.snapshots)
    message: FromRank = given.message
    match message:
        case RankEntered():
            turn.set_rank(given.rank, state=RankState.READY)
        case PhaseBegan():
            node_watch.phase_began(turn, given.rank, message)
        case PhaseEnded():
            node_watch.phase_ended(turn, given.rank, message)
        case RankRaised():
            _raised(turn, local, message)
        case RankQuiet():
            _quiet(turn, local, message)
        case RankResumed() | FirstStepDone() | RankChecked():
            _milestone(turn, given.rank, message)
        case RankDigests(digests=digests):
            turn.set_rank(given.rank, digests=(*local.digests, *digests))
        case RankReturned():
            turn.set_rank(given.rank, state=RankState.RETURNED, step=message.step, digests=())
            beat(turn)  # what was logged is delivered before the end that may follow
            whole = msgspec.structs.replace(message, digests=(*local.digests, *message.digests))
            _milestone(turn, given.rank, whole)
            node_writes.returned(turn, given.rank, message.step)
        case RankSealed():
            node_writes.sealed(turn, given.rank, message)
        case RankSkipped():
            node_durable.skipped(turn, given.rank, message)
        case RankLogged(logged=logged):
            turn.update(
                logged=(*turn.state.logged, logged)[-LOGGED_STEPS_MAX:],
                unsent=min(turn.state.unsent + 1, LOGGED_STEPS_MAX),
            )
        case RankNoted(topic=topic, text=text):
            turn.note(topic, text, given.rank)
        case ProbeAnswer():
            node_watch.answered(turn, given.rank, message)


def _quiet(turn: NodeTurn, local: LocalRank, message: RankQuiet) -> None:
    if message.unusable is not None:  # told before its level: the barrier must not close on it
        tell_fault(
            turn,
            Fault(
                kind=FaultKind.UNUSABLE,
                generation=message.generation,
                rank=local.rank,
                node=turn.state.node,
                step=local.step,
                reason=f"rank {local.rank}: {message.unusable}",
                incarnation=local.incarnation,
            ),
        )
    turn.set_rank(
        local.rank,
        state=RankState.QUIET,
        generation=message.generation,
        leave_deadline=None,
        keep_obstacle=message.keep_obstacle,
        build_has_collectives=message.build_has_collectives,
        digests=(),
    )


def _milestone(turn: NodeTurn, rank: Rank, message: Milestone) -> None:
    turn.set_rank(rank, milestones=(*turn.state.ranks[rank].milestones, message))
    turn.tell(message)


def _raised(turn: NodeTurn, local: LocalRank, message: RankRaised) -> None:
    collective = message.error.error_class is ErrorClass.COLLECTIVE
    tell_fault(
        turn,
        Fault(
            kind=FaultKind.COLLECTIVE if collective else FaultKind.EXCEPTION,
            generation=message.generation,
            rank=local.rank,
            node=turn.state.node,
            step=message.step,
            reason=f"rank {local.rank}: {message.error.type}: {message.error.message}",
            incarnation=local.incarnation,
            error=message.error,
        ),
    )


def tell_fault(turn: NodeTurn, fault: Fault) -> None:
    """Report a fault, behind everything that was logged before it."""
    beat(turn)  # what was logged before the fault is delivered before it
    local = turn.state.ranks.get(fault.rank) if fault.rank is not None else None
    if local is not None:
        others = tuple(f for f in local.faults if f.kind is not fault.kind)
        turn.set_rank(local.rank, faults=(*others, fault))
    turn.tell(FaultReported(fault=fault))


def rank_ended(turn: NodeTurn, end: RankEnded) -> None:
    """A process ended: a fault, unless it was ordered or the job is over."""
    local = turn.state.ranks.get(end.rank)
    if local is None or local.incarnation != end.incarnation:
        return
    turn.set_rank(end.rank, snapshots=end.snapshots)
    if turn.state.finish is not None:
        _ended_after_finish(turn, local, end)
        return
    generation, step_reached = local.generation, local.step
    turn.set_rank(end.rank, state=RankState.ABSENT, pid=0, leave_deadline=None, doomed=False)
    if local.doomed:
        fork(turn, end.rank)
        return
    how = f"signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
    tell_fault(
        turn,
        Fault(
            kind=kind_of_end(end.signal),
            generation=generation,
            rank=end.rank,
            node=turn.state.node,
            step=step_reached,
            reason=f"rank {end.rank} (pid {local.pid}) ended: {how}",
            incarnation=local.incarnation,
            log_tail=end.log_tail,
        ),
    )


def _ended_after_finish(turn: NodeTurn, local: LocalRank, end: RankEnded) -> None:
    turn.set_rank(local.rank, state=RankState.GONE, pid=0)
    finish = turn.state.finish
    assert finish is not None, "after the finish"
    if finish.finished and (end.signal is not None or end.exit_code != 0):
        how = f"signal {end.signal}" if end.signal is not None else f"exit code {end.exit_code}"
        turn.note(AFTER_THE_END, f"rank {local.rank} ended with {how}", local.rank)
        turn.update(failed_after=(*turn.state.failed_after, local.rank))


def fork_failed(turn: NodeTurn, rank: Rank, incarnation: int, reason: str) -> None:
    """No process could be made: a fault like its end."""
    if turn.state.ranks[rank].incarnation != incarnation:
        return
    turn.set_rank(rank, forking=False, doomed=False, state=RankState.ABSENT)
    if turn.state.finish is not None:
        return
    tell_fault(
        turn,
        Fault(
            kind=FaultKind.EXIT,
            generation=NO_GENERATION,
            rank=rank,
            node=turn.state.node,
            step=Step(0),
            reason=f"rank {rank} could not be started: {reason}",
            incarnation=incarnation,
        ),
    )


def beat(turn: NodeTurn) -> None:
    """Say that the node lives, how far its ranks are, and what they logged."""
    state = turn.state
    if not state.connected:
        return
    in_generation = (RankState.ACTIVE, RankState.RETURNED)
    steps = {r: local.step for r, local in state.ranks.items() if local.state in in_generation}
    unsent = state.logged[len(state.logged) - state.unsent :]
    turn.tell(Heartbeat(node=state.node, steps=steps, logged=unsent))
    turn.update(beat_at=turn.now, unsent=0)
