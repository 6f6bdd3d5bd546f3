"""The process's device as NCCL sees it: which communicators there are, their abort, the watchdog.

Owns: aborting together and one by one, errors and who hears of them, the settings of the
environment. Does not own: what a collective is (`works`), a group's threads (`group`).

    one by one   an abort waits for the communicator's own work, which is queued behind that of the
                 others; who aborts a single one while another is stuck waits for ever
    together     between `_group_start` and `_group_end`, or from several threads at once
    a dead peer  is silence: no error, until the time limit
    watchdog     ends the process (SIGABRT) at a time limit or an error, unless configured away
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import ErrorType

from stepfast.train.abort import Connections

if TYPE_CHECKING:
    from fakes.nccl_like.group import NcclLike

WATCHDOG_INTERVAL_S = 0.05
NOTHING, TEAR_DOWN, CLEAN_UP, SKIP_CLEAN_UP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What torch reads from the environment when a group is made."""

    error_handling: int = SKIP_CLEAN_UP
    blocking_wait: bool = False
    monitoring: bool = True
    heartbeat_timeout_s: float = 480.0

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Settings:
        handling = variables.get("NCCL_ASYNC_ERROR_HANDLING", str(SKIP_CLEAN_UP))
        blocking = variables.get("NCCL_BLOCKING_WAIT", "0")
        return cls(
            error_handling=int(variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)),
            blocking_wait=variables.get("TORCH_NCCL_BLOCKING_WAIT", blocking) == "1",
            monitoring=variables.get("TORCH_NCCL_ENABLE_MONITORING", "1") == "1",
            heartbeat_timeout_s=float(variables.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "480")),
        )


class Device:
    """All communicators of this process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: list[NcclLike] = []
        self._connections = Connections()
        self._together = threading.local()
        self._watchdog: threading.Thread | None = None

    def add(self, group: NcclLike) -> Connections:
        """A communicator more; the connections that its abort cuts."""
        with self.changed:
            if not self.groups:
                self._connections = Connections()
            self.groups.append(group)
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, daemon=True)
                self._watchdog.name = "nccl-like-watchdog"
                self._watchdog.start()
            return self._connections

    def remove(self, group: NcclLike) -> None:
        """It is destroyed."""
        with self.changed:
            if group in self.groups:
                self.groups.remove(group)
            if not self.groups:
                self._connections.dissolved.set()

    @property
    def is_any_aborting(self) -> bool:
        return any(group.is_aborting for group in self.groups)

    # --- abort -----------------------------------------------------------------------------------

    def start_together(self) -> None:
        """What this thread aborts from now on is aborted by `end_together`."""
        self._together.groups = []

    def end_together(self) -> None:
        groups, self._together.groups = self._together.groups, None
        self._abort(groups)

    def abort(self, group: NcclLike) -> None:
        """Returns once the communicator's work has ended, which may be never."""
        together = getattr(self._together, "groups", None)
        if together is not None:
            together.append(group)
        else:
            self._abort([group])

    def _abort(self, groups: list[NcclLike]) -> None:
        began_s = time.monotonic()
        with self.changed:
            for group in groups:
                group.is_aborting = True
            self.changed.notify_all()
            while self._is_behind_others():
                self.changed.wait(WATCHDOG_INTERVAL_S)
                beat = groups[0].settings
                if beat.monitoring and time.monotonic() - began_s > beat.heartbeat_timeout_s:
                    kill("the abort hangs, and the monitor misses the watchdog's heartbeat")
            over = all(group.is_aborting for group in self.groups)
        for group in groups:
            group.end_by_abort()
        if over and not self._connections.is_cut:
            self._connections.cut()
            cut = threading.Thread(target=self._connections.keep_cutting, daemon=True)
            cut.start()

    def _is_behind_others(self) -> bool:
        return any(not group.is_aborting and group.is_busy for group in self.groups)

    # --- the watchdog ----------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self.changed:
                if not self.groups:
                    self._watchdog = None
                    return
                self.changed.wait(WATCHDOG_INTERVAL_S)
                groups = [group for group in self.groups if not group.is_aborting]
            for group in groups:
                self._look_at(group)

    def _look_at(self, group: NcclLike) -> None:
        if group.error is ErrorType.SUCCESS and (late := group.overdue()) is not None:
            group.error = ErrorType.TIMEOUT
            group.said = f"Watchdog caught collective operation timeout: {late.name}"
        if group.error is ErrorType.SUCCESS:
            return
        group.is_known_broken = True  # later, and to whoever launches something next
        handling = group.settings.error_handling
        if handling in (TEAR_DOWN, SKIP_CLEAN_UP):
            kill(group.said)
        if handling == CLEAN_UP:
            self._abort([group])


def kill(reason: str) -> None:
    """As an exception that leaves a thread of torch's does."""
    sys.stderr.write(f"nccl_like: {reason}; terminating the process\n")
    sys.stderr.flush()
    os.abort()


DEVICE = Device()
