"""The job's handling of suspected hangs: ask everybody, judge, and only then call it a fault.

A rank beyond its limit is a suspicion of its node, repeated while it lasts. The verdict needs the
evidence of all ranks, for most of them only wait for the one that hangs.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.core import job_faults
from stepfast.core.faults import Evidence, Fault, HangVerdict, judge_hang
from stepfast.core.job_state import Phase, Probe
from stepfast.core.job_turn import Turn
from stepfast.core.messages import EvidenceGiven, HangSuspected, ProbeRanks
from stepfast.core.terms import NodeId
from stepfast.events import Dropped, Note

_PROBE_SLACK = (
    4.0  # a node answers for its silent ranks after one probe deadline; the job waits four
)


def suspected(turn: Turn, message: HangSuspected) -> None:
    """Ask all ranks where they are, unless a question is open."""
    state = turn.state
    if message.generation != state.generation:
        turn.record(Dropped(what="suspicion", generation=message.generation, node=NodeId(-1)))
        return
    if state.probe is not None or state.phase not in (Phase.RUNNING, Phase.STARTING):
        return
    nodes = state.membership.connected_nodes
    number = state.probes + 1
    deadline = turn.now + state.timeouts.probe_deadline_s * _PROBE_SLACK
    turn.update(
        probe=Probe(number=number, deadline=deadline, asked=frozenset(nodes)), probes=number
    )
    for node in nodes:
        turn.send(node, ProbeRanks(probe=number, generation=state.generation))


def evidence_given(turn: Turn, node: NodeId, message: EvidenceGiven) -> None:
    """Take a node's answers in; judge when all have answered."""
    probe = turn.state.probe
    if probe is None or message.probe != probe.number:
        return
    probe = replace(
        probe, answered=probe.answered | {node}, evidence=(*probe.evidence, *message.evidence)
    )
    turn.update(probe=probe)
    if probe.answered >= probe.asked:
        _judge(turn, probe)


def probe_overdue(turn: Turn) -> None:
    """Judge with what is there; a silent agent is another matter (heartbeats)."""
    probe = turn.state.probe
    if probe is not None and turn.now >= probe.deadline:
        _judge(turn, probe)


def _judge(turn: Turn, probe: Probe) -> None:
    state = turn.state
    turn.update(probe=None)
    if state.phase not in (Phase.RUNNING, Phase.STARTING):
        return
    verdict = judge_hang(probe.evidence)
    if not verdict.culprits:
        return
    by_rank = {e.rank: e for e in probe.evidence}
    if "report" in (state.settings.hang, state.settings.recovery):
        _report_only(turn, verdict, by_rank[verdict.culprits[0][0]])
        return
    for rank, kind in verdict.culprits:
        told = by_rank[rank]
        report = state.membership.ranks[rank]
        fault = Fault(
            kind=kind,
            generation=state.generation,
            rank=rank,
            node=told.node,
            step=told.step,
            reason=f"rank {rank}: {told.since_progress_s:.2f} s without progress: {verdict.reason}",
            incarnation=report.incarnation,
            detect_s=told.since_progress_s,
            log_tail=told.stack,
        )
        job_faults.fault_reported(turn, fault)


def _report_only(turn: Turn, verdict: HangVerdict, told: Evidence) -> None:
    """`hang = "report"`: one note for each step at which it was seen."""
    key = (turn.state.generation, told.step)
    if turn.state.hang_noted_at == key:
        return
    turn.update(hang_noted_at=key)
    turn.record(
        Note(topic="hang", text=f"{verdict.reason}\n{told.stack}", node=told.node, rank=told.rank)
    )
