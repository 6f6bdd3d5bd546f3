"""The cut meets the sockets that it is meant for, over IPv4 and IPv6, and touches no other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from stepfast.train.sockets import (
    Endpoint,
    connect_and_hang_up,
    count_connections,
    gloo_address,
    resolved,
    shut_connections,
)

NONE: frozenset[Endpoint] = frozenset()


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    try:
        socket.create_server((request.param, 0), family=_family(request.param)).close()
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    return str(request.param)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def _pair(host: str) -> Iterator[tuple[socket.socket, socket.socket, frozenset[Endpoint]]]:
    """Both ends of a connection, and the endpoint of its listener, which stays open."""
    with socket.create_server((host, 0), family=_family(host)) as server:
        endpoint = resolved(host, server.getsockname()[1])
        with socket.create_connection(server.getsockname()[:2]) as near, server.accept()[0] as far:
            yield near, far, endpoint


@pytest.mark.parametrize("by", ["listener", "remote"])
def test_only_what_matches_is_shut(host: str, by: str):
    with _pair(host) as (near, far, endpoint), _pair(host) as (users_near, users_far, _):
        listeners, remotes = (endpoint, NONE) if by == "listener" else (NONE, endpoint)
        assert count_connections(listeners=listeners, remotes=remotes) == 1
        report = shut_connections(listeners=listeners, remotes=remotes, how=socket.SHUT_RDWR)
        assert (report.shut_count, report.failed_count) == (1, 0)
        assert near.recv(1) == b"" and far.recv(1) == b""
        users_near.sendall(b"x")
        assert users_far.recv(1) == b"x"
        with socket.create_connection(_address(endpoint)):
            pass  # the listener still listens


def _address(endpoint: frozenset[Endpoint]) -> tuple[str, int]:
    (only,) = endpoint
    family = socket.AF_INET if len(only.address) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, only.address), only.port


def test_descriptors_that_do_not_match_are_not_changed():
    """A default timeout would make `socket.socket(fileno=...)` switch them to non-blocking."""
    with _pair("127.0.0.1") as (near, _, _), _pair("127.0.0.1") as (_, _, endpoint):
        socket.setdefaulttimeout(3.0)
        try:
            shut_connections(listeners=endpoint, remotes=endpoint, how=socket.SHUT_RD)
        finally:
            socket.setdefaulttimeout(None)
        assert near.getblocking()


def test_a_socket_in_the_middle_of_connect_is_met():
    with contextlib.ExitStack() as open_sockets:
        server = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        connecting = []
        for _ in range(4):  # the kernel keeps one or two in its queue; the rest get no answer
            caller = open_sockets.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
            connecting.append(caller)
        states = [c.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for c in connecting]
        assert states[-1] == 2, "SYN_SENT"
        remotes = resolved(*server.getsockname())
        report = shut_connections(listeners=NONE, remotes=remotes, how=socket.SHUT_RDWR)
        assert (report.shut_count, report.failed_count) == (4, 0)


def test_mapped_addresses_are_the_same_endpoint():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, server.accept()[0]:
            assert count_connections(listeners=NONE, remotes=resolved("127.0.0.1", port)) == 1
            # Both ends are here: one leads to the endpoint, the other was accepted by it.
            assert count_connections(listeners=resolved("127.0.0.1", port), remotes=NONE) == 1
            assert near.getpeername()[1] == port


def test_calling_a_listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (listener,) = resolved(*server.getsockname())
        assert connect_and_hang_up(listener, b"12345678")
        with server.accept()[0] as accepted:
            assert accepted.recv(16) == b"12345678"
            assert accepted.recv(16) == b""
    assert not connect_and_hang_up(listener, b"x")


@pytest.mark.parametrize("value", [b"", b"0", b"x" * 200, bytes(300), b"\x02" + bytes(7) + b"vm"])
def test_what_is_no_gloo_address_is_none(value: bytes):
    assert gloo_address(value) is None
