"""Lines for people: aligned columns, spans.

Owns: how a terminal shows them. Does not own: what is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def aligned(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """The rows as lines whose columns begin at the same place; the last one has no padding."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def span(values: Sequence[int], text: Callable[[int], str] = str) -> str:
    """From the smallest to the largest; one number where they are the same."""
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"
