"""Cutting the connections of one generation, so that whoever waits in it wakes.

Owns: which addresses a generation talks to, as its store shows them; the cut through them.
Does not own: the store (`train.watched_store`), the calls on sockets (`train.sockets`).

Gloo publishes each listener of a group in the group's store before it connects, and reads its
peers' from there. So the generation's store is wrapped: what is set is an own listener, what is got
is a peer's, for every group, the user's own included, from the first byte of its forming on. It
needs no look at the kernel's tables at a lucky moment, no second round trip, and no store that
still lives when the cut comes.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from stepfast.train import gloo_waiters
from stepfast.train.sockets import (
    Endpoint,
    GlooAddress,
    connect_and_hang_up,
    count_connections,
    gloo_address,
    shut_connections,
)

FORGOTTEN_S = 0.02
"""How long a wait without any connection has to stand still. Gloo's loop looks every 10 ms."""
SETTLE_LIMIT_S = 1.0
CUTTING_INTERVAL_S = 0.005
CUTTING_LIMIT_S = 60.0
"""After that whoever waits for the main thread has long replaced the process."""
PAIRS_CALLED_MAX = 256
"""Each call may cost a descriptor until the group is destroyed."""
NO_ENDPOINTS: frozenset[Endpoint] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReport:
    """What an abort did. `failed_count` > 0 or a main thread that stays: replace the process."""

    group_connections_shut: int = 0
    store_connections_shut: int = 0
    waits_released: int = 0
    failed_count: int = 0
    device_groups_aborted: int = 0
    elapsed_s: float = 0.0


class Connections:
    """The addresses of one generation, and the cut. Every method from any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._own: frozenset[GlooAddress] = frozenset()
        self._cutting = threading.Lock()
        self._waiting_since_s: dict[gloo_waiters.Waiter, float] = {}
        self._called: frozenset[GlooAddress] = frozenset()
        self._peers = NO_ENDPOINTS
        self._store = NO_ENDPOINTS
        self._is_cut = False
        self.dissolved = threading.Event()
        """Set when nothing of the generation is left to cut."""
        self.changed = threading.Event()
        """Set by a cut; whoever forms the generation waits on it and sets it when done."""

    @property
    def is_cut(self) -> bool:
        """Whether the generation is over; nothing of it may use the store any more."""
        return self._is_cut

    def learn_own(self, published: bytes) -> bool:
        """A value that this process sets; whether it is a Gloo listener of its own."""
        address = gloo_address(published)
        if address is not None:
            with self._guard:
                self._own |= {address}
        return address is not None

    def learn_peer(self, published: bytes) -> None:
        """A value that this process gets: a peer's Gloo listener, or something else."""
        if (address := gloo_address(published)) is not None:
            with self._guard:
                self._peers |= {address.listener}

    def learn_store(self, endpoints: frozenset[Endpoint]) -> None:
        """Where the store of this generation, and of nothing else, listens."""
        with self._guard:
            self._store |= endpoints

    def cut(self) -> AbortReport:
        """Shuts all connections: the groups' first and all together, then the store's.

        In that order a thread that the second wave wakes finds no group that still works.
        """
        started_s = time.monotonic()
        with self._cutting:
            # The first time incoming only: Gloo reads to the end and tells its operations, whereas
            # a write that fails loses the operation it was for. It then closes, which wakes the
            # peer.
            how = socket.SHUT_RDWR if self._is_cut else socket.SHUT_RD
            self._is_cut = True
            with self._guard:
                own, peers, store = self._own, self._peers, self._store
            listeners = frozenset(address.listener for address in own)
            groups = shut_connections(listeners=listeners, remotes=peers, how=how)
            clients = shut_connections(listeners=NO_ENDPOINTS, remotes=store, how=socket.SHUT_RDWR)
            for address in own - self._called:
                _wake_waiting_pairs(address)
            self._called = own
            released_count = self._release_forgotten(bool(groups.shut_count), len(own))
        self.changed.set()
        return AbortReport(
            group_connections_shut=groups.shut_count,
            store_connections_shut=clients.shut_count,
            waits_released=released_count,
            failed_count=groups.failed_count + clients.failed_count,
            elapsed_s=time.monotonic() - started_s,
        )

    def keep_cutting(self, besides: Callable[[], object] = lambda: None) -> None:
        """Cuts every few milliseconds until the generation is dissolved, or for a limited time.

        Each cut meets what was connected since the last, and ends the waits that Gloo forgot.
        `besides`: what else has to be done again and again until then.
        """
        deadline_s = time.monotonic() + CUTTING_LIMIT_S
        while not self.dissolved.wait(CUTTING_INTERVAL_S) and time.monotonic() < deadline_s:
            self.cut()
            besides()

    def settle(self) -> bool:
        """Cuts until no thread waits in a group any more; False if one still does after the limit.

        Before the groups are destroyed: Gloo joins its threads there, with the GIL held.
        """
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        while True:
            self.cut()
            if not gloo_waiters.waiters() or gloo_waiters.loop_count() > len(self._own):
                return True
            if time.monotonic() > deadline_s:
                return False
            self.dissolved.wait(CUTTING_INTERVAL_S)

    def _release_forgotten(self, is_anything_alive: bool, group_count: int) -> int:
        """Ends waits that have not moved for a while although no connection is left."""
        now_s = time.monotonic()
        # A group of the user's own, made with a store of his own, is none of ours: its waits look
        # alike.
        if is_anything_alive or gloo_waiters.loop_count() > group_count:
            self._waiting_since_s = {}
            return 0
        waiting = gloo_waiters.waiters()
        self._waiting_since_s = {w: self._waiting_since_s.get(w, now_s) for w in waiting}
        forgotten = [w for w, since in self._waiting_since_s.items() if now_s - since > FORGOTTEN_S]
        for waiter in forgotten:
            gloo_waiters.release(waiter)
            del self._waiting_since_s[waiter]
        return len(forgotten)

    def count(self) -> int:
        """How many connections of this generation this process holds, the store's included."""
        with self._guard:
            listeners = frozenset(own.listener for own in self._own)
            remotes = self._peers | self._store
        return count_connections(listeners=listeners, remotes=remotes)


def _wake_waiting_pairs(own: GlooAddress) -> None:
    """Wakes whoever waits for a peer to connect: there is no connection yet that could be shut.

    A pair waits without a limit of ours for the connection that names it, when the peer was stopped
    on its way, or when its connection was shut before it had said the name. So we call in its place
    and hang up: the pair sees the end of a connection. For a pair that is connected Gloo keeps the
    call until the group is destroyed.
    """
    for pair_id in own.pair_ids[:PAIRS_CALLED_MAX]:
        connect_and_hang_up(own.listener, struct.pack("=q", pair_id))
