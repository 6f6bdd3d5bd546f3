"""How many requests to a store are under way at once.

Owns: the threads for them, which end with the iteration. Does not own: what is asked.
Invariants: results come in the order of the items, and at most two for each thread are under way or
wait; the first error that was raised is raised here, after all threads have ended. A request that
never ends keeps no process alive: the threads are daemons, which those of an executor are not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Generic, TypeVar

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
    workers = _Workers(function, threads)
    running = [workers.begin(item) for item in islice(waiting, 2 * threads)]
    try:
        while running:
            done = running.pop(0).result()
            running.extend(workers.begin(item) for item in islice(waiting, 1))
            yield done
    finally:
        for future in running:
            future.cancel()
        workers.end()


class _Workers(Generic[_Item, _Result]):
    """Daemon threads, begun as there is work for them."""

    def __init__(self, function: Callable[[_Item], _Result], count_max: int) -> None:
        self._function = function
        self._count_max = count_max
        self._work: queue.SimpleQueue[tuple[_Item, Future[_Result]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self, item: _Item) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._work.put((item, future))
        if len(self._threads) < self._count_max:
            thread = threading.Thread(target=self._run, name="stepfast-store", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def end(self) -> None:
        """Return when all of them have ended."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            item, future = given
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._function(item))
            except BaseException as error:  # noqa: BLE001 - whoever asks raises it
                future.set_exception(error)
