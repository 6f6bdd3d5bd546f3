"""The process groups of a rank over its generations: form, abort, dissolve, record, replay.

Owns: which generation's groups stand; the threads that were abandoned while forming.
Does not own: when to do what (the rank's machine), the store server (a process of its own).

Invariants: one generation stands at a time; after `dissolve` nothing of it is left, neither socket,
thread, descriptor nor registered group; keys carry the generation's number, so no key of one
generation is ever seen by another. `form`, `replay` and `dissolve` belong to the main thread,
`abort` and `progress` to the monitor's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from stepfast.core.terms import Generation, Rank
from stepfast.errors import OperatingError
from stepfast.train import torch_groups
from stepfast.train.abort import AbortReport, Connections
from stepfast.train.backends import Backend
from stepfast.train.forming import Helper
from stepfast.train.replay import Record
from stepfast.train.sockets import resolved
from stepfast.train.watched_store import WatchedStore

ABANDONED_COUNT_MAX = 3
"""Each abandoned thread holds a stack, some sockets and a half-made group; too many of them mean
that something is wrong with this process's network, which a fresh process may not share.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Where this process stands in a generation, and where the generation meets.

    forming_timeout_s: limit for all ranks to arrive and connect. Too small gives up on slow
    starters, too big keeps a rank waiting for one that never comes; the job's timeouts derive it.
    trace_path: where a flight recorder's account goes before an abort.
    """

    generation: Generation
    rank: Rank
    world_size: int
    store_host: str
    store_port: int
    forming_timeout_s: float
    trace_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How many operations this rank has started, over all its groups and in those of all ranks."""

    operations: int = 0
    world_operations: int = 0


class Groups:
    """The process groups of this process."""

    def __init__(
        self, backend: Backend, *, enter_thread: Callable[[], object] = lambda: None
    ) -> None:
        """`enter_thread`: called first in each thread that makes or aborts groups, so that it is
        the device's.
        """
        self._backend, self._enter_thread = backend, enter_thread
        self._membership: Membership | None = None
        self._connections = Connections()
        self._store: WatchedStore | None = None
        self._records: list[Record] = []
        self._abandoned: list[Helper] = []
        self._aborting = threading.Lock()
        self._aborted: set[int] = set()  # groups of this generation, by id

    @property
    def backend(self) -> Backend:
        """What the groups are made of."""
        return self._backend

    @property
    def abandoned_count(self) -> int:
        """Threads that are still stuck in the forming of a generation that is over."""
        return sum(not helper.is_done for helper in self._abandoned)

    def form(self, membership: Membership, leaving: Callable[[], bool]) -> None:
        """Makes the world group of a generation; returns when it stands.

        Raises Interrupted if left (`leaving`, an abort, a signal's handler), OperatingError if a
        peer or the store failed, or too many helpers are stuck. Nothing is left of it then.
        """
        assert self._membership is None, "dissolve the old generation first"
        self._sweep_abandoned()
        self._connections = Connections()
        self._membership = membership
        connections, made = self._connections, list[WatchedStore]()

        def join() -> None:
            self._enter_thread()
            _join(self._backend, membership, connections, made)

        helper = Helper(join, connections)
        self._run(helper, leaving, membership.forming_timeout_s)
        self._store = made[0] if made else None
        # Whatever a helper of an older generation may have done since, it is not our world.
        if torch_groups.world() is None or dist.get_rank() != membership.rank:
            self.abort()
            self.dissolve()
            raise OperatingError("another generation's group took the place of this one's")

    def abort(self) -> AbortReport:
        """Wakes whoever is blocked in any group of this generation, here and at the other ends.

        From the monitor thread, at any instant, any number of times; takes some milliseconds. The
        generation is over then; what the main thread still calls in it raises. A thread of its own
        goes on cutting until `dissolve`, for what is being connected just now.
        """
        connections, is_first = self._connections, not self._connections.is_cut
        if is_first:
            self._write_trace()
        devices = self._abort_device_groups()
        report = replace(connections.cut(), device_groups_aborted=devices)
        if is_first:
            cutter = threading.Thread(
                target=connections.keep_cutting,
                args=(self._abort_device_groups,),
                name="stepfast-abort",
                daemon=True,
            )
            cutter.start()
        return report

    def _abort_device_groups(self) -> int:
        """Those that are registered by now: one may have been in the making at the first abort."""
        if not self._backend.ends_by_abort:
            return 0
        with suppress(RuntimeError):  # a broken device's groups are aborted all the same
            self._enter_thread()
        with self._aborting:
            return torch_groups.abort_device_groups(self._backend.device, self._aborted)

    def error(self) -> str | None:
        """Why what the device's groups have computed may be garbage; None where nothing is known,
        and where errors are raised at once. From any thread.
        """
        if not self._backend.ends_by_abort:
            return None
        return torch_groups.device_error(self._backend.device)

    def dissolve(self) -> None:
        """Takes the generation apart, after an abort or at the end; does nothing if there is none.

        Raises OperatingError if a thread cannot be woken: this process then has to be replaced.
        """
        for record in self._records:
            record.detach()
        self._records = []
        if self._connections.is_cut and not self._connections.settle():
            raise OperatingError("a collective cannot be woken: this process has to be replaced")
        self._connections.dissolved.set()
        with self._aborting:
            torch_groups.destroy_world()
            self._aborted = set()
        self._store = None
        self._membership = None
        self._sweep_abandoned()

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Records the groups that are made inside the `with` block; ready at its end."""
        assert self._membership is not None, "form a generation first"
        record = Record(self._store)
        yield record
        record.close()
        self._records.append(record)

    def replay(self, record: Record, leaving: Callable[[], bool] = lambda: False) -> None:
        """Makes the recorded groups in this generation, whose layout is the recorded one's.

        Kept meshes then resolve to the new groups; kept models need `reset_after_interrupt` as
        well.
        Raises as `form` does; the caller then dissolves.
        """
        membership = self._membership
        assert membership is not None, "form a generation first"
        if (obstacle := record.replay_obstacle) is not None:
            raise OperatingError(f"groups cannot be made again: {obstacle}")

        def make() -> None:
            self._enter_thread()
            record.make_groups(membership.rank)

        helper = Helper(make, self._connections)
        self._run(helper, leaving, membership.forming_timeout_s)
        record.attach()
        self._records.append(record)

    def progress(self) -> Progress:
        """What this rank's groups have been asked to do so far; from any thread."""
        membership = self._membership
        if membership is None:
            return Progress()
        standing = torch_groups.groups()
        numbers = [(group.size(), torch_groups.sequence_number(group)) for group in standing]
        return Progress(
            operations=sum(number for _, number in numbers),
            world_operations=sum(n for size, n in numbers if size == membership.world_size),
        )

    def connection_count(self) -> int:
        """How many connections this process holds for the generation, the store's included."""
        return self._connections.count()

    def _write_trace(self) -> None:
        path = self._membership.trace_path if self._membership is not None else None
        if path is None or self._backend.trace is None:
            return
        # An account of what happened is worth less than the abort that it precedes.
        with suppress(OSError, RuntimeError, AttributeError):
            path.write_bytes(self._backend.trace())

    def _run(self, helper: Helper, leaving: Callable[[], bool], limit_s: float) -> None:
        try:
            helper.run(leaving, limit_s)
        except BaseException:
            ended = helper.leave()
            if not ended:
                self._abandoned.append(helper)
            self.dissolve()
            if self.abandoned_count > ABANDONED_COUNT_MAX:
                raise OperatingError(
                    f"{self.abandoned_count} threads are stuck in connects: replace this process"
                ) from None
            raise

    def _sweep_abandoned(self) -> None:
        self._abandoned = [helper for helper in self._abandoned if not helper.is_done]
        for helper in self._abandoned:
            helper.cut_again()


def _join(
    backend: Backend, membership: Membership, connections: Connections, made: list[WatchedStore]
) -> None:
    """In the helper thread: reaches the store and connects the world group."""
    host, port = membership.store_host, membership.store_port
    limit = timedelta(seconds=membership.forming_timeout_s)
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    # Not before: TCPStore answers a connection that is shut while it connects by trying again,
    # after a pause. Left alone it is through in a millisecond, or waits for a server that is gone.
    connections.learn_store(resolved(host, port))
    store: Store = PrefixStore(f"generation-{membership.generation}", client)
    if not backend.ends_by_abort:
        # NCCL's own threads would need the GIL for each look at a store in Python.
        store = WatchedStore(store, connections)
        made.append(store)
    dist.init_process_group(
        backend.spec, store=store, rank=membership.rank, world_size=membership.world_size
    )
    client.set_timeout(default_pg_timeout)
