"""Whoever reaches the coordinator's port: a stranger changes nothing, takes nothing for long."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle  # noqa: TID251 - strangers send them
import random
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

from cluster.harness import STEPFAST, Job
from stepfast.core.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Noted,
    Welcome,
)
from stepfast.core.node_health import HealthReported
from stepfast.core.terms import NodeId, Rank, Step
from stepfast.events import NodeChecked, NodeLeft, Note
from stepfast.runtime.wire import AGENT_TO_COORDINATOR, COORDINATOR_TO_AGENT

TOKEN = "the right one"
PATIENCE_S = 10.0  # an unknown connection is ended after so long
TURNS = 6
DESCRIPTORS = 300  # the coordinator may have so many
UPGRADE = (
    "GET /agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
)


class Port:
    """A coordinator's, and what one may do there."""

    def __init__(self, job: Job, number: int) -> None:
        self.job = job
        self.number = number
        self.opened: list[socket.socket] = []

    def open(self, data: bytes = b"") -> socket.socket:
        """A connection that has sent something."""
        sock = socket.create_connection(("127.0.0.1", self.number), 10)
        self.opened.append(sock)
        with contextlib.suppress(OSError):  # it may be refused before all has left
            sock.sendall(data)
        return sock

    def upgraded(self, *frames: bytes, token: str = TOKEN) -> socket.socket:
        """A WebSocket made by hand, with what follows."""
        head = f"{UPGRADE}Authorization: Bearer {token}\r\n\r\n"
        sock = self.open(head.encode("latin-1"))
        sock.settimeout(0.5)
        with contextlib.suppress(OSError):  # whatever the answer is, or none: the frames follow
            sock.recv(1 << 16)
        with contextlib.suppress(OSError):
            sock.sendall(b"".join(frames))
        return sock

    @contextlib.contextmanager
    def agent(self, node: int) -> Iterator[ClientConnection]:
        """A node that says hello as it should, and was welcomed."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"ws://127.0.0.1:{self.number}/agent"
        with connect(url, additional_headers=headers) as connection:
            connection.send(hello(node, pid=7))
            answer = COORDINATOR_TO_AGENT.decode(connection.recv(10, decode=False))
            assert isinstance(answer, Welcome)
            yield connection

    def is_healthy(self) -> bool:
        """What a probe of the platform finds."""
        url = f"http://127.0.0.1:{self.number}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200

    def descriptors(self) -> int:
        """How many the coordinator has open."""
        return len(os.listdir(f"/proc/{self.job.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """What the coordinator holds."""
        pages = Path(f"/proc/{self.job.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    flags = ("--nodes", 3, "--token-file", tmp_path / "token", "--job-dir", tmp_path / "job")
    limited = ("prlimit", f"--nofile={DESCRIPTORS}")
    with Job(tmp_path, [*limited, *STEPFAST, "coordinator", *flags]) as job:
        found = job.until(lambda: re.search(r"listening on \S+:(\d+)\n", job.console), "it listens")
        assert found is not None
        port = Port(job, int(found[1]))
        yield port
        for sock in port.opened:
            sock.close()
        assert "Traceback" not in job.console and "\nERROR" not in job.console, job.console
        assert len(job.console) < 20_000, "what strangers do writes no endless log"


def hello(node: int, *, protocol: int = PROTOCOL_VERSION, pid: int = 8) -> bytes:
    return AGENT_TO_COORDINATOR.encode(
        Hello(protocol=protocol, node=NodeId(node), host="127.0.0.1", pid=pid)
    )


def unfit(node: int, *, admitted: bool = False) -> bytes:
    """What a node says instead of joining."""
    checked = NodeChecked(
        node=node, occasion="join", verdict="unhealthy", admitted=admitted, seconds=0.1,
        healthy=(), findings=(),
    )  # fmt: skip
    told = HealthReported(protocol=PROTOCOL_VERSION, checked=checked)
    return AGENT_TO_COORDINATOR.encode(told)


def beat(node: int, rank: int) -> bytes:
    return AGENT_TO_COORDINATOR.encode(Heartbeat(node=NodeId(node), steps={Rank(rank): Step(3)}))


def frame(
    payload: bytes, *, kind: int = 2, is_last: bool = True, length: int | None = None
) -> bytes:
    """A masked frame (with a mask of zeros) of the payload; `length`: what it says of itself."""
    said = len(payload) if length is None else length
    return struct.pack(">BBQ4s", kind | 0x80 * is_last, 0x80 | 127, said, bytes(4)) + payload


def still_counts(port: Port, agent: ClientConnection, node: int, word: str) -> None:
    """A node that was there before is heard."""
    noted = Noted(node=NodeId(node), topic="still here", text=word)
    agent.send(AGENT_TO_COORDINATOR.encode(noted))
    port.job.until(lambda: word in [n.text for n in port.job.of_type(Note)], word, 10)


def garbage(port: Port, chance: random.Random) -> Iterator[Callable[[], socket.socket]]:
    """One of everything that somebody may send, each with its connection."""
    payload = pickle.dumps({"os": "system"})
    for size in (1, 100, 5000):
        yield lambda size=size: port.open(chance.randbytes(size))
        yield lambda size=size: port.upgraded(chance.randbytes(size))
        yield lambda size=size: port.upgraded(frame(chance.randbytes(size)))
    yield lambda: port.open(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500))
    yield lambda: port.open(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + bytes(1 << 20))
    yield lambda: port.open(
        b"POST /healthz HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n" + payload
    )
    yield lambda: port.open(b"POST /agent HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
    yield lambda: port.open(b"GET /agent HTTP/1.1\r\nHost: x\r\n\r\n")
    for token in ("", "a wrong one", "x" * 10_000, "\xe9"):
        yield lambda token=token: port.upgraded(frame(hello(1)), token=token)
    yield lambda: port.upgraded(frame(payload))
    yield lambda: port.upgraded(frame(b"hello", kind=1))
    yield lambda: port.upgraded(frame(b"\xff\xfe", kind=1))
    yield lambda: port.upgraded(frame(b"x", length=1 << 62))
    yield lambda: port.upgraded(frame(b"x", length=MESSAGE_BYTES_MAX + 1))
    yield lambda: port.upgraded(frame(hello(1)[:5], is_last=False))
    yield lambda: port.upgraded(*(frame(b"ping", kind=9) for _ in range(2000)))
    yield lambda: port.upgraded(frame(hello(1)[:-1]))
    yield lambda: port.upgraded(frame(beat(1, 1)))
    yield lambda: port.upgraded(frame(hello(1, protocol=PROTOCOL_VERSION + 1)))
    for node in (0, -1, 3, 1 << 62):
        yield lambda node=node: port.upgraded(frame(hello(node)))
    for node, admitted in ((1, True), (3, False), (-1, False)):
        told = unfit(node, admitted=admitted)
        yield lambda told=told: port.upgraded(frame(told))
    yield lambda: port.upgraded(frame(unfit(1)), frame(hello(0)), frame(beat(0, 0)))
    yield lambda: port.upgraded(frame(hello(1)), frame(hello(1)))
    yield lambda: port.upgraded(frame(hello(1)), frame(beat(0, 0)))
    yield lambda: port.upgraded(frame(hello(1)), frame(beat(1, 0)))
    yield lambda: port.upgraded(frame(hello(1)), frame(payload))


def ends(sock: socket.socket, *, is_abrupt: bool) -> None:
    """Both ways to leave; an abrupt one does not read what was answered."""
    if is_abrupt:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        sock.settimeout(0.02)
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)
    sock.close()


def test_garbage_of_every_kind_changes_nothing_and_leaves_nothing(port: Port):
    chance = random.Random(1)
    with port.agent(0) as agent:
        memory = []
        before = port.descriptors()
        for turn in range(TURNS):
            for number, send in enumerate(garbage(port, chance)):
                agent.send(beat(0, 0))
                ends(send(), is_abrupt=(number + turn) % 2 == 0)
            assert port.is_healthy()
            still_counts(port, agent, 0, f"turn {turn}")
            memory.append(port.memory_bytes())
        assert memory[-1] - memory[1] < 8 << 20, memory
        port.job.until(lambda: port.descriptors() <= before + 1, "descriptors are given back", 20)
    left = [e for e in port.job.of_type(NodeLeft) if e.node == 1]
    assert {"it spoke for another node"} < {e.reason for e in left}
    assert len(left) >= 2 * TURNS, "whatever ended a connection, its node may come again"
    assert len([n for n in port.job.of_type(Note) if n.topic == "stranger"]) <= 100
    told = port.job.of_type(NodeChecked)
    assert len(told) == TURNS and not any(each.admitted for each in told), "what is of the job"


def test_a_newcomer_gets_in_while_silent_connections_hold_every_place(port: Port):
    """More of them than the process may have descriptors; those that wait are ended in time."""
    for _ in range(DESCRIPTORS + 100):
        port.open()
    slow = [port.upgraded(), port.open(b"GET /heal"), port.upgraded(frame(b"x", length=1000))]
    began = time.monotonic()
    with port.agent(0) as agent, port.agent(1):
        assert port.is_healthy()
        assert port.descriptors() < DESCRIPTORS
        still_counts(port, agent, 0, "among the silent")
        for at in range(40):
            for sock in slow:  # a byte now and then buys no time
                with contextlib.suppress(OSError):
                    sock.sendall(b"t")
            agent.send(beat(0, 0))
            if at % 10 == 0:
                still_counts(port, agent, 0, f"look {at}")
            if port.descriptors() < 20:
                break
            time.sleep(0.5)
        assert port.descriptors() < 20
    assert time.monotonic() - began < PATIENCE_S * 1.5


STORE = """
import sys
from stepfast.train.storehost import open_server
server, port = open_server("127.0.0.1")
print(port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store_port() -> Iterator[int]:
    """That of a generation's store, in a process of its own as always."""
    command = [sys.executable, "-c", STORE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
        assert process.poll() is None
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait()


def test_noise_at_a_generations_store_disturbs_nobody_who_meets_there(store_port: int):
    """What is no word of torch's; what a stranger can do who speaks it is torch's to say."""
    from torch.distributed import TCPStore

    chance = random.Random(1)
    limit = datetime.timedelta(seconds=10)
    inside = TCPStore("127.0.0.1", store_port, is_master=False, timeout=limit)
    noise = [b"", b"GET / HTTP/1.1\r\n\r\n", pickle.dumps({"os": "system"}), bytes(1 << 20)]
    noise += [chance.randbytes(chance.randrange(2000)) for _ in range(100)]
    with contextlib.ExitStack() as opened:
        for number, data in enumerate(noise):
            sock = opened.enter_context(socket.create_connection(("127.0.0.1", store_port), 10))
            with contextlib.suppress(OSError):
                sock.sendall(data)
            if number % 2:
                sock.close()
        inside.set("key", "among strangers")
        newcomer = TCPStore("127.0.0.1", store_port, is_master=False, timeout=limit)
        assert newcomer.get("key") == b"among strangers"
