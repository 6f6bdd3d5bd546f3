"""Numbers of bytes, as people read them.

Owns: units. Does not own: where they are shown.
"""

from __future__ import annotations

import math


def size_text(size_bytes: float) -> str:
    """A number of bytes, in the unit that suits it."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    power = min(4, int(math.log2(size_bytes)) // 10)
    return f"{size_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"
