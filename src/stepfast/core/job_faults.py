"""The job's handling of faults: collect, interrupt, decide, and know when everybody is out.

Owns: the incident's course up to the point where a generation may open. Works on a `Turn` of the
job's machine.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.core import job_durable
from stepfast.core.faults import (
    ErrorClass,
    Fault,
    FaultKind,
    is_collateral,
    is_of_process,
    needs_fresh_process,
)
from stepfast.core.incident import Incident
from stepfast.core.job_state import JobState, Phase
from stepfast.core.job_turn import Turn
from stepfast.core.membership import is_fresh, is_ready_to_start
from stepfast.core.messages import Interrupt, RankReport, RankState, Replacement
from stepfast.core.placement import node_of, ranks_of
from stepfast.core.policy import Action, Decision, decide
from stepfast.core.terms import NO_GENERATION, NodeId, Step
from stepfast.errors import EXIT_TRY_AGAIN, EXIT_USER_ERROR
from stepfast.events import AFTER_THE_END, DecisionMade, Dropped, FaultSeen, Note

_NODE_RETURN_LIMIT_S = (
    120.0  # a lost node's agent may be restarted for so long; then the job ends with "try again"
)


def fault_reported(turn: Turn, fault: Fault) -> None:
    """Take a fault in: record it, open or join the incident, and get everybody out."""
    state = turn.state
    if state.end is not None:
        turn.record(
            Note(
                topic=AFTER_THE_END,
                text=f"{fault.kind}: {fault.reason}",
                node=fault.node,
                rank=fault.rank,
            )
        )
        return
    if _is_known(state, fault):
        # Told again after a lost connection, or because it lasts: once is enough, the order is
        # repeated.
        if state.phase is Phase.RECOVERING:
            turn.send(fault.node, interrupt_message(turn, fault.node))
        return
    if _is_old(state, fault):
        turn.record(
            Dropped(what=f"fault {fault.kind}", generation=fault.generation, node=fault.node)
        )
        return
    turn.record(_seen_event(fault))
    _reject_checkpoint(turn, fault)
    if turn.state.end is not None:
        return
    if state.phase is Phase.FORMING and _ends_before_start(fault):
        _decide_and_act(turn, _with_fault(state, fault, turn.now))
        return
    _interrupt_all(turn, _with_fault(turn.state, fault, turn.now))
    _end_of_a_beginner(turn, fault)


def _reject_checkpoint(turn: Turn, fault: Fault) -> None:
    """What a rank could not read is read by nobody again."""
    start, error = turn.state.start, fault.error
    if start is None or start.checkpoint is None or fault.generation != start.generation:
        return
    if error is not None and error.error_class is ErrorClass.CHECKPOINT:
        job_durable.rejected(turn, start.checkpoint, error.message)


def _end_of_a_beginner(turn: Turn, fault: Fault) -> None:
    """A fresh process that ends before it stands at the barrier is decided at once, or it would be
    made for ever.
    """
    report = turn.state.membership.ranks.get(fault.rank) if fault.rank is not None else None
    incident = turn.state.incident
    if report is None or incident is None or not is_fresh(report) or not is_of_process(fault):
        return
    _decide_and_act(turn, incident)


def _ends_before_start(fault: Fault) -> bool:
    """An exception of the script itself. One of a generation, told to a coordinator that came back,
    is a fault of that generation, which everybody has to leave.
    """
    return fault.kind is FaultKind.EXCEPTION and fault.generation == NO_GENERATION


def _is_known(state: JobState, fault: Fault) -> bool:
    """Whether the incident has this very fault already."""
    incident = state.incident
    if incident is None:
        return False
    told = (fault.kind, fault.rank, fault.node, fault.generation, fault.incarnation)
    return any(
        told == (f.kind, f.rank, f.node, f.generation, f.incarnation) for f in incident.faults
    )


def _is_old(state: JobState, fault: Fault) -> bool:
    """The end of a process is judged by its incarnation, everything else by its generation."""
    if fault.rank is not None and is_of_process(fault):
        report = state.membership.ranks.get(fault.rank)
        return report is not None and fault.incarnation < report.incarnation
    return fault.generation < state.generation and fault.generation != NO_GENERATION


def _with_fault(state: JobState, fault: Fault, now: float) -> Incident:
    incident = state.incident
    if incident is None:
        ranks = state.membership.ranks
        incident = Incident(
            opened_at=now,
            reached_by_rank={
                r: max(report.step, state.steps.get(r, Step(0)))
                for r, report in ranks.items()
                if report.generation == state.generation
            },
            pids_before={r: report.pid for r, report in ranks.items()},
        )
    incident = incident.joined_by(fault, now)
    if fault.rank is None:
        return incident
    reached = max(incident.reached_by_rank.get(fault.rank, Step(0)), fault.step)
    if needs_fresh_process(fault):
        incident = incident.condemning({fault.rank: fault.incarnation})
    return replace(incident, reached_by_rank={**incident.reached_by_rank, fault.rank: reached})


def absent_from_generation(turn: Turn, node: NodeId, report: RankReport) -> None:
    """A process of the present generation that is no more, whose end nobody reported: a fault by
    its level.
    """
    state = turn.state
    opened = state.start.incarnations.get(report.rank) if state.start is not None else None
    if opened is None or report.incarnation < opened:
        return
    gone = report.state in (RankState.ABSENT, RankState.GONE)
    if report.incarnation == opened and not gone:
        return
    fault = Fault(
        kind=FaultKind.EXIT,
        generation=state.generation,
        rank=report.rank,
        node=node,
        step=max(report.step, state.steps.get(report.rank, Step(0))),
        reason=f"rank {report.rank} is no more in generation {state.generation}",
        incarnation=opened,
    )
    turn.record(_seen_event(fault))
    _interrupt_all(turn, _with_fault(state, fault, turn.now))


def _interrupt_all(turn: Turn, incident: Incident) -> None:
    """Everybody leaves the generation; who can not be told is lost with it."""
    turn.update(incident=incident, phase=Phase.RECOVERING, probe=None)
    for node in turn.state.membership.connected_nodes:
        turn.send(node, interrupt_message(turn, node))
    for node, view in sorted(turn.state.membership.nodes.items()):
        if not view.connected and not has_node_fault(turn.state, node):
            node_fault(turn, node, "its agent is not connected")


def node_fault(turn: Turn, node: NodeId, reason: str) -> None:
    """A node is away: its ranks are lost with it."""
    state = turn.state
    fault = Fault(
        kind=FaultKind.NODE,
        generation=state.generation,
        rank=None,
        node=node,
        step=state.steps_max,
        reason=f"node {node}: {reason}",
    )
    turn.record(_seen_event(fault))
    incident = _with_fault(state, fault, turn.now)
    known = state.membership.ranks
    lost = ranks_of(node, state.settings.nproc_per_node)
    condemned = {r: known[r].incarnation if r in known else 0 for r in lost}
    _interrupt_all(turn, incident.condemning(condemned))


def coordinator_fault(turn: Turn) -> None:
    """The generation ended, wholly or in part, while nobody was there to see it: everybody out."""
    state = turn.state
    fault = Fault(
        kind=FaultKind.COORDINATOR,
        generation=state.generation,
        rank=None,
        node=NodeId(0),
        step=state.steps_max,
        reason="the coordinator was away while the generation ended",
    )
    turn.record(_seen_event(fault))
    _interrupt_all(turn, _with_fault(state, fault, turn.now))


def nodes_overdue(turn: Turn) -> None:
    """A node that stays away becomes a fault, then the job's end."""
    state = turn.state
    if state.end is not None:
        return
    for node, view in sorted(state.membership.nodes.items()):
        if view.connected or view.lost_at is None:
            continue
        away_s = turn.now - view.lost_at
        if away_s > _NODE_RETURN_LIMIT_S:
            reason = f"node {node} did not come back within {_NODE_RETURN_LIMIT_S:g} s"
            turn.end("failed", EXIT_TRY_AGAIN, reason)
            return
        running = state.phase in (Phase.RUNNING, Phase.STARTING)
        if running and away_s > state.timeouts.node_silence_s:
            node_fault(turn, node, f"away for {away_s:.1f} s")


def has_node_fault(state: JobState, node: NodeId) -> bool:
    """Whether the incident has it already that this node is away."""
    incident = state.incident
    return incident is not None and any(
        f.kind is FaultKind.NODE and f.node == node and f.generation == state.generation
        for f in incident.faults
    )


def interrupt_message(turn: Turn, node: NodeId) -> Interrupt:
    """The order to leave, with this node's ranks that need fresh processes. A level: safe to
    repeat.
    """
    state = turn.state
    incident = state.incident
    assert incident is not None, "interrupted without an incident"
    local = set(ranks_of(node, state.settings.nproc_per_node))
    return Interrupt(
        generation=state.generation,
        reason=incident.faults[-1].reason,
        replace=tuple(
            Replacement(r, i) for r, i in sorted(incident.condemned.items()) if r in local
        ),
    )


def settled(turn: Turn) -> bool:
    """Whether the incident is decided and everybody stands at the barrier. Acts on a decision that
    needs more.
    """
    state = turn.state
    incident = state.incident
    assert incident is not None, "recovering without an incident"
    _note_times(turn)
    collecting = (
        incident.only_collateral and turn.now - incident.round_at < state.timeouts.collect_window_s
    )
    is_decided_early = state.settings.recovery != "on"  # nobody need be got back for an end
    if collecting or not (is_decided_early or _all_at_barrier(state)):
        return False
    assert turn.state.incident is not None, "still the same incident"
    return _decide_and_act(turn, turn.state.incident)


def _all_at_barrier(state: JobState) -> bool:
    """Whether every rank waits, and none of them is a process whose end was ordered or reported."""
    incident = state.incident
    assert incident is not None, "recovering without an incident"
    ranks = state.membership.ranks
    nodes_up = all(
        v.connected and v.heard >= state.generation for v in state.membership.nodes.values()
    )
    enough = len(ranks) == state.settings.world_size and len(state.membership.nodes) == state.nodes
    return (
        nodes_up
        and enough
        and all(
            is_ready_to_start(r, state.generation) and not incident.is_condemned(r)
            for r in ranks.values()
        )
    )


def _note_times(turn: Turn) -> None:
    """When the last survivor left and the last replacement came: the account of phases."""
    state = turn.state
    incident = state.incident
    assert incident is not None, "recovering without an incident"
    ranks = state.membership.ranks.values()
    survivors = [r for r in ranks if r.rank not in incident.replaced]
    if incident.quiet_at is None and all(is_ready_to_start(r, state.generation) for r in survivors):
        incident = replace(incident, quiet_at=turn.now)
    fresh = [r for r in ranks if r.rank in incident.replaced]
    is_ready = all(r.state is RankState.READY and not incident.is_condemned(r) for r in fresh)
    if fresh and incident.ready_at is None and is_ready:
        incident = replace(incident, ready_at=turn.now)
    turn.update(incident=incident)


def _decide_and_act(turn: Turn, incident: Incident) -> bool:
    """Decide once for each new fault; True if the generation may open now."""
    if incident.decided_faults == len(incident.faults):
        return True
    if len(incident.reached_by_rank) == turn.state.settings.world_size:
        turn.completed(incident.reached)  # before this fault is counted as one more of the same
    state = turn.state
    chief = incident.undecided_chief
    budget = state.budget.refilled(turn.now).spent()
    repeat = state.repeat.after(chief)
    stepped = state.steps_max > 0 or max(incident.reached_by_rank.values(), default=Step(0)) > 0
    decision = decide(
        chief,
        repeat=repeat,
        budget=budget,
        recovery_on=state.settings.recovery == "on",
        job_has_stepped=stepped,
    )
    turn.record(
        DecisionMade(
            generation=state.generation, action=decision.action.value, reason=decision.reason
        )
    )
    turn.update(budget=budget, repeat=repeat, incident=incident.decided())
    _count_hang(turn, chief)
    if decision.ends_job:
        code = EXIT_USER_ERROR if decision.action is Action.END_USER_ERROR else EXIT_TRY_AGAIN
        turn.end("failed", code, decision.reason, fault=chief)
        return False
    return _climb(turn, chief, decision)


def _climb(turn: Turn, chief: Fault, decision: Decision) -> bool:
    """Where the ladder says "fresh process" and the old one still stands, order it; the barrier
    closes again.
    """
    state = turn.state
    incident = state.incident
    assert incident is not None, "still the same incident"
    if decision.action is not Action.REPLACE_PROCESS or chief.rank is None:
        return True
    report = state.membership.ranks[chief.rank]
    if is_fresh(report) or incident.is_condemned(report):
        return True
    turn.update(incident=incident.condemning({chief.rank: report.incarnation}))
    node = node_of(chief.rank, state.settings.nproc_per_node)
    turn.send(node, interrupt_message(turn, node))
    return False


def _count_hang(turn: Turn, chief: Fault) -> None:
    if chief.kind is not FaultKind.HANG:
        return
    same = turn.state.hang_step == chief.step
    turn.update(hang_step=chief.step, hang_count=turn.state.hang_count + 1 if same else 1)


def _seen_event(fault: Fault) -> FaultSeen:
    error = fault.error
    return FaultSeen(
        kind=fault.kind.value,
        rank=fault.rank,
        node=fault.node,
        generation=fault.generation,
        step=fault.step,
        reason=fault.reason,
        collateral=is_collateral(fault),
        detect_s=fault.detect_s,
        error_type=error.type if error else None,
        traceback=error.traceback if error else None,
        log_tail=fault.log_tail or None,
    )
