"""Lines and numbers for people: aligned columns, sizes.

Owns: how a terminal shows them. Does not own: what is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """The rows as lines whose columns begin at the same place; the last one has no padding."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def size_text(size_bytes: float) -> str:
    """A number of bytes, in the unit that suits it."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(4, int(math.log2(size_bytes)) // 10)
    return f"{size_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def span(values: Sequence[int], text: Callable[[int], str] = str) -> str:
    """From the smallest to the largest; one number where they are the same."""
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"
