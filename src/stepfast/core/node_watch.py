"""The node's watch over progress: phases, learned limits, suspicions, and the answers to "where are
you?".

On a CPU a turn of the loop is progress. A suspicion is a level: repeated while it lasts, gone with
the next progress.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.core.faults import SUSPICION_RATIO, Evidence, Whereabouts
from stepfast.core.messages import (
    EvidenceGiven,
    HangSuspected,
    PhaseBegan,
    PhaseEnded,
    ProbeAnswer,
    RankProbe,
    RankState,
)
from stepfast.core.node_state import LocalProbe, LocalRank
from stepfast.core.node_turn import NodeTurn
from stepfast.core.terms import Generation, Rank
from stepfast.core.timeouts import TURN

_SUSPICION_INTERVAL_S = 0.25  # how often a standing suspicion is told again


def phase_began(turn: NodeTurn, rank: Rank, message: PhaseBegan) -> None:
    """Progress. A section interrupts the turn; a turn ends whatever was before."""
    local = turn.state.ranks[rank]
    if local.state is not RankState.ACTIVE or message.generation != local.generation:
        return
    is_section = message.phase.startswith("section:")
    part_s = turn.now - local.phase_since if local.phase == local.turn_phase else 0.0
    part_s = max(local.longest_part_s, part_s)
    if message.turn_s is not None:
        turn.update(limits=turn.limits.learn(local.turn_phase, message.turn_s))
    elif local.turn_phase != TURN and not is_section:
        turn.update(limits=turn.limits.learn(local.turn_phase, part_s))
    turn.set_rank(
        rank,
        step=message.step,
        phase=message.phase,
        turn_phase=local.turn_phase if is_section else message.phase,
        longest_part_s=part_s if is_section else 0.0,
        phase_since=turn.now,
        suspect_at=0.0,
    )


def phase_ended(turn: NodeTurn, rank: Rank, message: PhaseEnded) -> None:
    """A section ended; the turn's clock begins anew."""
    local = turn.state.ranks[rank]
    if local.state is not RankState.ACTIVE or message.generation != local.generation:
        return
    turn.update(limits=turn.limits.learn(message.phase, message.seconds))
    turn.set_rank(rank, phase=local.turn_phase, phase_since=turn.now, suspect_at=0.0)


def seen_stopped(turn: NodeTurn, stopped: frozenset[Rank]) -> None:
    """Whose process the kernel shows as stopped now. A profiler stops one for a moment only, and is
    seen to let it go on."""
    for rank, local in turn.state.ranks.items():
        if rank not in stopped and local.stopped_since is not None:
            turn.set_rank(rank, stopped_since=None)
        elif rank in stopped and local.stopped_since is None:
            turn.set_rank(rank, stopped_since=turn.now)


def limit_s(turn: NodeTurn, local: LocalRank) -> float:
    """How long the rank's present phase may take. A process that does not run needs no patience for
    what it does."""
    stopped_s = 0.0 if local.stopped_since is None else turn.now - local.stopped_since
    if stopped_s >= turn.timeouts.hang_floor_s * SUSPICION_RATIO:
        return turn.timeouts.hang_floor_s
    factor = turn.state.limit_factor if local.step == turn.state.limit_step else 1.0
    return min(turn.timeouts.hang_ceiling_s, turn.limits.limit_s(local.phase) * factor)


def suspect(turn: NodeTurn) -> None:
    """Tell which ranks are beyond their limit; one suspicion is enough to have everybody asked."""
    for rank, local in sorted(turn.state.ranks.items()):
        if not local.is_watched or turn.now < local.suspect_at:
            continue
        since_s = turn.now - local.phase_since
        limit = limit_s(turn, local)
        if since_s < limit * SUSPICION_RATIO:
            continue
        turn.set_rank(rank, suspect_at=turn.now + _SUSPICION_INTERVAL_S)
        turn.tell(
            HangSuspected(
                generation=local.generation,
                rank=rank,
                step=local.step,
                since_progress_s=since_s,
                limit_s=limit,
            )
        )


def ask_ranks(turn: NodeTurn, probe: int, generation: Generation, stopped: frozenset[Rank]) -> None:
    """Pass the question on to every rank of the generation that is not already leaving."""
    asked = frozenset(
        r
        for r, local in turn.state.ranks.items()
        if local.is_watched and local.generation == generation
    )
    deadline = turn.now + turn.timeouts.probe_deadline_s
    turn.update(probe=LocalProbe(number=probe, deadline=deadline, asked=asked, stopped=stopped))
    for rank in sorted(asked):
        turn.tell_rank(rank, RankProbe(probe=probe))
    _conclude_if_complete(turn)


def answered(turn: NodeTurn, rank: Rank, answer: ProbeAnswer) -> None:
    """Take an answer in."""
    probe = turn.state.probe
    if probe is None or answer.probe != probe.number:
        return
    turn.update(probe=replace(probe, answers={**probe.answers, rank: answer}))
    _conclude_if_complete(turn)


def probe_overdue(turn: NodeTurn) -> None:
    """Who has not answered by now is silent."""
    probe = turn.state.probe
    if probe is not None and turn.now >= probe.deadline:
        _conclude(turn, probe)


def _conclude_if_complete(turn: NodeTurn) -> None:
    probe = turn.state.probe
    assert probe is not None, "no question is open"
    if probe.asked <= set(probe.answers) | probe.stopped:
        _conclude(turn, probe)


def _conclude(turn: NodeTurn, probe: LocalProbe) -> None:
    turn.update(probe=None)
    evidence = tuple(_evidence(turn, probe, r) for r in sorted(probe.asked))
    turn.tell(EvidenceGiven(probe=probe.number, evidence=evidence))


def _evidence(turn: NodeTurn, probe: LocalProbe, rank: Rank) -> Evidence:
    local = turn.state.ranks[rank]
    answer = probe.answers.get(rank)
    since_s, limit = turn.now - local.phase_since, limit_s(turn, local)
    if answer is None:
        where = Whereabouts.STOPPED if rank in probe.stopped else Whereabouts.SILENT
        return Evidence(
            rank=rank,
            node=turn.state.node,
            whereabouts=where,
            step=local.step,
            since_progress_s=since_s,
            limit_s=limit,
        )
    if answer.whereabouts is Whereabouts.DATA:
        since_s, limit = answer.seconds_there, max(limit, turn.limits.data_limit_s())
    elif answer.whereabouts is Whereabouts.COMPILE:
        limit = turn.timeouts.hang_ceiling_s
    return Evidence(
        rank=rank,
        node=turn.state.node,
        whereabouts=answer.whereabouts,
        step=local.step,
        since_progress_s=since_s,
        limit_s=limit,
        collectives=answer.collectives,
        stack=answer.stack,
    )
