"""The last resort for a thread that Gloo forgets: it waits for an operation whose connection is
gone.

When a connection closes, Gloo tells the operations that wait for their turn, but not the one that
is half transferred (gloo/transport/tcp/pair.cc, Pair::signalException: of `tx_` only bound buffers
are told, `rx_` not at all). Its thread then waits for the group's own limit, 30 minutes, with no
socket left that could be shut. A killed peer is enough for that; so is our own cut.

Owns: finding such threads and ending their wait with Gloo's own `abortWaitSend` / `abortWaitRecv`.
Does not own: when (`train.abort`, once all connections are shut and the wait has not moved since).

The kernel says on which word a thread sleeps; the word lies at a known place in an UnboundBuffer.
Invariant: nothing is called before the object has proven its type by the methods in its vtable, so
that another torch or libc, laid out differently, makes this do nothing, and the deadline replaces
the process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_CLASS = "_ZN4gloo9transport3tcp13UnboundBuffer"
_VTABLE_WORDS = 12
_METHODS = ("D1Ev", "D0Ev", "13abortWaitRecvEv", "13abortWaitSendEv")

# The object: vtable, pointer, size, shared_ptr to the context (40 bytes), then a mutex (40 bytes)
# and two condition variables (48 bytes each). The words that a waiter sleeps on are 40 and 44 bytes
# into a condition variable (glibc since 2.25).
_CONDITION_OFFSETS = {"13abortWaitRecvEv": 80, "13abortWaitSendEv": 128}
_FUTEX_OFFSETS = (40, 44)

_LOOP_THREAD = "gloo_tcp_loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A thread that sleeps in an UnboundBuffer's wait."""

    thread_id: int
    buffer_address: int
    method: str


def waiters() -> frozenset[Waiter]:
    """The threads of this process that wait for one of Gloo's operations to complete."""
    if _SYS_FUTEX < 0 or _gloo() is None:
        return frozenset()
    return frozenset(_waiters())


def release(waiter: Waiter) -> None:
    """Ends the wait; only for one that was seen twice, with no connection alive in between.

    The operation then counts as done, with whatever is in its buffer; the next one in its group
    fails.
    """
    gloo = _gloo()
    assert gloo is not None
    getattr(gloo.library, _CLASS + waiter.method)(ctypes.c_void_p(waiter.buffer_address))


def loop_count() -> int:
    """How many groups' event loops run in this process, whoever made the groups."""
    return sum(1 for name in os.listdir("/proc/self/task") if _name_of(int(name)) == _LOOP_THREAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gloo:
    library: ctypes.CDLL
    addresses: frozenset[int]


@functools.cache
def _gloo() -> _Gloo | None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        methods = [getattr(library, _CLASS + name) for name in _METHODS]
    except AttributeError:
        return None
    addresses = [ctypes.cast(method, ctypes.c_void_p).value or 0 for method in methods]
    return _Gloo(library=library, addresses=frozenset(addresses))


def _waiters() -> Iterator[Waiter]:
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for name in os.listdir("/proc/self/task"):
            futex = _futex_of(int(name))
            for method, condition_offset in _CONDITION_OFFSETS.items():
                for futex_offset in _FUTEX_OFFSETS:
                    address = futex - futex_offset - condition_offset
                    if futex and _is_unbound_buffer(memory.fileno(), address):
                        yield Waiter(thread_id=int(name), buffer_address=address, method=method)


def _futex_of(thread_id: int) -> int:
    """The word that the thread sleeps on, or 0."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/syscall").read_text().split()
    except OSError:
        return 0  # ended meanwhile, or the kernel does not tell
    return int(fields[1], 16) if len(fields) > 1 and fields[0] == str(_SYS_FUTEX) else 0


def _is_unbound_buffer(memory: int, address: int) -> bool:
    gloo = _gloo()
    assert gloo is not None
    (vtable,) = _words(memory, address, 1) or (0,)
    return bool(vtable) and gloo.addresses <= set(_words(memory, vtable, _VTABLE_WORDS))


def _words(memory: int, address: int, count: int) -> tuple[int, ...]:
    """Words of this process's memory; nothing where none is mapped, never a fault."""
    try:
        content = os.pread(memory, 8 * count, address)
    except (OSError, OverflowError):
        return ()
    return struct.unpack(f"={len(content) // 8}Q", content[: len(content) // 8 * 8])


def _name_of(thread_id: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread_id}/comm").read_text().strip()
    except OSError:
        return ""
