"""What snapshots cost the training loop: an account in seconds, and one sentence about it.

Owns: the sums and the estimate. Does not own: clocks, cadence. Pure arithmetic.

Two things cost: the time in which the training thread is held, which is measured, and the copy that
runs beside the training. The latter is the difference of two medians: of turns with a copy beside
them and of turns without, which whole snapshots and intervals over one step give. Until there are
enough of those, the copy's own processor time stands for it: it cannot take much more than that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from stepfast.checkpoint.capture import WHOLE_EVERY

_TURNS_KEPT = 1024  # of a job of any length; the latest count
_TURNS_MIN = 10  # fewer say nothing
_CONTROLS_MIN = 8
_AIM = 0.01


class SnapshotCost:
    """Fed at each turn by the thread that trains."""

    def __init__(self) -> None:
        self._boundaries_s = _kept()
        self._fences_s = _kept()
        self._own_s = _kept()
        self._with_copy_s = _kept()
        self._without_copy_s = _kept()
        self._wholes_s = _kept()  # boundary, and comparing at the fence
        self._held_in_turn_s = 0.0

    def boundary(self, seconds: float, *, whole: bool) -> None:
        """A snapshot was begun; `whole`: and copied, for which the thread was held."""
        self._held_in_turn_s += seconds
        (self._wholes_s if whole else self._boundaries_s).append(seconds)

    def fence(self, seconds: float, *, whole: bool) -> None:
        """The thread was held until a copy had ended, or was compared if it was `whole`."""
        self._held_in_turn_s += seconds
        if not whole:
            self._fences_s.append(seconds)
        elif self._wholes_s:
            self._wholes_s[-1] += seconds

    def copied(self, own_s: float) -> None:
        """A copy beside the training ended and took so much processor time."""
        self._own_s.append(own_s)

    def turn(self, seconds: float, *, copying: bool) -> None:
        """A turn is over that took `seconds`, the holds in it included.

        `copying`: a copy was under way when it began.
        """
        free_s = max(0.0, seconds - self._held_in_turn_s)
        self._held_in_turn_s = 0.0
        (self._with_copy_s if copying else self._without_copy_s).append(free_s)

    def drop_turn(self) -> None:
        """This turn is like no other: the first one, or an interrupted one."""
        self._held_in_turn_s = 0.0

    def words(self, interval_steps: int) -> str | None:
        """One sentence; None where too few turns were seen."""
        if len(self._with_copy_s) < _TURNS_MIN or not self._boundaries_s:
            return None
        beside_s, step_s, how = self._beside()
        boundary_s, fence_s = _median(self._boundaries_s), _median(self._fences_s)
        whole_s = _median(self._wholes_s)
        each_s = boundary_s + fence_s + whole_s / WHOLE_EVERY + beside_s
        text = (
            f"{each_s / interval_steps / step_s:.1%} of a step of"
            f" {step_s * 1e3:.1f} ms: held {boundary_s * 1e3:.2f} ms at the boundary and"
            f" {fence_s * 1e3:.2f} ms at the fence, {whole_s * 1e3:.1f} ms by a whole one (each"
            f" {WHOLE_EVERY}th), copying beside the training {beside_s * 1e3:.2f} ms ({how})"
        )
        wanted = math.ceil(each_s / (_AIM * step_s))
        if wanted <= interval_steps:
            return text
        return f"{text}; an interval of {wanted} steps would keep it under {_AIM:.0%}"

    def _beside(self) -> tuple[float, float, str]:
        """What a copy adds to its turn, a turn's time without one, and how that is known."""
        with_s = statistics.median(self._with_copy_s)
        if len(self._without_copy_s) >= _CONTROLS_MIN:
            without_s = statistics.median(self._without_copy_s)
            turns = f"{len(self._with_copy_s)} turns with, {len(self._without_copy_s)} without"
            return max(0.0, with_s - without_s), without_s, turns
        own_s = _median(self._own_s)
        return own_s, max(with_s - own_s, own_s), "its own processor time"


def _kept() -> deque[float]:
    return deque(maxlen=_TURNS_KEPT)


def _median(seconds: deque[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0
