"""Numbers, as people read them.

Owns: units and plurals. Does not own: where they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection


def size_text(size_bytes: float) -> str:
    """A number of bytes, in the unit that suits it."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(4, int(math.log2(size_bytes)) // 10)
    return f"{size_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def counted(count: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def numbered(word: str, numbers: Collection[int]) -> str:
    """`rank 3`, `ranks 0, 1`."""
    plural = "" if len(numbers) == 1 else "s"
    return f"{word}{plural} {', '.join(map(str, numbers))}"
