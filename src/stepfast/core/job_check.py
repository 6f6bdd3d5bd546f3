"""A check: every rank makes its first turn, says what it would keep of each, and the job ends.

Works on a `Turn` of the job's machine (`core.job`). Owns: when a check is over, and how.
Does not own: what is said to a person about it (`cli`).
Invariant: a job that is no check is never ended here.
"""

from __future__ import annotations

from stepfast.core.job_state import Phase
from stepfast.core.job_turn import Turn
from stepfast.core.messages import RankChecked
from stepfast.core.terms import NodeId
from stepfast.errors import EXIT_FINISHED, EXIT_USER_ERROR
from stepfast.events import Dropped


def rank_checked(turn: Turn, node: NodeId, message: RankChecked) -> None:
    """Take in what a rank would keep."""
    state = turn.state
    if message.generation == state.generation:
        turn.update(checked={**state.checked, message.rank: message})
    else:
        turn.record(Dropped(what="RankChecked", generation=message.generation, node=node))


def advance(turn: Turn) -> None:
    """End the check once every rank has said it, or one never will."""
    state = turn.state
    if not state.settings.check or state.phase not in (Phase.STARTING, Phase.RUNNING):
        return
    if len(state.checked) == state.settings.world_size:
        turn.end("checked", EXIT_FINISHED, "every rank has made its first step")
    elif silent := sorted(state.returned.keys() - state.checked.keys()):
        reason = f"rank {silent[0]} returned before a turn of run.steps was whole: nothing to check"
        turn.end("failed", EXIT_USER_ERROR, reason)
