"""The account of one incident: what was lost, who survived, what caused it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from stepfast.core.faults import FaultKind
from stepfast.core.incident import Incident, recovered_event
from stepfast.core.messages import RankReport, RankResumed, RankState
from stepfast.core.terms import Generation, Rank, Step
from unit.core.rigs import fault


def report_of(number: int, **changes: Any) -> RankReport:
    plain = RankReport(
        rank=Rank(number),
        state=RankState.ACTIVE,
        pid=1000 + number,
        incarnation=1,
        generation=Generation(1),
        step=Step(5),
    )
    return msgspec.structs.replace(plain, **changes)


def incident(**changes: Any) -> Incident:
    plain = {
        "opened_at": 100.0,
        "reached_by_rank": {Rank(0): Step(6), Rank(1): Step(5)},
        "pids_before": {Rank(0): 1000, Rank(1): 1001},
        "opened_generation": Generation(2),
    }
    return Incident(**{**plain, **changes})


def resumed(step: int) -> dict[Rank, RankResumed]:
    return {
        Rank(r): RankResumed(
            generation=Generation(2),
            rank=Rank(r),
            step=Step(step),
            rendezvous_s=0.1 * (r + 1),
            build_s=0.0,
            restore_s=0.5,
            kept=True,
        )
        for r in (0, 1)
    }


def closed(made: Incident, *reports: RankReport, now: float = 103.0):
    ranks = {r.rank: r for r in reports or (report_of(0), report_of(1))}
    return recovered_event(made, ranks=ranks, now=now)


def test_steps_lost_are_counted_from_the_step_that_all_had_completed():
    made = incident(faults=(fault(FaultKind.KILL),))
    assert closed(replace(made, resumed=resumed(5))).steps_lost == 0
    assert closed(replace(made, resumed=resumed(4))).steps_lost == 1
    assert closed(replace(made, resumed=resumed(9))).steps_lost == 0


def test_what_a_rank_had_completed_is_known_better_once_it_has_left():
    made = incident().told_by(report_of(1, state=RankState.QUIET, step=Step(6)))
    assert made.reached == 6
    assert made.told_by(report_of(1, step=Step(2))).reached == 6
    assert made.told_by(report_of(1, generation=Generation(0), step=Step(9))).reached == 6


def test_survivors_keep_their_pids():
    made = incident(faults=(fault(FaultKind.EXCEPTION),))
    assert closed(made).survivors_kept_pid
    assert not closed(made, report_of(0), report_of(1, pid=2001)).survivors_kept_pid


def test_a_replaced_rank_is_no_survivor():
    made = incident(faults=(fault(FaultKind.KILL, 1),)).condemning({Rank(1): 1})
    assert closed(made, report_of(0), report_of(1, pid=2001)).survivors_kept_pid
    assert made.replaced == {1}


def test_a_rank_without_a_process_when_it_began_is_no_survivor():
    made = incident(
        faults=(fault(FaultKind.KILL, 1),), pids_before={Rank(0): 0, Rank(1): 1001}
    ).condemning({Rank(1): 1})
    assert closed(made, report_of(0, pid=2000), report_of(1, pid=2001)).survivors_kept_pid


def test_a_process_is_condemned_with_all_before_it():
    made = incident().condemning({Rank(1): 2})
    assert made.is_condemned(report_of(1, incarnation=1))
    assert made.is_condemned(report_of(1, incarnation=2))
    assert not made.is_condemned(report_of(1, incarnation=3))
    assert not made.is_condemned(report_of(0))
    assert made.condemning({Rank(1): 1}) == made


def test_all_causes_are_named_and_the_first_rounds_chief_names_the_incident():
    made = incident(faults=(fault(FaultKind.COLLECTIVE, 0), fault(FaultKind.HANG, 1))).decided()
    made = made.joined_by(fault(FaultKind.KILL, 0, generation=Generation(2)), 101.0)
    event = closed(made)
    assert (event.kind, event.rank) == ("hang", 1)
    assert [(c.kind, c.rank) for c in event.causes] == [("hang", 1), ("kill", 0)]


def test_only_faults_since_the_last_decision_are_undecided():
    made = incident(faults=(fault(FaultKind.KILL, 0),)).decided()
    made = made.joined_by(fault(FaultKind.COLLECTIVE, 1), 101.0)
    assert made.only_collateral
    assert made.round_at == 101.0
    assert not made.decided().only_collateral, "what is decided waits for no cause"
    assert made.undecided_chief.kind is FaultKind.COLLECTIVE
    made = made.joined_by(fault(FaultKind.EXCEPTION, 0), 102.0)
    assert made.undecided_chief.kind is FaultKind.EXCEPTION
    assert made.round_at == 101.0, "the window begins with its first fault"


def test_a_fault_that_joins_makes_resumed_ranks_count_no_more():
    made = replace(incident(), resumed=resumed(5), quiet_at=101.0)
    joined = made.joined_by(fault(FaultKind.KILL), 102.0)
    assert not joined.resumed and not joined.stepped
    assert joined.quiet_at is None


def test_each_phase_has_its_seconds():
    made = incident(
        faults=(fault(FaultKind.KILL, detect_s=0.25),),
        quiet_at=100.5,
        ready_at=101.5,
        resumed=resumed(5),
    )
    event = closed(made)
    assert (event.detect_s, event.interrupt_s, event.respawn_s) == (0.25, 0.5, 0.0)
    assert (event.rendezvous_s, event.restore_s, event.total_s) == (0.2, 0.5, 3.0)
    with_fresh = replace(made, condemned={Rank(0): 1})
    assert closed(with_fresh).respawn_s == 1.5
