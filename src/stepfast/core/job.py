"""The job's machine: membership, generations, decisions. `step(state, input, now) -> (state,
outputs)`.

    FORMING -> STARTING -> RUNNING -> (fault) -> RECOVERING -> STARTING -> ... -> ENDING -> ENDED

Owns: the only place where the job's state changes. Does not own: clocks, sockets, files.
Invariants: generations only grow; a generation's opening is persisted before it is told; a
generation opens only when every rank is out of the older one; messages of an older generation
change nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.core import job_check, job_drain, job_durable, job_faults, job_hangs, job_opening
from stepfast.core.incident import recovered_event
from stepfast.core.job_state import (
    Drain,
    FromNode,
    JobInput,
    JobState,
    NodeConnectionLost,
    Phase,
    StopRequested,
    Tick,
)
from stepfast.core.job_turn import Turn
from stepfast.core.membership import is_fresh
from stepfast.core.messages import (
    PROTOCOL_VERSION,
    Bye,
    CheckpointFailed,
    CheckpointMissed,
    CommitDone,
    EvidenceGiven,
    FaultReported,
    FirstStepDone,
    HangSuspected,
    Heartbeat,
    Hello,
    NodeDraining,
    NodeReport,
    Noted,
    RankChecked,
    RankResumed,
    RankReturned,
    RankState,
    ShardWritten,
    StoreRefused,
    Welcome,
)
from stepfast.core.node_health import HealthReported
from stepfast.core.outputs import EndProcess, Output
from stepfast.core.placement import ranks_of
from stepfast.core.quantities import numbered
from stepfast.core.terms import NodeId, Step
from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import (
    Dropped,
    GenerationRunning,
    NodeJoined,
    NodeLeft,
    Note,
    Recovered,
    StepLogged,
)


def step(state: JobState, given: JobInput, now: float) -> tuple[JobState, tuple[Output, ...]]:
    """One step of the job. Pure; `now` is monotonic seconds of the coordinator."""
    turn = Turn(state, now)
    match given:
        case FromNode(node, message):
            _from_node(turn, node, message)
        case NodeConnectionLost(node, reason):
            _node_lost(turn, node, reason)
        case StopRequested(reason, exit_code):
            turn.end("stopped", exit_code, reason)
        case Tick():
            _tick(turn)
    _advance(turn)
    return turn.state, tuple(turn.outputs)


# --- inputs --------------------------------------------------------------------------------


def _from_node(turn: Turn, node: NodeId, message: object) -> None:
    if isinstance(message, Hello):
        _hello(turn, message)
        return
    if isinstance(message, HealthReported):
        turn.record(message.checked)
        return
    view = turn.state.membership.nodes.get(node)
    if view is None:
        return
    if view.connected:
        turn.update(membership=turn.state.membership.seen(node, turn.now))
    else:
        _admit(turn, node, host=view.host, pid=view.pid)  # it was silent, and is not any more
    match message:
        case NodeReport():
            _node_report(turn, message)
        case FaultReported(fault=fault):
            job_faults.fault_reported(turn, fault)
        case HangSuspected():
            job_hangs.suspected(turn, message)
        case EvidenceGiven():
            job_hangs.evidence_given(turn, node, message)
        case RankResumed() | FirstStepDone() | RankReturned():
            _rank_progress(turn, node, message)
        case RankChecked():
            job_check.rank_checked(turn, node, message)
        case Heartbeat():
            _heartbeat(turn, message)
        case ShardWritten() | CheckpointFailed() | CheckpointMissed() | CommitDone():
            _checkpoint(turn, node, message)
        case StoreRefused():
            job_durable.refused(turn, message)
        case NodeDraining():
            job_drain.asked(turn, message)
        case Noted():
            turn.record(
                Note(topic=message.topic, text=message.text, node=message.node, rank=message.rank)
            )
        case Bye():
            turn.update(membership=turn.state.membership.said_goodbye(node))
            if message.failed:
                turn.failed_after_the_end(message.failed)
            if turn.state.end is None:
                job_drain.left(turn, node)


def _checkpoint(
    turn: Turn,
    node: NodeId,
    message: ShardWritten | CheckpointFailed | CheckpointMissed | CommitDone,
) -> None:
    match message:
        case ShardWritten():
            job_durable.shard_written(turn, message)
        case CheckpointFailed():
            job_durable.failed(turn, message)
        case CheckpointMissed():
            job_durable.missed(turn, message)
        case CommitDone():
            job_durable.committed(turn, node, message)


def _hello(turn: Turn, hello: Hello) -> None:
    """Admit a node: the expected numbers only, one agent each. The shell refuses other protocols
    and doubles.
    """
    assert hello.protocol == PROTOCOL_VERSION, "the transport admits one protocol"
    job_drain.forget(turn, hello.node)  # it says so again, where it still has to leave
    before = turn.state.membership.nodes.get(hello.node)
    _admit(turn, hello.node, host=hello.host, pid=hello.pid)
    in_generation = turn.state.phase in (Phase.STARTING, Phase.RUNNING)
    if before is not None and before.pid != hello.pid and in_generation:
        job_faults.node_fault(turn, hello.node, f"a fresh agent (pid {hello.pid}) took its place")


def _admit(turn: Turn, node: NodeId, *, host: str, pid: int) -> None:
    """Take the node in and tell it where the job stands: whatever it was told before may be
    lost.
    """
    local = ranks_of(node, turn.state.settings.nproc_per_node)
    membership = turn.state.membership.joined(node, host=host, pid=pid, now=turn.now, ranks=local)
    turn.update(membership=membership)
    turn.record(NodeJoined(node=node, host=host, pid=pid))
    state = turn.state
    if state.end is not None:
        turn.send(node, turn.finish_message())
        return
    job_durable.node_is_back(turn, node)
    known = state.membership.ranks
    ranks = {r: known[r].incarnation if r in known else 0 for r in local}
    turn.send(node, Welcome(settings=state.settings, ranks=ranks))
    if state.phase is Phase.RECOVERING:
        turn.send(node, job_faults.interrupt_message(turn, node))
    elif state.phase in (Phase.STARTING, Phase.RUNNING) and state.start is not None:
        turn.send(node, state.start)


def _node_report(turn: Turn, report: NodeReport) -> None:
    turn.update(membership=turn.state.membership.reported(report))
    if report.checkpoints or report.store_below:
        durable = turn.state.durable.told_of(report.checkpoints or (), report.store_below)
        turn.update(durable=durable)
    incident = turn.state.incident
    if incident is not None and turn.state.phase is Phase.RECOVERING:
        for rank_report in report.ranks:
            incident = incident.told_by(rank_report)
        turn.update(incident=incident)
    for rank_report in report.ranks:
        if turn.state.phase in (Phase.STARTING, Phase.RUNNING):
            job_faults.absent_from_generation(turn, report.node, rank_report)


def _node_lost(turn: Turn, node: NodeId, reason: str) -> None:
    state = turn.state
    view = state.membership.nodes.get(node)
    if view is None or not view.connected:
        return
    turn.update(membership=state.membership.lost(node, turn.now))
    if view.gone and state.end is not None:
        return  # it left in order
    turn.record(NodeLeft(node=node, reason=reason))
    is_known = job_faults.has_node_fault(state, node)
    if state.phase is Phase.RECOVERING and not (view.gone and is_known):
        job_faults.node_fault(turn, node, reason)


def _rank_progress(
    turn: Turn, node: NodeId, message: RankResumed | FirstStepDone | RankReturned
) -> None:
    state = turn.state
    # While forming: a coordinator that came back hears of a generation that it may adopt.
    heeded = (Phase.FORMING, Phase.STARTING, Phase.RUNNING)
    if message.generation != state.generation or state.phase not in heeded:
        turn.record(Dropped(what=type(message).__name__, generation=message.generation, node=node))
        return
    if isinstance(message, RankReturned):
        job_durable.rank_returned(turn, message.step)
        turn.update(returned={**state.returned, message.rank: message})
    elif isinstance(message, RankResumed):
        turn.update(resumed={**state.resumed, message.rank: message.step})
    incident = state.incident
    if incident is None:
        return
    rank = message.rank
    match message:
        case RankResumed():
            incident = replace(incident, resumed={**incident.resumed, rank: message})
        case FirstStepDone():
            incident = replace(incident, stepped={**incident.stepped, rank: message})
        case RankReturned() if rank not in incident.stepped:
            done = FirstStepDone(
                generation=message.generation, rank=rank, step=message.step, seconds=0.0
            )
            incident = replace(incident, stepped={**incident.stepped, rank: done})
    turn.update(incident=incident)


def _heartbeat(turn: Turn, beat: Heartbeat) -> None:
    state = turn.state
    steps = {**state.steps, **beat.steps}
    turn.update(steps=steps)
    if len(steps) == state.settings.world_size:
        turn.completed(min(steps.values()))
    for logged in beat.logged:
        if logged.step > turn.state.logged_max:
            turn.update(logged_max=logged.step)
            turn.record(StepLogged(step=logged.step, values=logged.values))


def _tick(turn: Turn) -> None:
    state = turn.state
    for node, view in sorted(state.membership.nodes.items()):
        if (
            view.connected
            and not view.gone
            and turn.now - view.seen_at > state.timeouts.node_silence_s
        ):
            _node_lost(turn, node, f"silent for {turn.now - view.seen_at:.1f} s")
    job_hangs.probe_overdue(turn)
    job_faults.nodes_overdue(turn)
    job_durable.tick(turn)


# --- levels: what can happen now -----------------------------------------------------------------


def _advance(turn: Turn) -> None:
    match turn.state.phase:
        case Phase.FORMING:
            _advance_forming(turn)
        case Phase.STARTING:
            _advance_starting(turn)
        case Phase.RUNNING:
            pass
        case Phase.RECOVERING:
            if job_faults.settled(turn):
                job_opening.open_generation(turn)
            else:
                _end_if_nodes_stay_out(turn)
        case Phase.ENDING:
            _advance_ending(turn)
        case Phase.ENDED:
            return
    job_check.advance(turn)
    job_drain.advance(turn)
    _advance_returned(turn)
    _advance_incident(turn)


def _advance_forming(turn: Turn) -> None:
    state = turn.state
    if job_opening.all_ranks_ready(state):
        job_opening.open_generation(turn)
    elif _has_run_before(state):
        _adopt(turn)
    else:
        _end_if_nodes_stay_out(turn)


def _end_if_nodes_stay_out(turn: Turn) -> None:
    state = turn.state
    missing = [n for n in range(state.nodes) if n not in state.membership.nodes]
    if missing and turn.now - state.opened_at > state.join_limit_s:
        reason = f"{numbered('node', missing)} did not join within {state.join_limit_s:g} s"
        turn.end("failed", EXIT_TRY_AGAIN, reason)


def _has_run_before(state: JobState) -> bool:
    """Whether this coordinator came back to a job whose ranks have been in a generation."""
    ranks = state.membership.ranks
    return len(ranks) == state.settings.world_size and any(not is_fresh(r) for r in ranks.values())


def _adopt(turn: Turn) -> None:
    """Ranks that all train in the last generation go on untouched; otherwise they get a new one."""
    state = turn.state
    ranks = state.membership.ranks
    generation = max(state.generation, *(r.generation for r in ranks.values()))
    turn.update(generation=generation)
    if all(r.state is RankState.ACTIVE and r.generation == generation for r in ranks.values()):
        turn.record(Note(topic="coordinator back", text=f"generation {generation} goes on"))
        steps = {rank: r.step for rank, r in ranks.items()}
        turn.update(phase=Phase.RUNNING, steps=steps)
    else:
        job_faults.coordinator_fault(turn)


def _advance_starting(turn: Turn) -> None:
    """Running once no rank is left that has not resumed."""
    state = turn.state
    if len({*state.resumed, *state.returned}) == state.settings.world_size:
        at = min(state.resumed.values(), default=Step(0))
        turn.record(GenerationRunning(generation=state.generation, step=at))
        turn.update(phase=Phase.RUNNING, running_since=turn.now)


def _advance_returned(turn: Turn) -> None:
    state = turn.state
    if (
        state.phase not in (Phase.STARTING, Phase.RUNNING)
        or len(state.returned) < state.settings.world_size
    ):
        return
    if state.incident is not None and len(state.incident.stepped) == state.settings.world_size:
        _advance_incident(turn)
    if job_durable.last_step_is_settled(turn):
        turn.end_finished()


def _advance_incident(turn: Turn) -> None:
    """Close the incident when every rank has completed a step again."""
    state = turn.state
    incident = state.incident
    if incident is None or state.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if len(incident.stepped) < state.settings.world_size:
        return
    event: Recovered = recovered_event(incident, ranks=state.membership.ranks, now=turn.now)
    turn.record(event)
    for breach in state.objectives.breached_by(event):
        turn.record(breach)
    turn.update(incident=None)


def _advance_ending(turn: Turn) -> None:
    state = turn.state
    assert state.end is not None, "ending without an end"
    if state.end.drain is not Drain.NONE:
        job_durable.advance_drain(turn)
        return
    views = state.membership.nodes.values()
    if state.came_back and not views and turn.now - state.opened_at < state.rejoin_limit_s:
        return  # this coordinator came back; who still runs has not found it yet
    silence_s = state.timeouts.node_silence_s
    is_out = all(  # a node that lost its connection just now comes back, and must be told
        v.gone or (v.lost_at is not None and turn.now - v.lost_at > silence_s) for v in views
    )
    if is_out or turn.now > state.end.deadline:
        turn.update(phase=Phase.ENDED)
        turn.emit(EndProcess(state.end.exit_code, state.end.reason))
