"""Kills what belongs to a process that ended or must end, until a walk finds nothing more.

Owns: ending descendants and reaping the orphans among them. Does not own: when (`agent.processes`).

Invariants: only descendants of this process are touched, it being a subreaper; a process that
somebody here waits for (`is_own`) dies only by name, never as somebody else's descendant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from typing import Final

from stepfast.agent.orphans import OrphanReaper
from stepfast.runtime.descendants import (
    ProcessEntry,
    ProcessId,
    ProcessTable,
    belonging_to,
    try_signal,
)

ROUNDS_MAX: Final = 8
FIRST_PAUSE_S: Final = 0.01
KILL_LIMIT_S: Final = 2.0
KILL_PAUSE_S: Final = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that the zygote made for this node. The pidfd is closed when it is reaped."""

    id: ProcessId
    tag: str
    pidfd: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a process ended: by exit or by signal. `detected_at_s` is on the monotonic clock."""

    exit_code: int | None
    signal: int | None
    detected_at_s: float


def reap(child: Child) -> ProcessEnd:
    """The end of a child whose pidfd is readable; closes the pidfd, which is in no loop any
    more."""
    detected_at_s = asyncio.get_running_loop().time()
    result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
    os.close(child.pidfd)
    assert result is not None
    exited = result.si_code == os.CLD_EXITED
    return ProcessEnd(
        exit_code=result.si_status if exited else None,
        signal=None if exited else result.si_status,
        detected_at_s=detected_at_s,
    )


class Sweeper:
    """Ends descendants, in the running event loop."""

    def __init__(
        self, *, is_own: Callable[[int], bool], on_stuck: Callable[[list[ProcessEntry]], None]
    ) -> None:
        self._is_own = is_own
        self._on_stuck = on_stuck
        self._loop = asyncio.get_running_loop()
        self._orphans = OrphanReaper(is_own)

    def start(self) -> None:
        """Reap orphans from now on."""
        self._orphans.start()

    def kill(self, process: ProcessId) -> None:
        """SIGKILL one process, and reap it if it is an orphan."""
        try_signal(process, signal.SIGKILL)
        self._orphans.expect(process)

    def kill_all_of(self, child: Child) -> list[ProcessEntry]:
        """Kill what belongs to `child` now: tree, session and tag, all found before the first
        kill."""
        table = ProcessTable.read()
        left = belonging_to(table, [child.id], (child.tag,), below_pid=os.getpid())
        left = [entry for entry in left if entry.id == child.id or not self._is_own(entry.id.pid)]
        self._orphans.expect_session(child.id.pid)
        for entry in left:
            self.kill(entry.id)
        return left

    def sweep(self, child: Child, round_number: int = 0) -> None:
        """Kill what belongs to `child`, again and again: what is forked during a walk is in the
        next one."""
        left = self.kill_all_of(child)
        self._orphans.reap()
        if not left:
            return
        if round_number == ROUNDS_MAX:
            self._on_stuck(left)
            return
        self._loop.call_later(FIRST_PAUSE_S * 2**round_number, self.sweep, child, round_number + 1)

    def sweep_strays(self, node_tag: str, known: Sequence[Child]) -> None:
        """Kill what a dead zygote left: its throw-away child, and a process that it did not tell
        of."""
        table = ProcessTable.read()
        tags = tuple(child.tag for child in known)
        kept = belonging_to(table, [child.id for child in known], tags, os.getpid())
        kept_ids = {entry.id for entry in kept}
        for entry in belonging_to(table, [], (node_tag,), os.getpid()):
            if entry.id not in kept_ids and not self._is_own(entry.id.pid):
                self.kill(entry.id)

    async def end_everything(self, is_told: Callable[[], bool]) -> list[ProcessEntry]:
        """Kill and reap every descendant, and wait until `is_told`; what is left after a limit."""
        deadline_s = self._loop.time() + KILL_LIMIT_S
        while True:
            below = ProcessTable.read().descendants(os.getpid())
            left = [entry for entry in below if not entry.ended]
            for entry in left:
                self.kill(entry.id)
            self._orphans.reap(everything=True)
            if (not below and is_told()) or self._loop.time() > deadline_s:
                self._orphans.stop()
                return left
            # The loop has to turn: it is what notices the ends of ranks and store.
            await asyncio.sleep(KILL_PAUSE_S)
