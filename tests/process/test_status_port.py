"""The port of probes and metrics: answers in a thread of its own, whatever clients do."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from stepfast.agent.status import NodeStatus
from stepfast.coordinator.status import JobStatus
from stepfast.core.job_state import Phase
from stepfast.core.messages import RankState
from stepfast.core.node_state import LocalRank, NodeState
from stepfast.core.terms import NodeId, Rank, Step
from stepfast.runtime import status_port
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.status_port import (
    CONNECTIONS_MAX,
    REQUEST_BYTES_MAX,
    Page,
    StatusPort,
)
from unit.core.rigs import JobRig

GET = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
BIG = "x" * (8 << 20)  # more than sockets hold


class Served:
    """A port in a process that has other things to do."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.asked = 0
        self.port = StatusPort(
            listener,
            {
                "/page": self._page,
                "/big": lambda: Page(BIG),
                "/bad": lambda: Page("not well\n", is_ok=False),
            },
        )
        self.opened = contextlib.ExitStack()
        self.port.start()

    def _page(self) -> Page:
        self.asked += 1
        return Page("as it should be\n")

    def open(self, data: bytes = b"") -> socket.socket:
        sock = self.opened.enter_context(socket.create_connection(self.address, 10))
        sock.sendall(data)
        return sock

    def ask(self, data: bytes = GET) -> tuple[str, bytes]:
        """The first line and the body of the answer."""
        with self.open(data) as sock:
            head, _, body = all_of(sock).partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0].decode(), body


def all_of(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            parts.append(data)
    return b"".join(parts)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    before = len(os.listdir("/proc/self/fd"))
    yield made
    made.opened.close()
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors are given back"
    made.port.close()
    assert not any(t.name == "stepfast-status" for t in threading.enumerate())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(made.address, 1)


def test_requests_are_answered_as_http_wants_it(served: Served):
    assert served.ask() == ("HTTP/1.1 200 OK", b"as it should be\n")
    assert served.ask(b"GET /page?x=1 HTTP/1.0\r\n\r\n")[0] == "HTTP/1.1 200 OK"
    assert served.ask(GET.replace(b"GET", b"HEAD")) == ("HTTP/1.1 200 OK", b"")
    assert served.ask(GET.replace(b"GET", b"POST"))[0] == "HTTP/1.1 405 Method Not Allowed"
    assert served.ask(GET.replace(b"/page", b"/bad")) == (
        "HTTP/1.1 503 Service Unavailable",
        b"not well\n",
    )
    status, body = served.ask(GET.replace(b"/page", b"/etc/passwd"))
    assert (status, body) == ("HTTP/1.1 404 Not Found", b"there is /page, /big, /bad\n")


def test_a_request_may_come_in_pieces(served: Served):
    with served.open() as sock:
        for byte in GET:
            sock.sendall(bytes([byte]))
        assert all_of(sock).endswith(b"as it should be\n")


def test_what_is_no_request_is_refused_and_asks_nothing(served: Served):
    chance = random.Random(1)
    for data in (b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n", chance.randbytes(2000) + b"\r\n\r\n"):
        assert served.ask(data)[0] == "HTTP/1.1 400 Bad Request"
    assert served.ask(bytes(REQUEST_BYTES_MAX + 10))[0].startswith("HTTP/1.1 431 ")
    with served.open() as sock, pytest.raises(ConnectionError):
        sock.sendall(bytes(64 << 20))  # a head without an end
    assert served.asked == 0
    assert served.ask()[0] == "HTTP/1.1 200 OK"


def test_a_newcomer_is_answered_while_silent_connections_hold_every_place(served: Served):
    before = len(os.listdir("/proc/self/fd"))
    silent = [served.open(b"GET /pa") for _ in range(CONNECTIONS_MAX * 4)]
    began = time.monotonic()
    assert served.ask() == ("HTTP/1.1 200 OK", b"as it should be\n")
    assert time.monotonic() - began < 1.0
    held = len(os.listdir("/proc/self/fd")) - before - len(silent)
    assert held <= CONNECTIONS_MAX
    assert all_of(silent[0]) == b"", "the oldest made room"


def test_who_neither_asks_nor_reads_is_ended_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status_port, "PATIENCE_S", 0.3)
    silent, deaf = served.open(b"GET"), served.open(GET.replace(b"/page", b"/big"))
    began = time.monotonic()
    assert all_of(silent) == b""
    assert 0.2 < time.monotonic() - began < 3.0
    time.sleep(0.2)
    assert len(all_of(deaf)) < len(BIG), "what it did not read in time is not kept for it"


@contextlib.contextmanager
def pages_of(status: NodeStatus | JobStatus) -> Iterator[Callable[[str], tuple[str, bytes]]]:
    served = Served.__new__(Served)
    served.opened = contextlib.ExitStack()
    listener = socket.create_server(("127.0.0.1", 0))
    served.address, served.port = listener.getsockname(), StatusPort(listener, status.pages())
    served.port.start()
    yield lambda path: served.ask(GET.replace(b"/page", path.encode()))
    served.port.close()


OK, NOT_OK = "HTTP/1.1 200 OK", "HTTP/1.1 503 Service Unavailable"


def test_probes_of_an_agent_look_at_its_loop_and_its_connection_and_at_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(status_port, "_STUCK_S", 0.2)
    state = NodeState(node=NodeId(0), host="x", pid=1, slot_root="", log_root="")
    status = NodeStatus(SystemClock(), lambda: state)
    with pages_of(status) as ask:
        assert ask("/livez") == (OK, b"ok\n")
        assert ask("/healthz") == (NOT_OK, b"not connected to the coordinator\n")
        state = replace(state, connected=True)
        stuck = LocalRank(rank=Rank(0), state=RankState.ACTIVE, step=Step(3), stopped_since=0.0)
        state = replace(state, ranks={Rank(0): stuck})  # training does not get on
        status.turned()
        assert ask("/healthz") == (OK, b"ok\n")
        assert b'stepfast_node_ranks{state="active"} 1\n' in ask("/metrics")[1]
        time.sleep(0.5)  # this thread is the one whose loop should turn
        for path in ("/livez", "/healthz"):
            line, body = ask(path)
            assert line == NOT_OK and b"the event loop has not turned for" in body
        assert ask("/metrics")[0] == OK
        status.turned()
        assert ask("/livez")[0] == OK


def test_probes_of_a_coordinator_look_at_its_loop_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_port, "_STUCK_S", 0.2)
    rig = JobRig()
    status = JobStatus([], SystemClock())
    with pages_of(status) as ask:
        status.turned(rig.state)
        assert [ask(path)[0] for path in ("/livez", "/healthz", "/metrics")] == [OK] * 3
        time.sleep(0.5)
        assert [ask(path)[0] for path in ("/livez", "/healthz")] == [NOT_OK] * 2
        status.turned(replace(rig.state, phase=Phase.ENDED))
        assert [ask(path)[0] for path in ("/livez", "/healthz")] == [OK, NOT_OK]
