"""The step to resume from is the newest that every rank holds on the lineage that stands."""

from __future__ import annotations

import random

import pytest

from stepfast.core.recovery import Lineage, choose_step
from stepfast.core.terms import Generation, Rank, SnapshotId, Step
from unit.core.rigs import held


def lineage(*openings: tuple[int, int]) -> Lineage:
    made = Lineage()
    for generation, step in openings:
        made = made.opened(Generation(generation), Step(step))
    return made


def snapshot(generation: int, step: int) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


@pytest.mark.parametrize(
    ("generation", "step", "admitted"),
    [
        (1, 10, True),  # generation 2 went on from there
        (1, 11, False),  # what generation 1 did beyond it is void
        (2, 11, True),
        (2, 12, True),
        (2, 13, False),
        (3, 13, True),
        (4, 1, False),  # a generation that was never opened
    ],
)
def test_a_snapshot_is_on_the_lineage_or_not(generation: int, step: int, admitted: bool):
    assert lineage((1, 0), (2, 10), (3, 12)).admits(snapshot(generation, step)) is admitted


def test_a_later_opening_further_back_voids_what_was_between():
    twice_back = lineage((1, 0), (2, 10), (3, 8))
    assert not twice_back.admits(snapshot(1, 9))
    assert not twice_back.admits(snapshot(2, 11))
    assert twice_back.admits(snapshot(1, 8))


def test_without_openings_everything_is_on_the_lineage():
    assert Lineage().admits(snapshot(7, 70))


def test_generations_only_grow():
    with pytest.raises(AssertionError):
        lineage((2, 0), (2, 1))


def test_old_openings_are_forgotten_without_harm():
    long = lineage(*((g, g) for g in range(1, 600)))
    assert len(long.openings) <= 256
    assert long.admits(snapshot(599, 700))
    assert not long.admits(snapshot(500, 502))


def test_the_newest_common_step_is_chosen():
    plan = choose_step({Rank(0): held((1, 4), (1, 5)), Rank(1): held((1, 5), (1, 6))}, Lineage())
    assert plan is not None
    assert plan.step == 5
    assert plan.sources == {0: snapshot(1, 5), 1: snapshot(1, 5)}


def test_no_common_step_is_no_plan():
    assert choose_step({Rank(0): held((1, 4)), Rank(1): held((1, 5))}, Lineage()) is None
    assert choose_step({Rank(0): held((1, 4)), Rank(1): ()}, Lineage()) is None
    assert choose_step({}, Lineage()) is None


def test_an_abandoned_lineage_never_enters_a_plan():
    known = lineage((1, 0), (2, 4))
    slots = {Rank(0): held((1, 5), (2, 4)), Rank(1): held((1, 5), (1, 4))}
    plan = choose_step(slots, known)
    assert plan is not None
    assert plan.step == 4
    assert plan.sources == {0: snapshot(2, 4), 1: snapshot(1, 4)}


def test_of_one_step_the_newest_generation_is_read():
    known = lineage((1, 0), (2, 5))
    plan = choose_step({Rank(0): held((1, 5), (2, 5))}, known)
    assert plan is not None
    assert plan.sources[Rank(0)] == snapshot(2, 5)


# --- the slow, obvious twin ----------------------------------------------------------------------


def slow_admits(openings: list[tuple[int, int]], generation: int, step: int) -> bool:
    """Walk the job's history forward: which (generation, step) are still part of it at its end?"""
    if not openings:
        return True
    alive: set[tuple[int, int]] = set()
    for g, start in openings:
        alive = {(old, at) for old, at in alive if at <= start}
        alive |= {(g, at) for at in range(30)}
    known = {g for g, _ in openings}
    if generation not in known:  # of a generation that this history does not name: before its first
        return generation < min(known) and all(step <= start for _, start in openings)
    return (generation, step) in alive


def slow_choice(slots: dict[int, list[tuple[int, int]]], openings: list[tuple[int, int]]):
    best = None
    for step in range(30):
        sources = {}
        for rank, pairs in slots.items():
            for generation, at in sorted(pairs):
                if at == step and slow_admits(openings, generation, at):
                    sources[rank] = (generation, at)
        if slots and len(sources) == len(slots):
            best = step, sources
    return best


def random_history(chance: random.Random) -> list[tuple[int, int]]:
    openings, step = [], 0
    for generation in range(1, chance.randint(1, 6)):
        openings.append((generation, step))
        step = max(0, step + chance.randint(-2, 5))
    return openings


@pytest.mark.parametrize("seed", range(300))
def test_the_choice_is_that_of_its_slow_twin(seed: int):
    chance = random.Random(seed)
    openings = random_history(chance)
    slots = {
        rank: [
            (chance.randint(1, max(1, len(openings))), chance.randint(0, 9))
            for _ in range(chance.randint(0, 4))
        ]
        for rank in range(chance.randint(1, 3))
    }
    plan = choose_step({Rank(r): held(*pairs) for r, pairs in slots.items()}, lineage(*openings))
    expected = slow_choice(slots, openings)
    assert (plan is None) == (expected is None)
    if plan is not None and expected is not None:
        assert plan.step == expected[0]
        found = {r: (s.generation, s.step) for r, s in plan.sources.items()}
        assert found == expected[1]
