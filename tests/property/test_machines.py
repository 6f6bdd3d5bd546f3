"""Whatever happens at whatever instant: the machines keep their promises, and the job finishes."""

from __future__ import annotations

import random

import pytest

from property.process import error_report
from property.world import Shape, World
from stepfast.core.faults import ErrorClass
from stepfast.core.job_state import StopRequested
from stepfast.core.terms import NodeId, Rank
from stepfast.errors import EXIT_FINISHED
from stepfast.events import FaultSeen, GenerationOpened

SEEDS = 300
SEEDS_PER_TEST = 25
MANY_SEEDS = 10_000
FAULTS_UNTIL_S = 0.8  # a job without accidents takes about so long
LIVENESS_S = 300.0  # ceilings and silences add up; a world that needs more is stuck
ENDS_WITHIN_S = 30.0
SHAPES = (
    Shape(nodes=2, nproc_per_node=2, steps=10),
    Shape(nodes=1, nproc_per_node=1, steps=10),
    Shape(nodes=1, nproc_per_node=3, steps=10),
    Shape(nodes=3, nproc_per_node=1, steps=10),
    Shape(nodes=2, nproc_per_node=2, steps=10, checkpoint_every=3),
    Shape(nodes=3, nproc_per_node=1, steps=10, checkpoint_every=0),
)
KINDS = (
    "kill",
    "exit",
    "stop",
    "gil",
    "hang",
    "deaf hang",
    "raise",
    "store",
    "fork",
    "cut",
    "agent",
    "agent stopped",
    "freeze",
    "coordinator",
    "memory",
)
# Seeds that once failed, and what was wrong. What a seed does changes with the world; the cases
# themselves stand as tests of the machines in tests/unit/core.
ONCE_FAILED = {
    "a generation was opened over an agent that had just died": 1,
    "an agent that stopped in order was never missed": 2,
    "a coordinator that came back found half a generation": 4,
    "the return of a rank was lost with its connection": 13,
    "a frozen agent on a standing connection was never taken back": 17,
    "what was said into a lost connection was never said again": 19,
    "a node that said goodbye in a recovery was no fault": 103,
    "an order to start was lost with its connection": 153,
    "a process that was stopped before its function was never missed": 156,
    "a rank that had no process when it began was called a survivor": 170,
    "a return that came before every node was back was dropped": 2324,
}


def strike(world: World, kind: str) -> None:
    """One accident, to whomever it meets."""
    chance = world.random
    living = world.living()
    agent = world.agents[NodeId(chance.randrange(world.shape.nodes))]
    if kind == "coordinator":
        world.restart_coordinator(chance.choice((0.1, 0.5, 3.0)))
        return
    if kind in ("store", "fork", "cut", "agent", "agent stopped", "freeze", "memory"):
        strike_node(world, kind, agent.node_id)
        return
    if not living:
        return
    process = living[chance.randrange(len(living))]
    match kind:
        case "kill":
            process.end(exit_code=None, signal=9)
        case "exit":
            process.end(exit_code=3, signal=None)
        case "stop":
            process.is_stopped = True
        case "gil":
            process.holds_gil = True
        case "hang":
            process.hangs = True
        case "deaf hang":
            process.hangs = process.is_deaf = True
        case "raise":
            # An exception of the user's before the first step ends the job: a test of its own.
            stepped = process.step > 0
            process.raises = error_report(ErrorClass.USER if stepped else ErrorClass.IO)
            which = int(world.now * 1e6) % 4
            if which == 0:
                process.raises = error_report(ErrorClass.DEVICE)
            process.holds_graph = which == 1


def strike_node(world: World, kind: str, node_id: NodeId) -> None:
    agent = world.agents[node_id]
    match kind:
        case "store":
            agent.lose_store()
        case "fork":
            agent.forks_to_fail += 1
        case "cut":
            agent.cut(away_s=world.random.choice((0.03, 0.3, 3.0, 15.0)))
        case "agent":
            after_s = world.random.choice((0.1, 1.0, 14.0))
            world.replace_agent(node_id, after_s, in_order=False)
        case "agent stopped":
            world.replace_agent(node_id, world.random.choice((5.0, 14.0)), in_order=True)
        case "memory":
            if world.store.committed:  # or all that the job did would be lost, and it would end
                world.lose_memory(node_id, world.random.choice((0.1, 1.0)))
        case "freeze":
            agent.freeze(world.random.choice((0.2, 2.0, 12.0)))


def plan(world: World, seed: int) -> None:
    """Up to five accidents: at some time, together, or just behind an opening or a fault."""
    chance = random.Random(f"plan {seed}")
    at = chance.uniform(0.0, FAULTS_UNTIL_S)
    for _ in range(chance.choice((1, 1, 2, 2, 3, 4, 5))):
        kind = chance.choice(KINDS)
        behind = chance.choice((None, None, GenerationOpened, FaultSeen))
        if behind is None:
            world.at(at, lambda kind=kind: strike(world, kind))
        else:
            soon_s = chance.uniform(0.0, 0.03)
            world.watcher.strikes_after.append(
                (behind, soon_s, lambda kind=kind: strike(world, kind))
            )
        at += chance.choice((0.0, 0.001, chance.uniform(0.0, 0.05), chance.uniform(0.0, 0.3)))


def run_seed(seed: int) -> World:
    world = World(seed, SHAPES[seed % len(SHAPES)])
    plan(world, seed)
    world.run(until_s=LIVENESS_S)
    check_end(world)
    return world


def check_end(world: World) -> None:
    watcher = world.watcher
    assert len(watcher.ends) == 1, f"not ended: {world.phase()}, {watcher.events[-8:]}"
    end = watcher.ends[0]
    assert end.status == "finished", end
    assert end.exit_code == EXIT_FINISHED
    assert end.steps == world.shape.steps
    if world.shape.checkpoint_every is not None:
        newest = max(world.store.committed)
        assert newest.step == world.shape.steps, "finished without its last step"
    assert not watcher.open_incident, "an incident without its record"
    world.run(until_s=world.now + ENDS_WITHIN_S)
    if world.living():  # code behind the function has an hour; the user has not
        world.driver.feed(StopRequested("Ctrl-C", 130))
        world.run(until_s=world.now + ENDS_WITHIN_S)
    assert not world.living(), "processes are left"
    assert world.is_coordinator_over


def stop(world: World) -> None:
    if world.is_coordinator_away:
        world.at(0.05, lambda: stop(world))
    else:
        world.driver.feed(StopRequested("SIGTERM", 143))


def run_stopped(seed: int) -> World:
    """The user stops the job at some time; accidents happen before and meanwhile."""
    world = World(seed, SHAPES[-1 - seed % 2])
    if seed % 3 == 0:
        plan(world, seed)
    at_s = random.Random(f"stop {seed}").uniform(0.3, 1.5)
    world.at(at_s, lambda: stop(world))
    world.run(until_s=LIVENESS_S)
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST * 2))
def test_a_job_that_is_stopped_leaves_its_newest_state_durable_or_in_memory(first: int):
    for seed in range(first, first + SEEDS_PER_TEST * 2):
        world = run_stopped(seed)
        (end,) = world.watcher.ends
        assert world.is_over, f"seed {seed}: {world.phase()}"
        if end.status == "finished" or not world.watcher.reached:
            continue
        common = set.intersection(*({s.step for s in h} for h in world.slots.values()))
        durable = max((c.step for c in world.store.committed), default=0)
        kept = world.driver.state.end.keep_memory
        assert kept or durable >= max(common, default=0), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_the_job_finishes_whatever_happens(first: int):
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.long
def test_the_job_finishes_whatever_happens_ten_thousand_times():
    for seed in range(SEEDS, MANY_SEEDS):
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("name", sorted(ONCE_FAILED))
def test_a_seed_that_once_failed(name: str):
    run_seed(ONCE_FAILED[name])


def test_a_world_without_accidents_has_one_generation():
    world = World(seed=1)
    world.run(until_s=LIVENESS_S)
    check_end(world)
    assert world.watcher.generation == 1
    assert not world.watcher.recovered
    assert world.watcher.logged == list(range(1, 11))


def test_one_seed_is_one_run():
    assert run_seed(7).watcher.events == run_seed(7).watcher.events


def test_all_ranks_hold_one_final_state():
    world = run_seed(3)
    newest = {max(held.items())[1] for held in world.slots.values()}
    assert len(newest) == 1
    assert Rank(0) in world.slots
