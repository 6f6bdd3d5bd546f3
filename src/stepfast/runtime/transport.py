"""The agent's end of the WebSocket to the coordinator.

Owns: connecting with retries, framing, the outbox while the connection is away. Does not own: what
is said (`core.node`). Invariants: messages leave in the order in which they were given; what is not
of the protocol ends the connection and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)

from stepfast.core.messages import MESSAGE_BYTES_MAX, FromAgent, FromCoordinator
from stepfast.errors import ConfigError, OperatingError
from stepfast.runtime.wire import AGENT_TO_COORDINATOR, COORDINATOR_TO_AGENT

_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # between tries; the last one repeats
_CONNECT_LIMIT_S = 5.0  # one try: a port that listens and never answers ends it
_OUTBOX_MESSAGES_MAX = 20_000  # while away; older ones go first, for levels are said again
_UNHEARD_LIMIT_S = 10.0  # what the other end's machine has not acknowledged by then ends it
CLOSE_REFUSED = 4003  # the coordinator will not have this agent, whatever it tries
_FORBIDDEN = 403  # ... or not even talk to it


class CoordinatorLink:
    """Keeps one connection to the coordinator, in the running event loop."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str | None,
        on_connected: Callable[[], None],
        on_message: Callable[[FromCoordinator], None],
        on_lost: Callable[[], None],
        before_joining: Callable[[], Awaitable[None]] | None = None,
        unheard_limit_s: float = _UNHEARD_LIMIT_S,
    ) -> None:
        """Callbacks run in the loop; `on_connected` before anything else is sent.

        `before_joining` is awaited before the first connection, and again whenever one has ended;
        what it raises ends `keep`. `unheard_limit_s`: a machine that is gone does not say so, and
        its answer is missed first.
        """
        self._host, self._port = address
        self._token = token
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_lost = on_lost
        self._before_joining = before_joining
        self._unheard_limit_s = unheard_limit_s
        self._has_heard = False  # a message of the protocol, at any time
        self._has_ended = False  # a connection stood, and what is before the next one is due
        self._outbox: deque[bytes] = deque(maxlen=_OUTBOX_MESSAGES_MAX)
        self._pending = asyncio.Event()
        self._drained = asyncio.Event()
        self.is_connected = False

    def send(self, message: FromAgent) -> None:
        """Queue a message; it leaves now, or when the connection stands again."""
        self._outbox.append(AGENT_TO_COORDINATOR.encode(message))
        self._drained.clear()
        self._pending.set()

    async def drain(self, limit_s: float) -> None:
        """Wait until everything queued has left, or the limit."""
        if not self._outbox:
            return
        try:
            await asyncio.wait_for(self._drained.wait(), limit_s)
        except TimeoutError:
            return

    async def keep(self, limit_s: float) -> None:
        """Connect, and again when the connection ends, for ever.

        Raises OperatingError where no first connection stands within `limit_s`, and ConfigError
        where the coordinator refuses this agent.
        """
        tries = 0
        await self._prepare()
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            try:
                await self._converse()
                tries = 0
            except ConnectionClosed as closed:
                if closed.rcvd is not None and closed.rcvd.code == CLOSE_REFUSED:
                    raise _refused(closed.rcvd.reason) from closed
                tries = 0
            except (OSError, TimeoutError, WebSocketException) as error:
                if isinstance(error, InvalidStatus) and error.response.status_code == _FORBIDDEN:
                    raise _refused("wrong or missing token") from error
                if not self._has_heard and asyncio.get_running_loop().time() > deadline:
                    raise OperatingError(
                        f"no coordinator at {self._where()} within {limit_s:g} s: {error!r}"
                    ) from error
                tries += 1
            if self._has_ended:
                self._has_ended = False
                await self._prepare()
            await asyncio.sleep(_BACKOFF_S[min(tries, len(_BACKOFF_S) - 1)])

    async def _prepare(self) -> None:
        if self._before_joining is not None:
            await self._before_joining()

    async def tell_once(self, message: FromAgent, limit_s: float) -> bool:
        """Over a connection of its own, say this and nothing else; whether it left in time. Nobody
        may talk by `keep` meanwhile.
        """
        data = AGENT_TO_COORDINATOR.encode(message)
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        async with self._connection() as connection:
                            await connection.send(data)
                            await connection.wait_closed()  # the coordinator does, when it has it
                        return True
                    except (OSError, TimeoutError, WebSocketException):
                        await asyncio.sleep(_BACKOFF_S[-2])
        except TimeoutError:
            return False

    def _connection(self) -> connect:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        host = f"[{self._host}]" if ":" in self._host else self._host
        return connect(
            f"ws://{host}:{self._port}/agent",
            additional_headers=headers,
            open_timeout=_CONNECT_LIMIT_S,
            close_timeout=1.0,
            ping_interval=None,
            max_size=MESSAGE_BYTES_MAX,
            compression=None,
            proxy=None,
        )

    async def _converse(self) -> None:
        async with self._connection() as connection:
            _end_when_unheard(connection, self._unheard_limit_s)
            # levels of before are said anew by the hello and the report after it
            self._outbox.clear()
            self.is_connected = True
            self._on_connected()
            writing = asyncio.create_task(self._write(connection))
            try:
                async for data in connection:
                    if isinstance(data, bytes):
                        self._on_message(self._decoded(data))
                await connection.recv()  # the iteration ends quietly; this names the close
            finally:
                writing.cancel()
                self.is_connected = False
                self._has_ended = True
                self._on_lost()

    def _decoded(self, data: bytes) -> FromCoordinator:
        try:
            message = COORDINATOR_TO_AGENT.decode(data)
        except OperatingError as error:
            raise InvalidMessage(str(error)) from error
        self._has_heard = True
        return message

    async def _write(self, connection: ClientConnection) -> None:
        while True:
            while self._outbox:
                await connection.send(self._outbox[0])
                self._outbox.popleft()
            self._drained.set()
            self._pending.clear()
            await self._pending.wait()

    def _where(self) -> str:
        """Host, port and what the host resolves to: the first thing one needs to know."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses = ", ".join(sorted({str(info[4][0]) for info in found}))
        except OSError as error:
            addresses = f"does not resolve: {error.strerror}"
        return f"{self._host}:{self._port} ({addresses})"


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"the coordinator refuses this agent: {reason}")


def _end_when_unheard(connection: ClientConnection, limit_s: float) -> None:
    """Otherwise the kernel goes on sending for a quarter of an hour, and a coordinator that came
    back at another place is not looked for.
    """
    found: socket.socket = connection.transport.get_extra_info("socket")
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))
