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
        self._held_s = 0.0
        self._snapshots = 0
        self._held_in_turn_s = 0.0

    def boundary(self, seconds: float, *, whole: bool) -> None:
        """A snapshot was begun; `whole`: and copied, for which the thread was held."""
        self._hold(seconds)
        self._snapshots += 1
        if not whole:
            self._boundaries_s.append(seconds)

    def fence(self, seconds: float, *, whole: bool) -> None:
        """The thread was held until a copy had ended, or was compared if it was `whole`."""
        self._hold(seconds)
        if not whole:
            self._fences_s.append(seconds)

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
        each_s = self._held_s / self._snapshots + beside_s
        share = each_s / interval_steps / step_s
        text = (
            f"snapshots cost {share:.1%} of a step of {step_s * 1e3:.1f} ms: held"
            f" {_ms(self._boundaries_s)} at the boundary and {_ms(self._fences_s)} at the fence"
            f" (medians; {self._held_s / self._snapshots * 1e3:.2f} ms for each, the whole ones"
            f" included), copying beside the training {beside_s * 1e3:.2f} ms ({how})"
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
        own_s = statistics.median(self._own_s) if self._own_s else 0.0
        return own_s, max(with_s - own_s, own_s), "its own processor time"

    def _hold(self, seconds: float) -> None:
        self._held_s += seconds
        self._held_in_turn_s += seconds


def _kept() -> deque[float]:
    return deque(maxlen=_TURNS_KEPT)


def _ms(seconds: deque[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms" if seconds else "0 ms"
