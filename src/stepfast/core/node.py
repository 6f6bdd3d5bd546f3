"""The node's machine: its ranks' processes, their limits, their reports. `step(state, input, now)`.

Owns: what the agent knows of its ranks; the reflexes that protect data (who does not leave is
reported, then replaced on order). Does not own: decisions about the job, and any effect.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from stepfast.core import node_drain, node_durable, node_ranks, node_watch, node_writes
from stepfast.core.faults import (
    Fault,
    FaultKind,
)
from stepfast.core.messages import (
    AFTER_FINISH_LIMIT_S,
    PROTOCOL_VERSION,
    Bye,
    CancelCheckpoint,
    CheckpointAt,
    CheckpointsHeld,
    CommitCheckpoint,
    FaultReported,
    FinishJob,
    FromCoordinator,
    Hello,
    Interrupt,
    LeaveNow,
    PersistSlots,
    ProbeRanks,
    RankFinish,
    RankLeave,
    RankStart,
    RankState,
    StartGeneration,
    Welcome,
)
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    CoordinatorConnected,
    CoordinatorLost,
    ForkFailed,
    FromJob,
    FromLocalRank,
    LocalRank,
    NodeInput,
    NodeNoted,
    NodeState,
    NodeStopRequested,
    NodeTick,
    RankEnded,
    RankForked,
    SlotNotWritten,
    SlotWritten,
    StoreLost,
    StoreReady,
    StoreUnusable,
)
from stepfast.core.node_turn import NodeTurn
from stepfast.core.outputs import EndProcess, KillRank, OpenStore, Output
from stepfast.core.terms import Rank, Step
from stepfast.core.timeouts import SETUP, LearnedLimits, timeouts_of
from stepfast.errors import EXIT_TRY_AGAIN

COORDINATOR_RETURN_LIMIT_S = 120.0  # ranks train on without a coordinator for so long
_STOPPED_RATIO = 0.25  # of the interrupt deadline: so long a stop may last where a rank is to leave


def step(state: NodeState, given: NodeInput, now: float) -> tuple[NodeState, tuple[Output, ...]]:
    """One step of the node. Pure; `now` is monotonic seconds of this machine."""
    turn = NodeTurn(state, now)
    match given:
        case CoordinatorConnected():
            turn.update(connected=True, lost_at=None, told=None, unsent=len(state.logged))
            turn.tell(
                Hello(protocol=PROTOCOL_VERSION, node=state.node, host=state.host, pid=state.pid)
            )
            _tell_again(turn)
        case CoordinatorLost():
            turn.update(connected=False, lost_at=now if state.lost_at is None else state.lost_at)
        case FromJob(message, stopped):
            _from_job(turn, message, stopped)
        case FromLocalRank():
            node_ranks.from_rank(turn, given)
        case RankForked(rank, incarnation, pid):
            if state.ranks[rank].incarnation == incarnation:
                turn.set_rank(
                    rank, pid=pid, state=RankState.STARTING, forking=False, phase_since=now
                )
            if turn.state.finish is not None:
                turn.emit(KillRank(rank, incarnation, "the job is over"))
            elif turn.state.ranks[rank].doomed:
                turn.emit(KillRank(rank, incarnation, "replaced while it was being forked"))
        case ForkFailed(rank, incarnation, reason):
            node_ranks.fork_failed(turn, rank, incarnation, reason)
        case RankEnded():
            node_ranks.rank_ended(turn, given)
        case StoreReady(port):
            turn.update(store_port=port, store_wanted=False)
        case StoreLost(reason):
            turn.update(store_port=None, store_wanted=False)
            turn.note("store lost", reason)
            _want_store(turn)
        case (
            CheckpointsListed() | StoreUnusable() | SlotWritten() | SlotNotWritten() | CommitEnded()
        ):
            _from_store(turn, given)
        case NodeNoted(topic, text):
            turn.note(topic, text)
        case NodeStopRequested(reason, drains):
            turn.note("stop", reason)
            if not (drains and node_drain.try_begin(turn, reason)):
                _finish(turn, _leave(turn, reason))
        case NodeTick(stopped, writes):
            node_writes.heard_of(turn, writes)
            _tick(turn, stopped)
    turn.tell_report_if_changed()
    _end_if_done(turn)
    return turn.state, tuple(turn.outputs)


def with_places(state: NodeState, slot_root: str, log_root: str) -> NodeState:
    """The state once it is known where slots and logs lie."""
    return replace(state, slot_root=slot_root, log_root=log_root)


# --- from the checkpoint store --------------------------------------------------------------------


def _from_store(
    turn: NodeTurn,
    given: CheckpointsListed | StoreUnusable | SlotWritten | SlotNotWritten | CommitEnded,
) -> None:
    match given:
        case CheckpointsListed():
            node_durable.listed(turn, given)
        case StoreUnusable():
            node_durable.store_unusable(turn, given)
        case SlotWritten():
            node_writes.slot_written(turn, given)
        case SlotNotWritten():
            node_writes.slot_not_written(turn, given)
        case CommitEnded():
            node_durable.commit_ended(turn, given)


# --- from the coordinator ------------------------------------------------------------------------


def _from_job(turn: NodeTurn, message: FromCoordinator, stopped: frozenset[Rank]) -> None:
    about_end = FinishJob | PersistSlots | CommitCheckpoint
    if turn.state.finish is not None and not isinstance(message, about_end):
        return  # this node ends; what else the job wants of it is void
    match message:
        case Welcome():
            _welcome(turn, message)
        case Interrupt():
            _interrupt(turn, message)
        case StartGeneration():
            _start(turn, message)
        case ProbeRanks(probe=probe, generation=generation):
            node_watch.ask_ranks(turn, probe, generation, stopped)
        case CheckpointAt():
            node_durable.checkpoint_at(turn, message)
        case CommitCheckpoint():
            node_durable.commit(turn, message)
        case CancelCheckpoint():
            node_writes.cancel(turn, message)
        case CheckpointsHeld():
            node_durable.held(turn, message)
        case PersistSlots():
            node_writes.persist(turn, message)
        case LeaveNow():
            _finish(turn, _leave(turn, turn.state.drains_for or "let go"))
        case FinishJob():
            turn.update(is_job_over=True)
            _finish(turn, message)


def _welcome(turn: NodeTurn, welcome: Welcome) -> None:
    """Learn the job's settings and start what is missing; a second welcome changes nothing that
    runs.
    """
    settings = welcome.settings
    timeouts = timeouts_of(settings)
    limits = turn.state.limits or LearnedLimits(timeouts)
    turn.update(settings=settings, timeouts=timeouts, limits=limits, told=None)
    node_durable.look_into_store(turn)
    _tell_again(turn)
    for rank, incarnation in sorted(welcome.ranks.items()):
        if rank not in turn.state.ranks:
            absent = LocalRank(rank=rank, incarnation=incarnation)
            turn.update(ranks={**turn.state.ranks, rank: absent})
            node_ranks.fork(turn, rank)
    if turn.state.store_port is None:
        _want_store(turn)


def _tell_again(turn: NodeTurn) -> None:
    """What stands and might not have been heard, before the report of the levels that follow from
    it.
    """
    for _, local in sorted(turn.state.ranks.items()):
        for milestone in local.milestones:
            turn.tell(milestone)
        for fault in local.faults:
            turn.tell(FaultReported(fault=fault))
    node_durable.tell_again(turn)
    node_drain.tell_again(turn)


def _interrupt(turn: NodeTurn, order: Interrupt) -> None:
    turn.update(heard=max(turn.state.heard, order.generation))
    replaced = {r.rank: r.incarnation for r in order.replace}
    for rank, local in sorted(turn.state.ranks.items()):
        if rank in replaced and local.incarnation <= replaced[rank]:
            _replace_process(turn, local, order.reason)
        elif local.state in (RankState.ACTIVE, RankState.RETURNED):
            if local.generation <= order.generation and local.leave_deadline is None:
                deadline = turn.now + turn.timeouts.interrupt_deadline_s
                turn.set_rank(rank, leave_deadline=deadline)
                turn.tell_rank(rank, RankLeave(generation=order.generation))
        elif local.state is RankState.QUIET and local.generation < order.generation:
            turn.set_rank(
                rank, generation=order.generation
            )  # never got there: out of it all the same


def _replace_process(turn: NodeTurn, local: LocalRank, reason: str) -> None:
    if local.doomed:
        return
    if local.forking:
        turn.set_rank(local.rank, doomed=True)  # ended as soon as it stands
        return
    if local.pid == 0 or local.state is RankState.ABSENT:
        node_ranks.fork(turn, local.rank)
        return
    turn.set_rank(local.rank, doomed=True)
    turn.emit(KillRank(local.rank, local.incarnation, reason))


def _start(turn: NodeTurn, order: StartGeneration) -> None:
    settings = turn.state.settings
    assert settings is not None, "started before the welcome"
    turn.update(heard=max(turn.state.heard, order.generation))
    if order.limit_step is not None:
        turn.update(limit_step=order.limit_step, limit_factor=order.limit_factor)
    for index, (rank, local) in enumerate(sorted(turn.state.ranks.items())):
        if not _is_meant(local, order):
            continue  # told twice; or its end has been reported, and will interrupt this generation
        turn.set_rank(
            rank,
            state=RankState.ACTIVE,
            generation=order.generation,
            step=order.step or Step(0),
            phase=SETUP,
            turn_phase=SETUP,
            phase_since=turn.now,
            suspect_at=0.0,
            leave_deadline=None,
            longest_part_s=0.0,
            milestones=(),
            faults=(),
        )
        turn.tell_rank(rank, _rank_start(turn.state, order, rank, index))
    if order.store_host == turn.state.host and order.store_port == turn.state.store_port:
        turn.update(store_port=None)
        _want_store(turn)


def _is_meant(local: LocalRank, order: StartGeneration) -> bool:
    """Whether the order is for this very process, which waits for it."""
    return (
        local.state in (RankState.READY, RankState.QUIET)
        and local.incarnation == order.incarnations.get(local.rank)
        and local.generation < order.generation
        and not local.doomed
    )


def _rank_start(state: NodeState, order: StartGeneration, rank: Rank, index: int) -> RankStart:
    settings = state.settings
    assert settings is not None, "started before the welcome"
    return RankStart(
        generation=order.generation,
        rank=rank,
        local_rank=index,
        world_size=settings.world_size,
        local_world_size=settings.nproc_per_node,
        node=state.node,
        step=order.step,
        source=order.sources.get(rank),
        store_host=order.store_host,
        store_port=order.store_port,
        keep=order.keep,
        slot_directory=f"{state.slot_root}/rank-{rank}",
        log_path=f"{state.log_root}/rank-{rank}-gen-{order.generation}.log",
        settings=settings,
        checkpoint=order.checkpoint,
        pinned=state.ranks[rank].in_flight,
    )


def _want_store(turn: NodeTurn) -> None:
    if not turn.state.store_wanted and turn.state.finish is None:
        turn.update(store_wanted=True)
        turn.emit(OpenStore())


def _leave(turn: NodeTurn, reason: str) -> FinishJob:
    """A node that leaves by itself keeps its slots, unless the job said they are not needed."""
    told = turn.state.finish
    keeps = told is None or told.drain or told.keep_memory
    return FinishJob(finished=False, exit_code=EXIT_TRY_AGAIN, reason=reason, keep_memory=keeps)


def _finish(turn: NodeTurn, order: FinishJob) -> None:
    """The job is over here. A later order may only be harder (`finished` turned to "end now")."""
    before = turn.state.finish
    if before is not None and before.drain and not order.drain:
        turn.update(finish=order)  # the ranks have been told; nothing is waited for any more
        return
    if before is not None and (order.finished or not before.finished):
        if not order.drain:  # else what it waits for will not be: this node has left already
            turn.update(finish=msgspec.structs.replace(before, keep_memory=order.keep_memory))
        return
    after_s = AFTER_FINISH_LIMIT_S
    if not order.finished:
        after_s = turn.timeouts.stop_grace_s if turn.state.timeouts else 0.0
    turn.update(finish=order, finish_deadline=turn.now + after_s)
    for rank, local in sorted(turn.state.ranks.items()):
        if local.forking:
            # not waited for: a zygote may need long to get ready
            turn.set_rank(rank, forking=False)
        if local.pid and local.state not in (RankState.ABSENT, RankState.GONE):
            turn.tell_rank(rank, RankFinish(finished=order.finished))


# --- time ----------------------------------------------------------------------------------------


def _tick(turn: NodeTurn, stopped: frozenset[Rank]) -> None:
    state = turn.state
    if state.lost_at is not None and turn.now - state.lost_at > COORDINATOR_RETURN_LIMIT_S:
        reason = f"no coordinator for {COORDINATOR_RETURN_LIMIT_S:g} s"
        _finish(turn, _leave(turn, reason))
    elif (why := node_drain.why_not_wait(state, turn.now)) is not None:
        _finish(turn, _leave(turn, why))
    if state.settings is None:
        return
    if state.unsent or turn.now - state.beat_at >= turn.timeouts.heartbeat_interval_s:
        node_ranks.beat(turn)
    if state.finish is None:
        node_watch.seen_stopped(turn, stopped)
        node_watch.suspect(turn)
        node_watch.probe_overdue(turn)
        _leave_overdue(turn, stopped)
        _start_overdue(turn)
    elif state.finish_deadline is not None and turn.now > state.finish_deadline:
        _kill_all(turn)
    node_durable.listing_overdue(turn)
    node_writes.overdue(turn)


def _leave_overdue(turn: NodeTurn, stopped: frozenset[Rank]) -> None:
    """Who was told to leave and is still there. A stopped process is not waited for to the end: it
    cannot leave, and it is a cause of its own.
    """
    limit_s = turn.timeouts.interrupt_deadline_s
    for rank, local in sorted(turn.state.ranks.items()):
        if local.leave_deadline is None or local.doomed:
            continue
        is_stopped = rank in stopped
        early_s = limit_s * (1 - _STOPPED_RATIO) if is_stopped else 0.0
        if turn.now < local.leave_deadline - early_s:
            continue
        turn.set_rank(rank, leave_deadline=turn.now + limit_s + early_s)
        waited_s = limit_s - early_s
        reason = f"rank {rank} did not leave generation {local.generation} within {waited_s:g} s"
        if is_stopped:
            reason += ": its process is stopped"
        kind = FaultKind.STOP if is_stopped else FaultKind.UNREACHABLE
        node_ranks.tell_fault(turn, _lingering(turn, local, kind, reason, waited_s))


def _start_overdue(turn: NodeTurn) -> None:
    """A fresh process that never reaches the resilient function: code outside any loop has the
    ceiling.
    """
    limit_s = turn.timeouts.hang_ceiling_s
    for rank, local in sorted(turn.state.ranks.items()):
        is_late = turn.now - local.phase_since > limit_s
        if local.state is not RankState.STARTING or local.doomed or not is_late:
            continue
        turn.set_rank(rank, phase_since=turn.now)
        reason = f"rank {rank} did not reach the resilient function within {limit_s:g} s"
        kind = FaultKind.UNREACHABLE
        node_ranks.tell_fault(turn, _lingering(turn, local, kind, reason, limit_s))


def _lingering(
    turn: NodeTurn, local: LocalRank, kind: FaultKind, reason: str, waited_s: float
) -> Fault:
    return Fault(
        kind=kind,
        generation=local.generation,
        rank=local.rank,
        node=turn.state.node,
        step=local.step,
        reason=reason,
        incarnation=local.incarnation,
        detect_s=waited_s,
    )


def _kill_all(turn: NodeTurn) -> None:
    turn.update(finish_deadline=None)
    for rank, local in sorted(turn.state.ranks.items()):
        if local.pid and not local.doomed:
            turn.set_rank(rank, doomed=True)
            turn.emit(KillRank(rank, local.incarnation, "the job is over"))


def _end_if_done(turn: NodeTurn) -> None:
    state = turn.state
    if state.finish is None or state.ended:
        return
    if state.finish.drain and state.settings is not None:
        return  # what the slots hold is still wanted
    if any(local.pid or local.forking for local in state.ranks.values()):
        return
    node_ranks.beat(turn)
    turn.update(ended=True)
    if state.connected:
        turn.tell(Bye(node=state.node, failed=state.failed_after))
    turn.emit(EndProcess(state.finish.exit_code, state.finish.reason))
