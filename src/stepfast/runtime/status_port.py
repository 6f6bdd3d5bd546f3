"""A small HTTP server in a thread of its own: how this process is doing, to whoever may ask.

Owns: the listening socket, connections, HTTP as far as a probe and Prometheus speak it. Does not
own: what a page says, which is asked in this thread and must neither wait nor change anything.

Invariants: the process's own event loop never waits for a client, and answers are given while it
hangs; whatever clients do takes a bounded number of descriptors, each for a bounded time and with a
bounded memory, and a newcomer gets in while others hold every place.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

PATIENCE_S: Final = 5.0  # from the connection to the last byte of the answer
CONNECTIONS_MAX: Final = 32  # then the oldest one makes room
REQUEST_BYTES_MAX: Final = 8192  # of the request's head; a body is never read
_ACCEPTED_AT_ONCE: Final = 8
_CLOSE_LIMIT_S: Final = 2.0
_END_OF_HEAD: Final = b"\r\n\r\n"
_METHODS: Final = ("GET", "HEAD")
_STUCK_S: Final = 10.0  # an event loop that came by so long ago hangs; it does fifty times a second


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    text: str
    is_ok: bool = True
    content_type: str = "text/plain; charset=utf-8"


def alive(since_s: float) -> Page:
    """What a process says whose event loop last came by so long ago."""
    if since_s <= _STUCK_S:
        return Page("ok\n")
    return Page(f"the event loop has not turned for {since_s:.0f} s\n", is_ok=False)


class StatusPort:
    """Serves `pages` at a socket that listens, from `start` to `close`."""

    def __init__(self, listener: socket.socket, pages: Mapping[str, Callable[[], Page]]) -> None:
        """`pages` by path; each is called in the server's thread, once for each request."""
        self._listener = listener
        self._pages = pages
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="stepfast-status", daemon=True)
        self._connections: dict[_Connection, None] = {}  # the oldest first

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Give the port back. Waits for the thread, but not for any client."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_server(
            lambda: _Connection(self), sock=self._listener, backlog=_ACCEPTED_AT_ONCE
        )
        server = self._loop.run_until_complete(serving)
        self._listener.listen(socket.SOMAXCONN)  # waiting there costs this process nothing
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for connection in list(self._connections):
                connection.abort()
            self._loop.run_until_complete(asyncio.sleep(0))  # what was aborted is closed then
            self._loop.close()

    def came(self, connection: _Connection) -> None:
        """One more; where there are too many, the oldest goes."""
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            self.went(oldest)
            oldest.abort()
        self._connections[connection] = None

    def went(self, connection: _Connection) -> None:
        """One less."""
        self._connections.pop(connection, None)

    def answer_to(self, head: bytes) -> bytes:
        """The whole answer to a request's head."""
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return answer(HTTPStatus.BAD_REQUEST, Page("no HTTP request\n"))
        method, target, _ = words
        if method not in _METHODS:
            return answer(HTTPStatus.METHOD_NOT_ALLOWED, Page("GET or HEAD\n"), "Allow: GET, HEAD")
        make = self._pages.get(target.split("?", 1)[0])
        if make is None:
            return answer(HTTPStatus.NOT_FOUND, Page(f"there is {', '.join(self._pages)}\n"))
        page = make()
        status = HTTPStatus.OK if page.is_ok else HTTPStatus.SERVICE_UNAVAILABLE
        return answer(status, page, has_body=method == "GET")


class _Connection(asyncio.Protocol):
    """One request, one answer, the end."""

    def __init__(self, port: StatusPort) -> None:
        self._port = port
        self._head = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP goes both ways"
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, transport.abort)
        self._port.came(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "data comes over a connection"
        if self._transport.is_closing():
            return
        searched = max(0, len(self._head) - len(_END_OF_HEAD))
        self._head += data[: REQUEST_BYTES_MAX + len(_END_OF_HEAD) - len(self._head)]
        end = self._head.find(_END_OF_HEAD, searched)
        if end >= 0:
            self._transport.write(self._port.answer_to(bytes(self._head[:end])))
            self._transport.close()
        elif len(self._head) > REQUEST_BYTES_MAX:
            too_long = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            self._transport.write(answer(too_long, Page("the request is too long\n")))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._port.went(self)

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()


def answer(status: HTTPStatus, page: Page, *more: str, has_body: bool = True) -> bytes:
    """An HTTP response that ends the connection."""
    body = page.text.encode()
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *more,
    )
    return "\r\n".join(lines).encode() + _END_OF_HEAD + (body if has_body else b"")
