"""Connections whose other end has not shown who it is: bounded in number and in time.

Owns: how long a connection may stay unknown, and how many may. Does not own: who is admitted
(`coordinator.server`).

Invariants: whatever anybody sends, or does not send, takes a bounded number of descriptors, each
for a bounded time; an agent that comes while strangers hold all of them gets in.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE_S: Final = 10.0  # to ask for something and to say who one is; an agent takes milliseconds
STRANGERS_MAX: Final = 128  # beside one for each node: all agents may come at the same moment
Client = tuple[str, int]


class Strangers:
    """The unknown connections, the oldest first. In the event loop."""

    def __init__(self, nodes: int) -> None:
        """`nodes`: so many agents are expected."""
        self._limit = STRANGERS_MAX + nodes
        self._unknown: dict[Client, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def came(self, transport: asyncio.Transport) -> None:
        """Somebody connected; where there are too many, the oldest one makes room."""
        if len(self._unknown) >= self._limit:
            self._make_room()
        client = _client_of(transport)
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._drop, client, transport)
        self._unknown[client] = (transport, timer)

    def admit(self, client: Client) -> None:
        """It has shown who it is, and may stay as long as it likes."""
        if (found := self._unknown.pop(client, None)) is not None:
            found[1].cancel()

    def protocol(self) -> type[H11Protocol]:
        """The HTTP protocol that tells of each connection; WebSockets begin as HTTP too."""
        strangers = self

        class Watched(H11Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport), "TCP goes both ways"
                strangers.came(transport)
                super().connection_made(transport)

        return Watched

    def _make_room(self) -> None:
        left = [c for c, (transport, _) in self._unknown.items() if transport.is_closing()]
        for client in left or list(self._unknown)[:1]:
            transport, timer = self._unknown.pop(client)
            timer.cancel()
            transport.abort()

    def _drop(self, client: Client, transport: asyncio.Transport) -> None:
        # A port may be another one's by now.
        if client in self._unknown and self._unknown[client][0] is transport:
            del self._unknown[client]
        transport.abort()


def _client_of(transport: asyncio.Transport) -> Client:
    host, port = transport.get_extra_info("peername")[:2]
    return str(host), int(port)
