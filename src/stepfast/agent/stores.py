"""Keeps one store process: made when a store is asked for, made again after it died.

Owns: the store process and the requests to it. Does not own: which generation uses which port.

Invariant: a request gets a port or fails with OperatingError within its time; a store that does not
answer is killed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from stepfast.agent.channel import Channel
from stepfast.agent.sweeper import Child, ProcessEnd, reap
from stepfast.errors import OperatingError
from stepfast.runtime import spawning
from stepfast.runtime.descendants import try_signal

OPEN_TIMEOUT_S: Final = 10.0


class StoreKeeper:
    """One store process at a time. `fork` makes a child from a request and a socket end, in so many
    seconds."""

    def __init__(
        self,
        *,
        fork: Callable[[spawning.ToZygote, int, float], Awaitable[Child]],
        next_request: Callable[[str], tuple[int, str]],
        log_path: Path,
        on_end: Callable[[int, ProcessEnd], None],
    ) -> None:
        self._fork = fork
        self._next_request = next_request
        self._log_path = log_path
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._child: Child | None = None
        self._channel: Channel | None = None

    @property
    def child(self) -> Child | None:
        """The present store process."""
        return self._child

    async def open(self, host: str, timeout_s: float) -> int:
        """A fresh server on `host`; its port. Raises OperatingError, and may then be tried
        again."""
        async with self._lock:
            child, channel = await self._living(timeout_s)
            request_id, _ = self._next_request("store")
            request = spawning.OpenStore(request_id=request_id, host=host)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await channel.request(request_id, request)
            except TimeoutError as error:
                try_signal(child.id, signal.SIGKILL)
                raise OperatingError(
                    f"the store did not answer within {timeout_s:g} s and was killed"
                ) from error
            assert isinstance(answer, spawning.StoreOpened), f"unexpected {answer!r}"
            return answer.port

    def close(self) -> None:
        """Close the socket, which ends the process; its end is still reported."""
        if self._channel is not None:
            self._channel.close()

    async def _living(self, timeout_s: float) -> tuple[Child, Channel]:
        if self._child is not None and self._channel is not None:
            return self._child, self._channel
        ours, theirs = spawning.socket_pair()
        request_id, tag = self._next_request("store")
        request = spawning.ForkStore(request_id=request_id, tag=tag, log_path=str(self._log_path))
        try:
            with theirs:
                child = await self._fork(request, theirs.fileno(), timeout_s)
        except BaseException:
            ours.close()
            raise
        channel = Channel(ours, on_message=lambda message: None)
        self._child, self._channel = child, channel
        self._loop.add_reader(child.pidfd, self._ended, child)
        return child, channel

    def _ended(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        end = reap(child)
        if self._channel is not None:
            self._channel.close("the store process ended; the next request makes a new one")
        self._child = self._channel = None
        self._on_end(child.id.pid, end)
