"""Ranks write at different speeds, or not at all: checkpoints are committed, no slot is kept for
ever, and the training waits for nobody.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from property.world import Shape, World
from stepfast.core import node_writes
from stepfast.core.node_writes import ABANDONED_MAX
from stepfast.core.terms import Rank
from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import CheckpointLost, Note

RUN_S = 600.0
# Of the slowest write: to begin at one step, to be written, and to find each other before that.
# Where ranks took different steps they go on at one that is up to twice as far away as the last.
GAP_WRITES_MAX = 4.0
GAP_S = 5.0  # words take their time, and a step ahead of all ranks is a second away
STEP_S = 0.03


def world_of(seed: int, write_s: tuple[float, ...], every: int, steps: int = 400) -> World:
    shape = Shape(nodes=2, nproc_per_node=2, steps=steps, checkpoint_every=every, write_s=write_s)
    return World(seed, shape)


def finished(world: World) -> World:
    world.run(until_s=RUN_S)
    (end,) = world.watcher.ends
    assert end.status == "finished", end
    assert max(world.store.committed).step == world.shape.steps
    return world


def unequal(seed: int) -> tuple[float, ...]:
    chance = random.Random(f"writers {seed}")
    return tuple(
        chance.choice((0.01, chance.uniform(0.02, 0.4), chance.uniform(0.1, 2.0))) for _ in range(4)
    )


def gaps(world: World) -> list[float]:
    began_s = 1.0
    times = [began_s, *(at for at, _ in world.store.commits)]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("every", [0, 1, 3, 10])
@pytest.mark.parametrize("first", range(0, 12, 4))
def test_ranks_that_write_at_different_speeds_come_together(every: int, first: int):
    for seed in range(first, first + 4):
        write_s = unequal(seed)
        world = finished(world_of(seed, write_s, every))
        bound_s = max(write_s) * GAP_WRITES_MAX + every * STEP_S * 2 + GAP_S
        assert max(gaps(world)) <= bound_s, (seed, write_s, world.store.commits)
        assert len(world.store.commits) >= 2, (seed, write_s)


@pytest.mark.parametrize("write_s", [(0.05, 0.07, 0.05, 0.07), (0.01, 0.01, 0.01, 0.9)])
def test_two_paces_that_would_never_meet_do(write_s: tuple[float, ...]):
    """Each step is due, some write every second one, others every third."""
    world = finished(world_of(1, write_s, every=1))
    assert len(world.store.commits) >= 4


def test_no_slot_is_kept_when_nothing_is_written():
    for seed in range(8):
        world = world_of(seed, unequal(seed), every=1)
        world.run(until_s=6.0)
        world.run(until_s=world.now + 0.1)
        for process in world.living():
            local = world.agents[process.agent.node_id].driver.state.ranks[process.rank]
            loose = process.pins.held() - set(local.in_flight)
            fresh = {s for s in loose if s.step >= process.step - 8}
            assert loose == fresh, f"seed {seed}: rank {process.rank} keeps {loose} for nobody"


def test_skipped_steps_make_one_line_for_each_checkpoint():
    world = finished(world_of(3, (0.01, 0.01, 0.01, 1.5), every=1))
    lost = [e for e in world.watcher.events if isinstance(e, CheckpointLost)]
    assert len(lost) <= len(world.store.commits) + 1
    assert any(n.topic == "checkpoints skipped" for n in notes(world))


def test_a_short_interval_makes_no_noise():
    """By time: due 3 times a second where a write takes 2 s. The next one waits for it."""
    world = finished(world_of(5, (2.0, 0.1, 0.1, 0.1), every=0))
    assert not [e for e in world.watcher.events if isinstance(e, CheckpointLost)]
    assert len(world.store.commits) >= 3


def notes(world: World) -> list[Note]:
    return [e for e in world.watcher.events if isinstance(e, Note)]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_writes, "QUIET_AFTER_S", 0.5)
    monkeypatch.setattr(node_writes, "STALL_LIMIT_S", 2.0)


@pytest.mark.usefixtures("short_limits")
def test_a_store_that_hangs_costs_threads_that_are_counted_and_no_step():
    world = world_of(2, (0.05,) * 4, every=5, steps=1000)
    world.store.hung = {Rank(1), Rank(2)}
    world.run(until_s=15.0)
    reached = world.watcher.reached[Rank(0)]
    assert reached > 300, "the training goes on"
    assert not world.store.commits
    assert world.store.most_writes <= 2 * ABANDONED_MAX + 4
    off = [n for n in notes(world) if n.topic == "checkpoints are off"]
    assert [n.rank for n in off] == [1, 2], "said once for each"
    assert any("has taken nothing of step" in n.text for n in notes(world))
    for process in world.living():
        assert len(process.pins.held()) <= 1
    world.store.heal()
    finished(world)
    assert any(n.topic == "checkpoints are on again" for n in notes(world))
    assert min(c.step for _, c in world.store.commits) < 1000, "before the end"
    assert not world.store.writes


@pytest.mark.usefixtures("short_limits")
def test_a_job_whose_store_hangs_to_the_end_says_so_and_keeps_its_memory():
    world = world_of(4, (0.05,) * 4, every=5, steps=600)
    world.store.hung = {Rank(3)}
    world.run(until_s=RUN_S)
    (end,) = world.watcher.ends
    assert (end.status, end.exit_code, end.steps) == ("failed", EXIT_TRY_AGAIN, 600)
    assert (
        "step 600 is done but could not be made durable: rank 3: checkpoints are off" in end.reason
    )
    assert world.driver.state.end.keep_memory
    assert world.is_over and not world.living()


@pytest.mark.usefixtures("short_limits")
def test_a_write_that_hung_and_goes_on_at_last_is_no_checkpoint_of_another_state():
    world = world_of(6, (0.05,) * 4, every=5, steps=400)
    world.store.hung = {Rank(0)}
    world.run(until_s=6.0)
    world.store.heal()  # its slot was taken since: the store's own look finds that
    finished(world)
