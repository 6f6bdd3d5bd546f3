"""Keeps one zygote alive: starts it, learns from it, starts it again when it ends.

Owns: the zygote process and the requests to it. Does not own: the processes that it makes
(`agent.processes`).

Invariants: a request either gets its answer or fails with OperatingError within its time, and a
zygote that does not answer is killed. The zygote is a separate executable that is started by name:
torch never enters the agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stepfast.agent.channel import Channel
from stepfast.errors import OperatingError
from stepfast.runtime import spawning
from stepfast.runtime.disk import open_own

RESTARTS_IN_A_ROW_MAX: Final = 8
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
REAP_LIMIT_S: Final = 1.0
# Served this long, a zygote is a good one, and its next end is the first in a row again.
GOOD_AFTER_S: Final = 60.0
# glibc copies what is longer than this past the processor's caches, which takes half the time and
# leaves the training what it has in them; by itself it does so only from a size that virtual
# machines overstate by far. It is read once, when a process begins.
COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
# The second end in a row before it was ready: an import kills it, so the next one loads torch and
# nothing else.
BARE_AFTER_EARLY_ENDS: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnd:
    """A zygote ended on its own. `restart_in_s` is None where it is not started again."""

    pid: int
    status: int
    restart_in_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteCallbacks:
    """What the keeper reports. `on_unclaimed` gets an answer whose asker has gone away."""

    on_ready: Callable[[spawning.Ready], None]
    on_note: Callable[[spawning.PreloadNote], None]
    on_end: Callable[[ZygoteEnd], None]
    on_unclaimed: Callable[[spawning.Message], None]


class ZygoteKeeper:
    """One zygote at a time, in the running event loop."""

    def __init__(
        self,
        *,
        script: str,
        preload_names: Sequence[str],
        node_tag: str,
        log_path: Path,
        callbacks: ZygoteCallbacks,
    ) -> None:
        self._plan = spawning.PreloadPlan(
            agent_pid=os.getpid(), script=script, names=list(preload_names)
        )
        self._node_tag = node_tag
        self._log_path = log_path
        self._callbacks = callbacks
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._process_pidfd = -1
        self._channel: Channel | None = None
        self._ready = asyncio.Event()
        self._ready_at_s: float | None = None
        self._ends_in_a_row = 0
        self._early_ends = 0
        self._restart: asyncio.TimerHandle | None = None
        self._closed = ""

    @property
    def pid(self) -> int | None:
        """The present zygote's pid."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a zygote; raises OperatingError where the process cannot be made."""
        ours, theirs = spawning.socket_pair()
        plan_descriptor = os.memfd_create("stepfast-preload")
        try:
            spawning.write_plan(plan_descriptor, self._next_plan())
            self._process = self._execute(theirs.fileno(), plan_descriptor)
        except OSError as error:
            ours.close()
            raise OperatingError(f"the zygote could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(plan_descriptor)
        self._channel = Channel(ours, on_message=self._receive)
        self._process_pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._process_pidfd, self._reap)

    def _next_plan(self) -> spawning.PreloadPlan:
        if self._early_ends < BARE_AFTER_EARLY_ENDS:
            return self._plan
        return msgspec.structs.replace(self._plan, script="", names=[], learned=[])

    def _execute(self, control_descriptor: int, plan_descriptor: int) -> subprocess.Popen[bytes]:
        # The placeholder for the tag has to be there from the exec on: ranks write theirs over it.
        environment = COPIES | os.environ
        environment[spawning.TAG_VARIABLE] = spawning.make_tag(self._node_tag, "zygote")
        with open(open_own(self._log_path, os.O_WRONLY | os.O_APPEND), "ab") as log:
            return subprocess.Popen(
                spawning.zygote_command(control_descriptor, plan_descriptor),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(control_descriptor, plan_descriptor),
                start_new_session=True,
            )

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the zygote serves; raises OperatingError where it does not in time, or never
        will."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError as error:
            raise OperatingError(
                f"the zygote is not ready after {timeout_s:g} s; see {self._log_path}"
            ) from error
        if self._closed:
            raise OperatingError(self._closed)

    async def fork(
        self, message: spawning.ToZygote, descriptor: int, timeout_s: float
    ) -> spawning.Forked:
        """Have a process made; raises OperatingError where that fails or takes longer than
        `timeout_s`."""
        deadline_s = self._loop.time() + timeout_s
        await self.wait_ready(timeout_s)
        assert self._channel is not None
        process = self._process
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await self._channel.request(message.request_id, message, (descriptor,))
        except TimeoutError as error:
            # From now on requests wait for the next one, not only once this one's end is noticed.
            self._ready.clear()
            self._kill(process)
            raise OperatingError(
                f"the zygote did not fork within {timeout_s:g} s and was killed"
            ) from error
        assert isinstance(answer, spawning.Forked), f"unexpected {answer!r}"
        return answer

    def close(self) -> None:
        """Kill the zygote and keep it dead; twice is the same as once."""
        self._closed = "the node's processes are closed"
        self._ready.set()
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            self._kill(self._process)
            self._forget(self._closed)

    def _kill(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.send_signal(signal.SIGKILL)

    def _receive(self, message: spawning.Message) -> None:
        match message:
            case spawning.Ready():
                # The next zygote starts with what this one found out.
                self._plan = msgspec.structs.replace(
                    self._plan, learned=message.learned, excluded=message.excluded
                )
                self._early_ends = 0
                self._ready_at_s = self._loop.time()
                self._ready.set()
                self._callbacks.on_ready(message)
            case spawning.PreloadNote():
                self._callbacks.on_note(message)
            case _:
                self._callbacks.on_unclaimed(message)

    def _forget(self, reason: str) -> int:
        """Reap the process, which has ended or is about to; its exit status."""
        assert self._process is not None and self._channel is not None
        self._loop.remove_reader(self._process_pidfd)
        os.close(self._process_pidfd)
        try:
            status = self._process.wait(REAP_LIMIT_S)
        except subprocess.TimeoutExpired:
            # In uninterruptible sleep: whoever closes the node reports it.
            status = -signal.SIGKILL
        self._process = None
        self._channel.close(reason)
        return status

    def _reap(self) -> None:
        """The zygote ended on its own: fail what waits, report, start the next one after a
        while."""
        assert self._process is not None
        pid = self._process.pid
        served_s = 0.0 if self._ready_at_s is None else self._loop.time() - self._ready_at_s
        self._early_ends += self._ready_at_s is None
        self._ready_at_s = None
        self._ready.clear()
        status = self._forget("the zygote ended; a new one is on its way")
        self._ends_in_a_row = 1 if served_s > GOOD_AFTER_S else self._ends_in_a_row + 1
        backoff_s: float | None = None
        if self._ends_in_a_row <= RESTARTS_IN_A_ROW_MAX:
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (self._ends_in_a_row - 1))
            self._restart = self._loop.call_later(backoff_s, self._start_again)
        else:
            self._give_up()
        self._callbacks.on_end(ZygoteEnd(pid=pid, status=status, restart_in_s=backoff_s))

    def _start_again(self) -> None:
        try:
            self.start()
        except OperatingError:
            # Out of memory or processes: the same as a zygote that ends at once.
            self._ends_in_a_row += 1
            if self._ends_in_a_row <= RESTARTS_IN_A_ROW_MAX:
                self._restart = self._loop.call_later(BACKOFF_MAX_S, self._start_again)
            else:
                self._give_up()

    def _give_up(self) -> None:
        self._closed = (
            f"the zygote ended {self._ends_in_a_row} times in a row; see {self._log_path}"
        )
        self._ready.set()
