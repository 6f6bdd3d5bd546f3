"""Every seam with the world, as a small protocol. The simulated twins implement the same names."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds on a clock that only grows and that all processes of one machine share."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for records only; never for a decision."""
        ...


class FaultPoints(Protocol):
    """Named places inside a rank where chaos may strike. The default does nothing."""

    @property
    def is_armed(self) -> bool:
        """Whether anything is still to come."""
        ...

    def reach(self, point: str, step: int) -> None:
        """Called at `forward`, `backward`, `optimizer`, `boundary` and `recovery` of `step`; may
        not return.
        """
        ...
