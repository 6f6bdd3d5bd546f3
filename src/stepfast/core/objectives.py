"""What a recovery may take and cost, and whether one did.

Owns: the comparison. Does not own: what happens then (an event and a metric; nothing is decided).
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfast.events import Recovered, SloBreached

RECOVERY, STEPS_LOST = "recovery_s", "steps_lost"
OBJECTIVES = (RECOVERY, STEPS_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Upper limits of one recovery; None: any will do."""

    recovery_s: float | None = None  # of `total_s`: from the detection on
    steps_lost: int | None = None

    def breached_by(self, recovered: Recovered) -> tuple[SloBreached, ...]:
        """One event for each objective that this recovery missed."""
        pairs = (
            (RECOVERY, self.recovery_s, recovered.total_s),
            (STEPS_LOST, self.steps_lost, recovered.steps_lost),
        )
        return tuple(
            SloBreached(
                objective=name,
                limit=limit,
                value=value,
                generation=recovered.generation,
                kind=recovered.kind,
            )
            for name, limit, value in pairs
            if limit is not None and value > limit
        )
