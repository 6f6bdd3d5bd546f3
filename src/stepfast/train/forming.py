"""Work that may block in C, done by a helper thread while the main thread stays interruptible.

Owns: the helper's life, and leaving it behind.
Does not own: what the helper does (`train.groups`), the cut that wakes it (`train.abort`).

A peer that is stopped in the middle of Gloo's connect keeps this side in C for longer than any time
limit, whatever is shut. Such a helper is abandoned: its thread ends as soon as it comes back to
Python, its connections and its store are never used again, and there may be a few of them only.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from stepfast.errors import Interrupted, OperatingError
from stepfast.train.abort import Connections

POLL_S = 0.01
"""How long `leaving` may go unasked; a cut and the end of the work wake the main thread at once."""
LEAVE_LIMIT_S = 0.3
"""How long the main thread waits for a helper whose connections it cut. Too small abandons threads
that would have ended, too big delays a recovery behind one that never will; a cut wakes in 20 ms.
"""
_RETURN_LIMIT_S = 0.05


class Helper:
    """One thread that does one piece of work."""

    def __init__(self, work: Callable[[], None], connections: Connections) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._connections = connections
        self._done = threading.Event()
        self._returning = threading.Lock()
        self._has_returned = False
        self._thread = threading.Thread(target=self._run, name="stepfast-forming", daemon=True)

    @property
    def is_done(self) -> bool:
        """Whether the thread has left the work."""
        return self._done.is_set()

    def run(self, leaving: Callable[[], bool], limit_s: float) -> None:
        """Does the work; the calling thread stays interruptible.

        Raises Interrupted if `leaving` says so or the connections were cut, OperatingError if the
        work failed or took longer than `limit_s`. The work may then still go on: see `leave`.
        """
        self._connections.changed.clear()
        self._thread.start()
        deadline_s = time.monotonic() + limit_s
        while not self.is_done:
            if self._connections.is_cut or leaving():
                raise Interrupted("the generation ended while its groups were formed")
            if time.monotonic() > deadline_s:
                raise OperatingError(f"process groups were not formed within {limit_s:g} s")
            self._connections.changed.wait(POLL_S)
        if self._connections.is_cut:
            raise Interrupted("the generation ended while its groups were formed")
        if self.error is not None:
            raise OperatingError(f"forming process groups failed: {self.error}") from self.error

    def leave(self) -> bool:
        """Wakes the work and waits for its end, both within limits; says whether it ended."""
        deadline_s = time.monotonic() + LEAVE_LIMIT_S
        while not self.is_done and time.monotonic() < deadline_s:
            self._connections.cut()  # again and again: it may just be making connections
            self._done.wait(POLL_S)
        return self.is_done or self._abandon()

    def cut_again(self) -> None:
        """Shuts what an abandoned helper has connected since."""
        self._connections.cut()

    def _abandon(self) -> bool:
        # Once back in Python it would register its group with torch, in the midst of a later
        # generation. An exception set from outside is seen before the next call; this thread runs
        # no code of the user's and no callback that could swallow it.
        with self._returning:
            if not self._has_returned:
                self._raise_in_thread()
        return self._done.wait(_RETURN_LIMIT_S)

    def _raise_in_thread(self) -> None:
        thread_id = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(Interrupted))

    def _run(self) -> None:
        try:
            try:
                self._work()
            finally:
                with self._returning:  # from here on no exception comes from outside
                    self._has_returned = True
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            # Without its frames, which would keep half-made groups alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.error = error
        self._done.set()
        self._connections.changed.set()
