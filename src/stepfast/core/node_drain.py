"""A node that has to leave: it stays within its grace until what it holds is durable.

Works on a `NodeTurn` of the node's machine (`core.node`). Owns: when leaving is put off, and how
long. Does not own: what is made durable (`core.job_drain`), the leaving itself.
Invariant: who is told to stop twice, or has nobody to be let go by, leaves at once.
"""

from __future__ import annotations

from stepfast.core.durable import DRAIN_LIMIT_S
from stepfast.core.messages import NodeDraining, RankState
from stepfast.core.node_state import NodeState
from stepfast.core.node_turn import NodeTurn

ALONE_LIMIT_S = 5.0  # a draining node waits so long for a coordinator that went away
_HOLDING = (RankState.ACTIVE, RankState.QUIET, RankState.RETURNED)


def try_begin(turn: NodeTurn, reason: str) -> bool:
    """Ask to be let go; False where there is nothing to wait for."""
    state = turn.state
    has_store = state.settings is not None and bool(state.settings.checkpoints.url)
    is_held = any(local.state in _HOLDING for local in state.ranks.values())
    is_first = state.drains_for is None and state.finish is None
    if not (has_store and is_held and is_first and state.connected):
        return False
    turn.update(drains_for=reason, drain_deadline=turn.now + DRAIN_LIMIT_S)
    tell_again(turn)
    return True


def tell_again(turn: NodeTurn) -> None:
    """To a coordinator that may not have heard it."""
    state = turn.state
    if state.drains_for is not None and state.finish is None:
        turn.tell(NodeDraining(node=state.node, reason=state.drains_for))


def why_not_wait(state: NodeState, now: float) -> str | None:
    """Why a draining node leaves without having been let go; None: it waits, or does not drain."""
    if state.drain_deadline is None or state.finish is not None:
        return None
    if now > state.drain_deadline:
        return f"{state.drains_for}; nothing was made durable within {DRAIN_LIMIT_S:g} s"
    if state.lost_at is not None and now - state.lost_at > ALONE_LIMIT_S:
        return f"{state.drains_for}; the coordinator is away"
    return None
