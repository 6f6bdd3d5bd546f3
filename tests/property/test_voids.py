"""Some of many ranks lose a snapshot that changed under the copy, and a process dies before the
next is whole: memory may hold no common step. Then the store is gone back to, never a wrong state.
"""

from __future__ import annotations

import random

import pytest

from property.world import Shape, World
from stepfast.core.terms import Step
from stepfast.events import GenerationOpened

SHAPES = (
    Shape(nodes=3, nproc_per_node=1, steps=30, checkpoint_every=3, void_share=0.4),
    Shape(nodes=2, nproc_per_node=2, steps=30, checkpoint_every=5, void_share=0.2),
)
LIVENESS_S = 300.0


def run_seed(seed: int) -> World:
    """Kills alone, and many of them: what is tried is what the slots hold at every instant."""
    world = World(seed, SHAPES[seed % len(SHAPES)])
    chance = random.Random(f"voids {seed}")
    for _ in range(chance.choice((1, 2, 4))):
        world.at(chance.uniform(0.3, 2.0), lambda: kill(world))
    world.run(until_s=LIVENESS_S)
    return world


def kill(world: World) -> None:
    living = world.living()
    if living:
        living[world.random.randrange(len(living))].end(exit_code=None, signal=9)


def check_end(world: World) -> None:
    """The watcher has looked at every source: one step, one state, on the lineage."""
    (end,) = world.watcher.ends
    if end.status == "finished":
        assert max(world.store.committed).step == world.shape.steps
    else:  # it says so, and begins nothing anew
        assert "no step is held by every rank" in end.reason, end
        before = [c for at, c in world.store.commits if at < world.watcher.ended_at]
        assert not before, "there was one to go back to"


def resumed_from_store(world: World) -> list[Step]:
    events = [e for e in world.watcher.events if isinstance(e, GenerationOpened)]
    return [Step(e.step or 0) for e in events if e.source == "checkpoint"]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_common_step_in_memory_means_the_store_and_never_a_wrong_step(first: int):
    fallen_back = 0
    for seed in range(first, first + 50):
        try:
            world = run_seed(seed)
            check_end(world)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        fallen_back += bool(resumed_from_store(world))
    assert fallen_back, "the case came about"
