"""Reaps the zombies that nobody waits for: orphans that a subreaper adopted.

Owns: waiting for adopted processes. Does not own: ranks, store, zygote and other children of the
agent, whose own parents' code waits for them; those it must never reap, or their exit status is
lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from stepfast.runtime.descendants import ProcessId, ProcessTable

PERIOD_S: Final = 1.0
# A zombie this old that nobody expected: whoever started it had its chance to wait for it.
ABANDONED_AFTER_S: Final = 10.0
EXPECTED_MAX: Final = 100_000


class OrphanReaper:
    """Reaps at once what it was told to expect, and everything else after `ABANDONED_AFTER_S`."""

    def __init__(self, is_waited_for: Callable[[int], bool]) -> None:
        self._is_waited_for = is_waited_for
        self._expected: set[ProcessId] = set()
        self._sessions: set[int] = set()
        self._first_seen_s: dict[ProcessId, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look every `PERIOD_S` from now on."""
        self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def expect(self, process: ProcessId) -> None:
        """This process was killed here: reap it as soon as it is a zombie of ours."""
        assert len(self._expected) < EXPECTED_MAX, "killed processes are not reaped"
        self._expected.add(process)

    def expect_session(self, session: int) -> None:
        """What ends in this session was a rank's, and was waited for by nobody but the rank."""
        self._sessions.add(session)

    def reap(self, everything: bool = False) -> None:
        """Reap what may be reaped now, or every zombie that nobody waits for; returns at once."""
        if not _has_zombie():
            return
        now_s = self._loop.time()
        seen: dict[ProcessId, float] = {}
        table = ProcessTable.read()
        for entry in table.children(os.getpid()):
            if not entry.ended or self._is_waited_for(entry.id.pid):
                continue
            seen[entry.id] = self._first_seen_s.get(entry.id, now_s)
            expected = entry.id in self._expected or entry.session in self._sessions
            if everything or expected or now_s - seen[entry.id] > ABANDONED_AFTER_S:
                _reap(entry.id.pid)
        self._first_seen_s = seen
        self._expected = {process for process in self._expected if table.same(process)}

    def _tick(self) -> None:
        self.reap()
        self.start()


def _has_zombie() -> bool:
    """Whether any child has ended and is not reaped: one cheap look, without a walk."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        # Somebody was faster.
        pass
