"""Causes are told from their consequences, and the one that hangs from those who wait for it."""

from __future__ import annotations

import pytest

from stepfast.core.faults import (
    SUSPICION_RATIO,
    FaultKind,
    Whereabouts,
    chief_cause,
    judge_hang,
    kind_of_end,
    root_causes,
)
from unit.core.rigs import evidence, fault

COLLECTIVE, USER = Whereabouts.COLLECTIVE, Whereabouts.USER


def test_collateral_faults_are_no_causes_while_another_is_known():
    told = [
        fault(FaultKind.COLLECTIVE, 1),
        fault(FaultKind.UNREACHABLE, 2),
        fault(FaultKind.KILL, 3),
        fault(FaultKind.EXCEPTION, 0),
    ]
    assert [f.kind for f in root_causes(told)] == [FaultKind.KILL, FaultKind.EXCEPTION]


def test_of_collateral_faults_alone_the_first_stands_for_all():
    told = [fault(FaultKind.COLLECTIVE, 1), fault(FaultKind.COLLECTIVE, 0)]
    assert root_causes(told) == (told[0],)
    assert root_causes([]) == ()


@pytest.mark.parametrize(
    ("kinds", "chief"),
    [
        ((FaultKind.COLLECTIVE, FaultKind.EXCEPTION), FaultKind.EXCEPTION),
        ((FaultKind.EXCEPTION, FaultKind.KILL), FaultKind.KILL),
        ((FaultKind.KILL, FaultKind.NODE), FaultKind.NODE),
        ((FaultKind.EXIT, FaultKind.EXCEPTION), FaultKind.EXCEPTION),
        ((FaultKind.HANG, FaultKind.STOP), FaultKind.STOP),
        ((FaultKind.UNREACHABLE, FaultKind.HANG), FaultKind.HANG),
    ],
)
def test_the_chief_cause_is_the_highest_in_order(kinds, chief):
    told = [fault(kind, rank) for rank, kind in enumerate(kinds)]
    assert chief_cause(told).kind is chief
    assert chief_cause(told[::-1]).kind is chief


def test_of_equal_causes_the_first_reported_is_chief():
    assert chief_cause([fault(FaultKind.KILL, 3), fault(FaultKind.KILL, 1)]).rank == 3


def test_every_kind_has_its_place_in_the_order():
    for kind in FaultKind:
        assert chief_cause([fault(kind)]).kind is kind


@pytest.mark.parametrize(
    ("signal", "kind"),
    [
        (None, FaultKind.EXIT),
        (9, FaultKind.KILL),
        (11, FaultKind.SEGV),
        (6, FaultKind.SEGV),
        (7, FaultKind.SEGV),
        (15, FaultKind.SIGNAL),
    ],
)
def test_the_kind_of_an_end(signal, kind):
    assert kind_of_end(signal) is kind


@pytest.mark.parametrize(
    ("where", "kind"),
    [(Whereabouts.SILENT, FaultKind.GIL), (Whereabouts.STOPPED, FaultKind.STOP)],
)
def test_who_does_not_answer_is_the_culprit(where, kind):
    told = [evidence(0, COLLECTIVE), evidence(1, where), evidence(2, USER)]
    assert judge_hang(told).culprits == ((1, kind),)


def test_all_who_do_not_answer_are_culprits():
    told = [evidence(2, Whereabouts.STOPPED), evidence(1, Whereabouts.SILENT)]
    assert judge_hang(told).culprits == ((1, FaultKind.GIL), (2, FaultKind.STOP))


def test_silence_within_the_limit_is_no_hang():
    told = [evidence(0, COLLECTIVE), evidence(1, Whereabouts.SILENT, since_progress_s=0.1)]
    assert judge_hang(told).culprits == ()


@pytest.mark.parametrize("where", [Whereabouts.DATA, Whereabouts.COMPILE, Whereabouts.USER])
def test_a_phase_with_time_left_excuses_everybody(where):
    told = [evidence(0, COLLECTIVE), evidence(1, where, limit_s=20.0), evidence(2, USER)]
    verdict = judge_hang(told)
    assert verdict.culprits == ()
    assert "rank 1" in verdict.reason and where.value in verdict.reason


def test_who_is_outside_any_collective_holds_up_the_others():
    told = [evidence(0, COLLECTIVE), evidence(1, USER), evidence(2, COLLECTIVE)]
    assert judge_hang(told).culprits == ((1, FaultKind.HANG),)


def test_in_collectives_the_one_with_the_fewest_is_behind():
    told = [evidence(r, COLLECTIVE, collectives=c) for r, c in enumerate((12, 12, 11, 12))]
    verdict = judge_hang(told)
    assert verdict.culprits == ((2, FaultKind.HANG),)
    assert "is 1 collective behind" in verdict.reason


def test_an_older_step_is_further_behind_than_fewer_collectives():
    told = [
        evidence(0, COLLECTIVE, step=6, collectives=1),
        evidence(1, COLLECTIVE, step=5, collectives=9),
    ]
    verdict = judge_hang(told)
    assert verdict.culprits == ((1, FaultKind.HANG),)
    assert verdict.reason == "rank 1 is 1 step behind"


def test_where_all_wait_in_the_same_collective_the_lowest_rank_stands_for_them():
    told = [evidence(r, COLLECTIVE) for r in (3, 1, 2)]
    verdict = judge_hang(told)
    assert verdict.culprits == ((1, FaultKind.HANG),)
    assert "same collective" in verdict.reason


def test_all_within_their_limits_is_no_hang():
    told = [evidence(r, COLLECTIVE, since_progress_s=1.0) for r in range(3)]
    assert judge_hang(told).culprits == ()


def test_the_verdict_falls_within_the_limit():
    at_ratio = [evidence(0, USER, since_progress_s=2.0 * SUSPICION_RATIO)]
    assert judge_hang(at_ratio).culprits


def test_who_is_not_in_the_generation_is_not_asked():
    told = [evidence(0, Whereabouts.AWAY), evidence(1, USER)]
    assert judge_hang(told).culprits == ((1, FaultKind.HANG),)
    assert judge_hang([]).culprits == ()


def test_the_verdict_does_not_depend_on_the_order_of_the_answers():
    told = [evidence(0, COLLECTIVE), evidence(1, USER), evidence(2, COLLECTIVE, collectives=3)]
    assert judge_hang(told) == judge_hang(told[::-1])


DEVICE = Whereabouts.DEVICE


def test_who_waits_for_its_device_is_no_culprit_while_anothers_is_idle():
    """The hosts of 0 and 2 ran ahead of a collective that 1's host has not begun."""
    told = [evidence(0, DEVICE), evidence(1, USER), evidence(2, DEVICE)]
    verdict = judge_hang(told)
    assert verdict.culprits == ((1, FaultKind.HANG),) and "outside any collective" in verdict.reason
    told = [evidence(0, DEVICE), evidence(1, Whereabouts.DATA, limit_s=20.0)]
    assert judge_hang(told).culprits == ()


def test_where_all_wait_for_their_devices_the_one_behind_is_the_culprit():
    told = [evidence(0, DEVICE, collectives=9), evidence(1, DEVICE, collectives=7)]
    assert judge_hang(told).culprits == ((1, FaultKind.HANG),)
    verdict = judge_hang([evidence(0, DEVICE), evidence(1, DEVICE)])
    assert verdict.culprits == ((0, FaultKind.HANG),)
    assert verdict.reason == "all ranks wait for their devices; rank 0 stands for them"
    told = [evidence(rank, DEVICE, since_progress_s=0.1) for rank in (0, 1)]
    assert judge_hang(told).culprits == ()
