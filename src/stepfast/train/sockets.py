"""Finding and shutting the sockets of a generation, and no others.

Owns: which descriptors of this process are connections of given listeners and addresses; the kernel
calls on them.
Does not own: which addresses those are (`train.abort` learns them), when to shut.

A connection is a group's if it was accepted by one of the group's own listeners (its local address
is the listener's) or leads to the published listener of a peer. Invariants: a listener is never
shut (Gloo aborts the process when its accept fails); a descriptor that does not match is only asked
for its addresses, never changed. The calls go to libc directly because `socket.socket(fileno=...)`
switches the descriptor to non-blocking where the user has set `socket.setdefaulttimeout`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SOCKADDR_STORAGE_BYTES = 128
_ADDRESS_BYTES = _SOCKADDR_STORAGE_BYTES + 8
_HOSTNAME_BYTES_MAX = 255
_STATE_SYN_SENT = 2
_LOCAL_CONNECT_LIMIT_S = 0.05
_MAPPED_PREFIX = bytes(10) + b"\xff\xff"

_libc = ctypes.CDLL(None, use_errno=True)
_LibcCall = Callable[..., int]


class Endpoint(NamedTuple):
    """One end of a TCP connection; an IPv4-mapped IPv6 address is written as IPv4."""

    address: bytes
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutReport:
    """What one sweep did: connections shut, and matching ones that the kernel would not let us
    shut.
    """

    shut_count: int
    failed_count: int


def endpoint_of_sockaddr(sockaddr: bytes) -> Endpoint | None:
    """The endpoint in a kernel `sockaddr`, or None if it is no internet address."""
    if len(sockaddr) < 8:
        return None
    family = int.from_bytes(sockaddr[:2], sys.byteorder)
    port = int.from_bytes(sockaddr[2:4], "big")
    if family == socket.AF_INET:
        return Endpoint(sockaddr[4:8], port)
    if family == socket.AF_INET6 and len(sockaddr) >= 24:
        return Endpoint(_unmapped(sockaddr[8:24]), port)
    return None


class GlooAddress(NamedTuple):
    """What a Gloo context publishes of itself: its listener, and one number for each pair it has.

    Whoever connects to the listener says first which pair it means.
    """

    listener: Endpoint
    pair_ids: tuple[int, ...]


def gloo_address(published: bytes) -> GlooAddress | None:
    """The address in what a Gloo context publishes under its rank; None if `published` is no such
    thing.

    Layout (gloo/rendezvous/context.cc, as torch 2.13 ships it): length and bytes of the host name,
    length of the address, the address (a `sockaddr_storage` and a number), the pairs' numbers. All
    lengths and numbers have 8 bytes.
    """
    if len(published) < 8:
        return None
    (hostname_bytes,) = struct.unpack_from("=Q", published)
    address_at = 16 + hostname_bytes
    if hostname_bytes > _HOSTNAME_BYTES_MAX or len(published) < address_at + _ADDRESS_BYTES:
        return None
    if struct.unpack_from("=Q", published, address_at - 8) != (_ADDRESS_BYTES,):
        return None
    listener = endpoint_of_sockaddr(published[address_at:][:_SOCKADDR_STORAGE_BYTES])
    numbers = published[address_at + _ADDRESS_BYTES :]
    if listener is None or len(numbers) % 8:
        return None
    return GlooAddress(listener, struct.unpack(f"={len(numbers) // 8}q", numbers))


def connect_and_hang_up(listener: Endpoint, first_bytes: bytes) -> bool:
    """Connects to a listener of this host, says `first_bytes`, is gone; whether it went well."""
    family = socket.AF_INET if len(listener.address) == 4 else socket.AF_INET6
    caller = socket.socket(family, socket.SOCK_STREAM)
    try:
        caller.settimeout(_LOCAL_CONNECT_LIMIT_S)
        caller.connect((socket.inet_ntop(family, listener.address), listener.port))
        caller.sendall(first_bytes)
    except OSError:
        return False
    finally:
        caller.close()
    return True


def resolved(host: str, port: int) -> frozenset[Endpoint]:
    """All endpoints that `host:port` can mean; may ask the name service, so never call it from the
    monitor.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ends = {
        Endpoint(_unmapped(socket.inet_pton(family, str(sockaddr[0]).partition("%")[0])), port)
        for family, _, _, _, sockaddr in found
    }
    return frozenset(ends)


def shut_connections(
    *, listeners: frozenset[Endpoint], remotes: frozenset[Endpoint], how: int
) -> ShutReport:
    """Shuts every connection of this process that `listeners` accepted or that leads to `remotes`.

    how: SHUT_RD, which lets what was received be read first, or SHUT_RDWR. Whoever is blocked on
    such a socket wakes at once. Callable from any thread, any number of times.
    """
    shut_count = failed_count = 0
    for descriptor in _descriptors_matching(listeners, remotes):
        try:
            copy = os.dup(descriptor)
        except OSError as error:
            failed_count += error.errno != errno.EBADF
            continue
        try:
            # The number may have been closed and given to another socket since: the copy cannot
            # change any more, so it is the copy that has to match.
            if _matches(copy, listeners, remotes):
                failed = _libc.shutdown(copy, how) != 0
                failed_count += failed and ctypes.get_errno() != errno.ENOTCONN
                shut_count += not failed
        finally:
            os.close(copy)
    return ShutReport(shut_count=shut_count, failed_count=failed_count)


def count_connections(*, listeners: frozenset[Endpoint], remotes: frozenset[Endpoint]) -> int:
    """How many connections `shut_connections` would shut."""
    return sum(1 for _ in _descriptors_matching(listeners, remotes))


def _descriptors_matching(
    listeners: frozenset[Endpoint], remotes: frozenset[Endpoint]
) -> Iterator[int]:
    if not listeners and not remotes:
        return
    for name in os.listdir("/proc/self/fd"):
        if _matches(int(name), listeners, remotes):
            yield int(name)


def _matches(descriptor: int, listeners: frozenset[Endpoint], remotes: frozenset[Endpoint]) -> bool:
    if _option(descriptor, socket.SOL_SOCKET, socket.SO_TYPE) != socket.SOCK_STREAM:
        return False
    remote = _asked(_libc.getpeername, descriptor)
    if remote is None:
        remote = _remote_of_connecting(descriptor)
        return remote is not None and remote in remotes
    return remote in remotes or _asked(_libc.getsockname, descriptor) in listeners


def _asked(question: _LibcCall, descriptor: int) -> Endpoint | None:
    """The answer of getsockname or getpeername; None if there is none (no socket, or not
    connected).
    """
    sockaddr = ctypes.create_string_buffer(_SOCKADDR_STORAGE_BYTES)
    size_bytes = ctypes.c_uint32(_SOCKADDR_STORAGE_BYTES)
    if question(descriptor, sockaddr, ctypes.byref(size_bytes)) != 0:
        return None
    return endpoint_of_sockaddr(sockaddr.raw[: size_bytes.value])


def _remote_of_connecting(descriptor: int) -> Endpoint | None:
    """Where a socket in the middle of `connect` is going: getpeername does not say, only the
    kernel's table does.
    """
    if _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO) & 0xFF != _STATE_SYN_SENT:
        return None
    try:
        inode = str(os.fstat(descriptor).st_ino)
        tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return None  # closed meanwhile, or no IPv6 here
    for line in "".join(tables).splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[9] == inode:
            return _endpoint_of_table(fields[2])
    return None


def _option(descriptor: int, level: int, option: int) -> int:
    """The first four bytes of a socket's option, as a number; -1 if the descriptor is no socket."""
    value, size_bytes = ctypes.c_int(-1), ctypes.c_uint32(4)
    answer = (ctypes.byref(value), ctypes.byref(size_bytes))
    return value.value if _libc.getsockopt(descriptor, level, option, *answer) == 0 else -1


def _endpoint_of_table(text: str) -> Endpoint:
    """`0100007F:DE70` as the kernel's tables print it: words of four bytes in native order."""
    address, _, port = text.partition(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    return Endpoint(_unmapped(packed), int(port, 16))


def _unmapped(address: bytes) -> bytes:
    return address[12:] if address.startswith(_MAPPED_PREFIX) else address
