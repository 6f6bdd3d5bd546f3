"""Nodes that have to leave while the job goes on: a checkpoint first, then they are let go.

Works on a `Turn` of the job's machine (`core.job`). Owns: which checkpoint a draining node waits
for. Does not own: making it (`core.job_durable`), the node's own deadline (`core.node_drain`).
Invariant: a node is let go once a checkpoint is committed that was announced after it had asked, or
where none can be.
"""

from __future__ import annotations

from stepfast.core import job_durable, job_faults
from stepfast.core.job_state import Phase
from stepfast.core.job_turn import Turn
from stepfast.core.messages import LeaveNow, NodeDraining
from stepfast.core.terms import NodeId, SnapshotId
from stepfast.events import Note


def asked(turn: Turn, message: NodeDraining) -> None:
    """Once; it is told again after a lost connection."""
    state = turn.state
    if state.end is not None or message.node in state.draining:
        return
    text = f"it has to leave ({message.reason}): what it holds is made durable first"
    turn.record(Note(topic="drain", text=text, node=message.node))
    turn.update(draining={**state.draining, message.node: None})


def forget(turn: Turn, node: NodeId) -> None:
    """It has left, or another one has come in its place."""
    kept = {n: target for n, target in turn.state.draining.items() if n != node}
    turn.update(draining=kept)


def advance(turn: Turn) -> None:
    """Announce what is waited for, and let go whom nothing keeps any more."""
    state = turn.state
    if not state.draining or state.end is not None:
        return
    has_store = bool(state.settings.checkpoints.url)
    for node, target in sorted(state.draining.items()):
        if not has_store or state.phase is Phase.FORMING:
            _let_go(turn, node)
        elif state.phase is Phase.RUNNING and not state.returned:
            _advance_one(turn, node, target)


def _advance_one(turn: Turn, node: NodeId, target: SnapshotId | None) -> None:
    state = turn.state
    newest = state.durable.newest(state.lineage)
    if target is not None and newest is not None and newest.step >= target.step:
        _let_go(turn, node)
        return
    is_void = target is None or target.generation != state.generation
    if is_void or target in state.durable.failed:
        awaited = job_durable.announced(turn)
        turn.update(draining={**turn.state.draining, node: awaited})


def _let_go(turn: Turn, node: NodeId) -> None:
    turn.send(node, LeaveNow())
    forget(turn, node)


def left(turn: Turn, node: NodeId) -> None:
    """A node has said goodbye while the job goes on: its ranks are gone, and nothing is waited
    for.
    """
    forget(turn, node)
    is_in_generation = turn.state.phase in (Phase.STARTING, Phase.RUNNING, Phase.RECOVERING)
    if is_in_generation and not job_faults.has_node_fault(turn.state, node):
        job_faults.node_fault(turn, node, "it left in order")
