"""Lines for a person, written by a thread of their own: a console that nobody reads blocks nobody.

Owns: the queue and the thread. Does not own: what is said; the files have everything anyway.
Invariants: lines leave in the order in which they were given; what does not fit is dropped and
counted.
"""

from __future__ import annotations

import queue
import threading
from typing import IO

_LINES_MAX = 10_000  # a reader that is so far behind misses lines; too many would cost memory
_FLUSH_LIMIT_S = 1.0


class LineWriter:
    """Writes to one stream; safe from any thread."""

    def __init__(self, stream: IO[str]) -> None:
        """Start the thread; it ends with the process."""
        self._stream = stream
        self._queue: queue.Queue[str] = queue.Queue(_LINES_MAX)
        self._dropped = 0
        self._idle = threading.Condition()
        self._pending = 0
        threading.Thread(target=self._run, name="stepfast-lines", daemon=True).start()

    def write(self, text: str) -> None:
        """Queue text; never waits."""
        try:
            with self._idle:
                self._queue.put_nowait(text)
                self._pending += 1
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until everything queued is written, within a limit."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0, _FLUSH_LIMIT_S)

    def _run(self) -> None:
        while True:
            text = self._queue.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text = f"[stepfast] {dropped} lines are left out here\n{text}"
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads any more
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
