"""How many requests to a store are under way at once.

Owns: the threads for them, which end with the iteration. Does not own: what is asked.
Invariants: results come in the order of the items, and at most two for each thread are under way or
wait; the first error that was raised is raised here, after all threads have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

# A small request is a round trip, and there may be one for each of a thousand ranks.
SMALL_REQUESTS = 8

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    """`function` of each item, at most `threads` at once; with one thread, in the caller's own.

    Nothing begins before the first result is asked for.
    """
    if threads <= 1:
        yield from map(function, items)
        return
    waiting = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="stepfast-store") as pool:
        first = islice(waiting, 2 * threads)
        running: list[Future[_Result]] = [pool.submit(function, item) for item in first]
        try:
            while running:
                done = running.pop(0).result()
                running.extend(pool.submit(function, item) for item in islice(waiting, 1))
                yield done
        finally:
            for future in running:
                future.cancel()
