"""The agent's link to its coordinator: patient with a late one, clear about one that stays away."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from websockets.asyncio.server import ServerConnection, serve

from cluster.harness import free_tcp_port
from stepfast.errors import OperatingError
from stepfast.runtime.transport import CoordinatorLink

LATE_S = 0.5
ONE_TRY_S = 5.0  # a silent port is given up after so long
SLACK_S = 10.0


def link_to(host: str, port: int, connected: asyncio.Event) -> CoordinatorLink:
    return CoordinatorLink(
        (host, port),
        token=None,
        on_connected=connected.set,
        on_message=lambda message: None,
        on_lost=lambda: None,
    )


def failure(host: str, port: int, limit_s: float) -> tuple[str, float]:
    """The error with which connecting gives up, and after how long."""

    async def connect() -> None:
        await link_to(host, port, asyncio.Event()).keep(limit_s)

    began = time.monotonic()
    with pytest.raises(OperatingError) as caught:
        asyncio.run(connect())
    return str(caught.value), time.monotonic() - began


def test_an_unreachable_coordinator_is_named_with_its_addresses():
    port = free_tcp_port()
    message, _ = failure("localhost", port, 0.2)
    assert f"localhost:{port}" in message
    assert "127.0.0.1" in message
    message, _ = failure("no-such-host.invalid", port, 0.2)
    assert f"no-such-host.invalid:{port}" in message
    assert "does not resolve" in message


def test_connecting_retries_refused_and_silent_ports_within_a_bound():
    port = free_tcp_port()

    async def come_late() -> None:
        connected = asyncio.Event()
        keeping = asyncio.create_task(link_to("127.0.0.1", port, connected).keep(30))
        await asyncio.sleep(LATE_S)  # refused meanwhile
        assert not connected.is_set()

        async def listen(connection: ServerConnection) -> None:
            await connection.wait_closed()

        async with serve(listen, "127.0.0.1", port):
            async with asyncio.timeout(SLACK_S):
                await connected.wait()
            keeping.cancel()
            await asyncio.wait({keeping})

    asyncio.run(come_late())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)  # takes connections, and never answers
        _, took_s = failure("127.0.0.1", silent.getsockname()[1], 0.2)
    assert took_s < ONE_TRY_S + SLACK_S
