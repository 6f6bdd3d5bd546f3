"""The machine's clock, behind the port."""

from __future__ import annotations

import time


class SystemClock:
    """CLOCK_MONOTONIC and the wall clock."""

    def monotonic(self) -> float:
        """Seconds on a clock that only grows and that all processes of one machine share."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()
