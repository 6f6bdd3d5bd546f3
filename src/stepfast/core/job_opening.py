"""How a generation opens: from which step, at which store, and who keeps what it built.

Works on a `Turn` of the job's machine (`core.job`). Owns: the choice, and the order to start.
Invariants: opened only when every rank is out of the older generation; persisted before it is told.
"""

from __future__ import annotations

import msgspec

from stepfast.core.durable import choose_source, is_about_to_be_passed, would_start_over
from stepfast.core.job_state import (
    JobState,
    Phase,
)
from stepfast.core.job_turn import Turn
from stepfast.core.membership import NodeView, is_fresh, is_ready_to_start
from stepfast.core.messages import (
    NOTHING_BUILT,
    RankReport,
    StartGeneration,
)
from stepfast.core.quantities import counted
from stepfast.core.recovery import RestorePlan
from stepfast.core.terms import NOTHING_HELD, Generation, Rank, SnapshotId, Step
from stepfast.errors import EXIT_USER_ERROR
from stepfast.events import (
    GenerationOpened,
    Note,
)


def all_ranks_ready(state: JobState) -> bool:
    """Whether every rank of the world waits for the next generation, on connected nodes."""
    ranks = state.membership.ranks
    if len(ranks) < state.settings.world_size:
        return False
    views = state.membership.nodes.values()
    nodes_up = all(view.connected and view.knows_checkpoints for view in views)
    return nodes_up and all(is_ready_to_start(r, state.generation) for r in ranks.values())


def open_generation(turn: Turn) -> None:
    """Choose step, store and who keeps the model; persist; tell."""
    state = turn.state
    store = state.membership.store_host(Generation(state.generation + 1))
    if store is None:
        return  # a store is being started; its node's report brings us back
    ranks = state.membership.ranks
    held = {rank: r.snapshots for rank, r in sorted(ranks.items())}
    source = choose_source(held, state.lineage, state.durable)
    plan = source if isinstance(source, RestorePlan) else None
    stored = None if isinstance(source, RestorePlan) else source
    if plan is None and is_about_to_be_passed(stored, state.lineage, state.durable, turn.now):
        return  # the end of that commit, good or bad, brings us back
    if source is None and would_start_over(held, state.lineage, state.durable, state.steps_max):
        steps = {rank: [s.step for s in snapshots] for rank, snapshots in held.items()}
        turn.end(
            "failed",
            EXIT_USER_ERROR,
            f"no step is held by every rank (held: {steps}){_no_checkpoint(state)}; refusing to"
            " start over: choose another --job-dir to begin anew",
        )
        return
    keep = _may_keep(turn, plan)
    # Above every number in the store too, which may be another job's directory's.
    generation = Generation(max(state.generation, state.durable.newest_generation) + 1)
    view = state.membership.nodes[store]
    order = _start_order(state, generation, plan, view, keep=keep)
    start = order if stored is None else _from_store(order, stored)
    turn.persist(_opened_event(state, start))
    for node in state.membership.connected_nodes:
        turn.send(node, start)
    resumed_from = NOTHING_HELD if start.step is None else start.step
    incident = state.incident
    if incident is not None:
        incident = incident.opened(generation, kept_model=keep)
    turn.update(
        phase=Phase.STARTING,
        generation=generation,
        lineage=state.lineage.opened(generation, resumed_from),
        membership=state.membership.store_taken(store),
        incident=incident,
        # What is gone on from is no progress: the job, or another one before it, had it already.
        steps_max=max(state.steps_max, start.step or Step(0)),
        start=start,
        resumed={},
        steps={},
        returned={},
        probe=None,
        kept=keep,
    )


def _start_order(
    state: JobState,
    generation: Generation,
    plan: RestorePlan | None,
    store: NodeView,
    *,
    keep: bool,
) -> StartGeneration:
    assert store.store_port is not None, "store_host names nodes with a store"
    ranks = state.membership.ranks
    return StartGeneration(
        generation=generation,
        step=plan.step if plan else None,
        sources=dict(plan.sources) if plan else {},
        store_host=store.host,
        store_port=store.store_port,
        incarnations={r: report.incarnation for r, report in sorted(ranks.items())},
        keep=keep,
        limit_step=state.hang_step,
        limit_factor=2.0**state.hang_count,
    )


def _from_store(order: StartGeneration, stored: SnapshotId) -> StartGeneration:
    return msgspec.structs.replace(order, step=stored.step, checkpoint=stored)


def _no_checkpoint(state: JobState) -> str:
    if not state.durable.committed:
        return ""
    return f", and of {counted(len(state.durable.committed), 'checkpoint')} none can be used"


def _may_keep(turn: Turn, plan: RestorePlan | None) -> bool:
    """Whether survivors keep what `run.once` built; why not is an event."""
    ranks = turn.state.membership.ranks
    survivors = [r for r in ranks.values() if not is_fresh(r) and r.keep_obstacle != NOTHING_BUILT]
    if plan is None or not survivors:
        return False
    obstacles = sorted({r.keep_obstacle for r in survivors if r.keep_obstacle is not None})
    if (
        not obstacles
        and len(survivors) < len(ranks)
        and any(r.build_has_collectives for r in survivors)
    ):
        obstacles = ["build runs collectives, so fresh ranks cannot build alone"]
    if obstacles:
        turn.record(Note(topic="build again", text="; ".join(obstacles)))
    return not obstacles


def _opened_event(state: JobState, start: StartGeneration) -> GenerationOpened:
    ranks: dict[Rank, RankReport] = dict(sorted(state.membership.ranks.items()))
    source = "memory" if start.checkpoint is None else "checkpoint"
    return GenerationOpened(
        generation=start.generation,
        step=start.step,
        world_size=state.settings.world_size,
        store=f"{start.store_host}:{start.store_port}",
        pids={int(r): report.pid for r, report in ranks.items()},
        incarnations={int(r): report.incarnation for r, report in ranks.items()},
        kept=start.keep,
        source=source if start.step is not None else "nothing",
    )
