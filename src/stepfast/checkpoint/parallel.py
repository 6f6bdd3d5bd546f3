"""How many requests to a store are under way at once.

Owns: the threads for them, which end with the call. Does not own: what is asked.
Invariant: results come in the order of the items; the first error that was raised is raised here,
after all threads have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# A small request is a round trip, and there may be one for each of a thousand ranks.
SMALL_REQUESTS = 8

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    function: Callable[[_Item], _Result], items: Sequence[_Item], threads: int
) -> list[_Result]:
    """`function` of each item, at most `threads` at once; with one thread, in the caller's own."""
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items)), "stepfast-store") as pool:
        return list(pool.map(function, items))
