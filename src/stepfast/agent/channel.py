"""The agent's end of a socket to its zygote or store: requests with answers, and whatever comes
unasked.

Owns: one socket in the event loop. Does not own: the process behind it.

Invariant: every request is answered once: with the peer's message, or with OperatingError when the
peer is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from stepfast.errors import OperatingError
from stepfast.runtime import spawning


class Channel:
    """Requests over one SEQPACKET socket. `on_message` gets what nobody waits for, `on_end` the
    peer's close."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[spawning.Message], None],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: dict[int, asyncio.Future[spawning.Message]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)

    async def request(
        self, request_id: int, message: spawning.Message, descriptors: tuple[int, ...] = ()
    ) -> spawning.Message:
        """Send and wait for the answer; raises OperatingError where it is refused or the peer goes
        away."""
        if self._socket.fileno() < 0:
            raise OperatingError(
                f"{type(message).__name__}: the process that should answer is gone"
            )
        answer: asyncio.Future[spawning.Message] = self._loop.create_future()
        self._waiting[request_id] = answer
        try:
            spawning.send(self._socket, message, descriptors)
            reply = await answer
        finally:
            self._waiting.pop(request_id, None)
        if isinstance(reply, spawning.Refused):
            raise OperatingError(reply.reason)
        return reply

    def close(self, reason: str = "closed") -> None:
        """Close the socket and fail what waits; twice is the same as once."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(OperatingError(reason))

    def _read(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                received = spawning.receive(self._socket)
            except BlockingIOError:
                return
            if received is None:
                self.close("the process at the other end of the socket is gone")
                self._on_end()
                return
            message, descriptors = received
            for descriptor in descriptors:
                os.close(descriptor)
            self._deliver(message)

    def _deliver(self, message: spawning.Message) -> None:
        answer = self._waiting.get(getattr(message, "request_id", -1))
        if answer is not None and not answer.done():
            answer.set_result(message)
        else:
            self._on_message(message)
