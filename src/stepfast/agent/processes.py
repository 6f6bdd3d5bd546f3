"""The processes of one node: its zygote, its store, its ranks, and whatever they start.

Owns: their birth, their end, and the end of all their descendants. Does not own: why one is made or
ended (`core.node`), what is said over a rank's socket (`agent.daemon`).

Invariants: the end of a rank is noticed by its pidfd, at once, never by polling. The node is a
subreaper, so whatever a rank starts stays below it and can be found. Nothing is killed that was not
started here: a process is its pid and its start time. The end of a zygote or a store never ends a
rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stepfast.agent.stores import OPEN_TIMEOUT_S, StoreKeeper
from stepfast.agent.sweeper import Child, ProcessEnd, Sweeper, reap
from stepfast.agent.zygotes import ZygoteCallbacks, ZygoteEnd, ZygoteKeeper
from stepfast.errors import OperatingError
from stepfast.runtime import spawning
from stepfast.runtime.descendants import ProcessEntry, ProcessId, read_process, try_signal

FORK_TIMEOUT_S: Final = 10.0
# The name under which a rank's end is known outside.
RankEnd = ProcessEnd


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """A new rank. The socket is the agent's end; whoever asked for the rank owns it."""

    pid: int
    start_time_ticks: int
    socket: socket.socket


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeCallbacks:
    """What the node reports, from inside the event loop; none of them may block or raise.

    `on_stuck` gets processes that a SIGKILL does not end in time, such as those in uninterruptible
    sleep.
    """

    on_rank_end: Callable[[int, RankEnd], None]
    on_store_end: Callable[[int, RankEnd], None] = lambda pid, end: None
    on_zygote_end: Callable[[ZygoteEnd], None] = lambda end: None
    on_zygote_ready: Callable[[spawning.Ready], None] = lambda ready: None
    on_preload_note: Callable[[spawning.PreloadNote], None] = lambda note: None
    on_stuck: Callable[[list[ProcessEntry]], None] = lambda entries: None


class NodeProcesses:
    """All processes of a node, in the running event loop; `start` first, `close` last."""

    def __init__(
        self,
        *,
        script: str,
        log_directory: Path,
        callbacks: NodeCallbacks,
        preload_names: Sequence[str] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._callbacks = callbacks
        own = read_process(os.getpid())
        assert own is not None
        self._node_tag = f"{own.id.pid}.{own.id.start_time_ticks}:"
        self._request_ids = itertools.count(1)
        self._ranks: dict[int, Child] = {}
        self._no_ranks = asyncio.Event()
        self._no_ranks.set()
        self._hurry = asyncio.Event()
        self._closing: asyncio.Task[list[ProcessEntry]] | None = None
        self._sweeper = Sweeper(is_own=self._is_own, on_stuck=callbacks.on_stuck)
        self._store = StoreKeeper(
            fork=self._fork,
            next_request=self._next_request,
            log_path=log_directory / "store.log",
            on_end=callbacks.on_store_end,
        )
        self._zygote = ZygoteKeeper(
            script=script,
            preload_names=preload_names,
            node_tag=self._node_tag,
            log_path=log_directory / "zygote.log",
            callbacks=ZygoteCallbacks(
                on_ready=callbacks.on_zygote_ready,
                on_note=callbacks.on_preload_note,
                on_end=self._zygote_ended,
                on_unclaimed=self._end_unclaimed,
            ),
        )

    def start(self) -> None:
        """Become a subreaper and start the zygote; raises OperatingError where it is refused.

        To be called from the main thread: the kernel ends ranks when the thread ends that they
        have for a parent.
        """
        spawning.become_subreaper()
        self._sweeper.start()
        self._zygote.start()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the zygote serves; raises OperatingError: not in time, or never will."""
        await self._zygote.wait_ready(timeout_s)

    @property
    def zygote_pid(self) -> int | None:
        """The present zygote's pid."""
        return self._zygote.pid

    @property
    def store_pid(self) -> int | None:
        """The present store process's pid."""
        return self._store.child.id.pid if self._store.child is not None else None

    @property
    def rank_pids(self) -> list[int]:
        """The pids of all ranks whose end was not noticed yet."""
        return sorted(self._ranks)

    async def fork_rank(
        self,
        launch: spawning.RankLaunch,
        *,
        timeout_s: float = FORK_TIMEOUT_S,
        socket_kind: socket.SocketKind = socket.SOCK_SEQPACKET,
    ) -> RankProcess:
        """Make a rank; raises OperatingError where that fails or takes too long: try again then.

        The time includes waiting for a zygote that is being started. `on_rank_end` never comes
        before this has returned to a caller that awaits it directly.
        """
        ours, theirs = spawning.socket_pair(socket_kind)
        request_id, tag = self._next_request("rank")
        request = spawning.ForkRank(request_id=request_id, tag=tag, launch=launch)
        try:
            with theirs:
                child = await self._fork(request, theirs.fileno(), timeout_s)
        except BaseException:
            ours.close()
            raise
        self._ranks[child.id.pid] = child
        self._no_ranks.clear()
        self._loop.add_reader(child.pidfd, self._rank_ended, child)
        return RankProcess(
            pid=child.id.pid, start_time_ticks=child.id.start_time_ticks, socket=ours
        )

    async def open_store(
        self, host: str = "127.0.0.1", *, timeout_s: float = OPEN_TIMEOUT_S
    ) -> int:
        """The port of a fresh TCPStore server on `host`; raises OperatingError: try again then."""
        return await self._store.open(host, timeout_s)

    def signal_rank(self, pid: int, signal_number: int) -> bool:
        """Send a signal to a living rank; False where it has ended."""
        rank = self._ranks.get(pid)
        return rank is not None and try_signal(rank.id, signal_number)

    def end_rank(self, pid: int) -> None:
        """SIGKILL a rank and all its descendants, at once; `on_rank_end` follows. Twice is once."""
        if (rank := self._ranks.get(pid)) is not None:
            self._sweeper.sweep(rank)

    async def close(self, grace_s: float) -> list[ProcessEntry]:
        """End everything: SIGTERM to the ranks, after `grace_s` SIGKILL to all that lives.

        A second call with 0 cuts the grace of the first short. Returns the processes that even a
        SIGKILL did not end in time, such as those in uninterruptible sleep.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(grace_s))
        elif grace_s == 0:
            self._hurry.set()
        return await asyncio.shield(self._closing)

    async def _close(self, grace_s: float) -> list[ProcessEntry]:
        for rank in self._ranks.values():
            try_signal(rank.id, signal.SIGTERM)
        waits = [self._loop.create_task(event.wait()) for event in (self._no_ranks, self._hurry)]
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for rank in list(self._ranks.values()):
            self._sweeper.kill_all_of(rank)
        self._zygote.close()
        left = await self._sweeper.end_everything(
            lambda: not self._ranks and self._store.child is None
        )
        self._store.close()
        if left:
            self._callbacks.on_stuck(left)
        return left

    def _next_request(self, kind: str) -> tuple[int, str]:
        """A fresh request id, and the tag of the process that the request may make."""
        request_id = next(self._request_ids)
        return request_id, spawning.make_tag(self._node_tag, f"{kind}.{request_id}")

    async def _fork(self, request: spawning.ToZygote, descriptor: int, timeout_s: float) -> Child:
        self._refuse_when_closing()
        forked = await self._zygote.fork(request, descriptor, timeout_s)
        process = ProcessId(forked.pid, forked.start_time_ticks)
        try:
            self._refuse_when_closing()
            return Child(id=process, tag=request.tag, pidfd=os.pidfd_open(forked.pid))
        except (OSError, OperatingError) as error:
            self._sweeper.kill(process)
            raise OperatingError(f"the new process {forked.pid} is not kept: {error}") from error

    def _refuse_when_closing(self) -> None:
        if self._closing is not None:
            raise OperatingError("the node's processes are being closed")

    def _rank_ended(self, rank: Child) -> None:
        self._loop.remove_reader(rank.pidfd)
        end = reap(rank)
        del self._ranks[rank.id.pid]
        if not self._ranks:
            self._no_ranks.set()
        self._callbacks.on_rank_end(rank.id.pid, end)
        self._sweeper.sweep(rank)

    def _zygote_ended(self, end: ZygoteEnd) -> None:
        known = list(self._ranks.values())
        if self._store.child is not None:
            known.append(self._store.child)
        self._sweeper.sweep_strays(self._node_tag, known)
        self._callbacks.on_zygote_end(end)

    def _end_unclaimed(self, message: spawning.Message) -> None:
        """Whoever asked for this process has gone away: nobody else will end it."""
        if isinstance(message, spawning.Forked):
            self._sweeper.kill(ProcessId(message.pid, message.start_time_ticks))

    def _is_own(self, pid: int) -> bool:
        """Whether somebody here waits for this child, so that nobody else reaps or sweeps it."""
        return pid in self._ranks or pid in (self.zygote_pid, self.store_pid)
