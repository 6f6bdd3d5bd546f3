"""The agent's link to its coordinator: patient with a late one, clear about one that stays away."""

from __future__ import annotations

import asyncio
import ctypes
import random
import socket
import struct
import time
from collections.abc import Callable

import pytest
from websockets.asyncio.server import ServerConnection, serve

from cluster.harness import free_tcp_port
from stepfast.core.messages import MESSAGE_BYTES_MAX, FromCoordinator, Heartbeat, ProbeRanks
from stepfast.core.terms import Generation, NodeId
from stepfast.errors import OperatingError
from stepfast.runtime.transport import CoordinatorLink
from stepfast.runtime.wire import COORDINATOR_TO_AGENT

LATE_S = 0.5
ONE_TRY_S = 5.0  # a silent port is given up after so long
SLACK_S = 10.0
SO_ATTACH_FILTER = 26  # Linux; Python has no name for it


def link_to(
    host: str,
    port: int,
    connected: asyncio.Event,
    *,
    on_message: Callable[[FromCoordinator], None] = lambda message: None,
    on_lost: Callable[[], None] = lambda: None,
    unheard_limit_s: float = 10.0,
) -> CoordinatorLink:
    return CoordinatorLink(
        (host, port),
        token=None,
        on_connected=connected.set,
        on_message=on_message,
        on_lost=on_lost,
        unheard_limit_s=unheard_limit_s,
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


class Names(asyncio.SelectorEventLoop):
    """A loop whose resolver answers as told, one answer for each look-up, the last one for ever."""

    def __init__(self, *answers: str | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.looked_up: list[str | None] = []

    async def getaddrinfo(self, host, port, **more):
        if host != "job-coord-0-0.job":
            return await super().getaddrinfo(host, port, **more)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.looked_up.append(answer)
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (answer, port))]


def test_a_name_is_looked_up_at_each_try_and_a_coordinator_that_moved_is_found():
    """As in a cluster: no such name yet, then the address of a pod that is gone, then its own."""
    loop = Names(None, None, "127.0.0.2", "127.0.0.1")
    port = free_tcp_port()

    async def listen(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def move() -> None:
        connected = asyncio.Event()
        link = link_to("job-coord-0-0.job", port, connected)
        async with serve(listen, "127.0.0.1", port, close_timeout=0.2):
            keeping = asyncio.create_task(link.keep(SLACK_S))
            async with asyncio.timeout(SLACK_S):
                await connected.wait()
            assert loop.looked_up == [None, None, "127.0.0.2", "127.0.0.1"]
            connected.clear()
        loop.answers = ["127.0.0.1", "127.0.0.3"]  # for a moment the old one, as DNS has it
        async with serve(listen, "127.0.0.3", port, close_timeout=0.2):
            async with asyncio.timeout(SLACK_S):
                await connected.wait()
            keeping.cancel()
            await asyncio.wait({keeping})
        assert set(loop.looked_up[4:]) == {"127.0.0.1", "127.0.0.3"}

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(move())


PROBE = COORDINATOR_TO_AGENT.encode(ProbeRanks(probe=1, generation=Generation(1)))


def test_what_is_not_of_the_protocol_ends_the_connection_and_not_the_agent():
    """Whatever answers at the coordinator's address; the real one is heard when it is back."""
    chance = random.Random(1)
    garbage = [chance.randbytes(40), b"", PROBE[:-1], PROBE + b"x", bytes(MESSAGE_BYTES_MAX + 1)]

    async def talk() -> None:
        heard: asyncio.Queue[FromCoordinator] = asyncio.Queue()
        lost: list[None] = []

        async def answer(connection: ServerConnection) -> None:
            if garbage:
                await connection.send(garbage.pop())
            else:
                await connection.send(PROBE)
            await connection.wait_closed()

        async with serve(answer, "127.0.0.1", 0, close_timeout=0.2) as server:
            port = server.sockets[0].getsockname()[1]
            link = link_to(
                "127.0.0.1",
                port,
                asyncio.Event(),
                on_message=heard.put_nowait,
                on_lost=lambda: lost.append(None),
            )
            keeping = asyncio.create_task(link.keep(SLACK_S))
            async with asyncio.timeout(SLACK_S):
                assert isinstance(await heard.get(), ProbeRanks)
            assert len(lost) == 5, "each of them ended a connection"
            keeping.cancel()
            await asyncio.wait({keeping})

    asyncio.run(talk())


def test_a_coordinator_that_never_makes_sense_is_given_up():
    async def talk() -> None:
        async def answer(connection: ServerConnection) -> None:
            await connection.send(b"nonsense")
            await connection.wait_closed()

        async with serve(answer, "127.0.0.1", 0, close_timeout=0.2) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(OperatingError, match=f"127.0.0.1:{port}"):
                await link_to("127.0.0.1", port, asyncio.Event()).keep(0.3)

    asyncio.run(talk())


def drop_what_arrives(sock: socket.socket) -> None:
    """From now on nothing reaches this socket, and nobody is told: its machine lost its power."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    filtering = struct.pack("HL", 1, ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filtering)


def test_a_coordinator_whose_machine_is_gone_is_missed_and_looked_for_again():
    async def talk() -> None:
        calls: asyncio.Queue[ServerConnection] = asyncio.Queue()
        lost = asyncio.Event()

        async def answer(connection: ServerConnection) -> None:
            calls.put_nowait(connection)
            await connection.wait_closed()

        async with serve(answer, "127.0.0.1", 0, close_timeout=0.2) as server:
            port = server.sockets[0].getsockname()[1]
            link = link_to(
                "127.0.0.1", port, asyncio.Event(), on_lost=lost.set, unheard_limit_s=0.5
            )
            keeping = asyncio.create_task(link.keep(SLACK_S))
            async with asyncio.timeout(SLACK_S):
                first = await calls.get()
                gone = first.transport.get_extra_info("socket")
                drop_what_arrives(gone._sock)  # asyncio hides what may not be done to it
                while not lost.is_set():
                    link.send(Heartbeat(node=NodeId(0), steps={}))
                    await asyncio.sleep(0.05)
                await calls.get()
            keeping.cancel()
            await asyncio.wait({keeping})

    asyncio.run(talk())
