"""The agent's shell: one node machine, its ranks' sockets and processes, one link to the
coordinator.

Owns: gathering inputs and performing outputs. Does not own: any decision (`core.node`), how
processes are made and ended (`agent.processes`).
Invariant: what a rank said before its end is taken in before its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfast.agent import memory
from stepfast.agent.durable import DurableWork
from stepfast.agent.first_look import refuse_without_store
from stepfast.agent.gate import JOIN, REJOIN, Checks, Gate, health_message, refusal_of
from stepfast.agent.processes import NodeCallbacks, NodeProcesses, RankEnd, RankProcess
from stepfast.agent.status import NodeStatus
from stepfast.agent.tail import LogTail, log_tail
from stepfast.checkpoint.arena import job_slots, make_private, sealed_slots
from stepfast.core import node
from stepfast.core.messages import (
    FromCoordinator,
    FromRank,
    JobSettings,
    ProbeRanks,
    RankEntered,
    RankQuiet,
    RankReturned,
    RankStart,
    StartGeneration,
    Welcome,
)
from stepfast.core.node_health import HealthReported
from stepfast.core.node_state import (
    CoordinatorConnected,
    CoordinatorLost,
    ForkFailed,
    FromJob,
    FromLocalRank,
    NodeInput,
    NodeNoted,
    NodeState,
    NodeStopRequested,
    NodeTick,
    RankEnded,
    RankForked,
    StoreLost,
    StoreReady,
)
from stepfast.core.outputs import (
    CancelWrite,
    CommitShards,
    EndProcess,
    ForkRank,
    KillRank,
    ListCheckpoints,
    OpenStore,
    Output,
    SendToCoordinator,
    SendToRank,
    WriteSlot,
)
from stepfast.core.terms import NodeId, Rank, SnapshotId
from stepfast.errors import ConfigError, OperatingError, StepfastError, UnfitError
from stepfast.health import limits
from stepfast.runtime.descendants import read_process
from stepfast.runtime.driver import Driver
from stepfast.runtime.ports import Clock
from stepfast.runtime.spawning import RankLaunch
from stepfast.runtime.transport import CoordinatorLink
from stepfast.runtime.wire import AGENT_TO_RANK, RANK_TO_AGENT

KEPT_MARK = "kept"  # beside the nodes' slots: they hold what could not be made durable
_TICK_S = 0.02
_MESSAGES_AT_ONCE = 64  # of one rank, before the loop's other work has its turn
_GARBAGE_NOTED_MAX = 3  # of one process; more says nothing new
_LOOK_S = 0.05  # how often the logs are shown
_READY_LIMIT_S = 120.0  # a zygote imports torch: seconds, on a cold disk a minute
_DRAIN_LIMIT_S = 2.0
_CLOSE_GRACE_S = 1.0
_STORE_PAUSE_S = 0.1  # before a store is tried again, doubled each time
_STORE_PAUSES_MAX = 6  # ... so often
_UNFIT_TELL_LIMIT_S = 20.0  # the coordinator of a job that begins may be on its way

# Behind these messages stands a change of what the slots hold, or of who must know it.
_LOOK_AT_SLOTS = (RankEntered, RankQuiet, RankReturned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the ranks run."""

    path: str
    args: tuple[str, ...]
    working_directory: str


class Agent:
    """One node of a job, in the running event loop."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        host: str,
        coordinator: tuple[str, int],
        token: str | None,
        clock: Clock,
        show: Callable[[str], None],
        script: Script,
        checks: Checks,
    ) -> None:
        """`show` prints one line on the console."""
        self._script = script
        self._node_id = node_id
        self._host = host
        self._clock = clock
        self._tail = LogTail(show)
        self._processes: NodeProcesses | None = None
        self._durable: DurableWork | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rank_of_pid: dict[int, tuple[Rank, int]] = {}
        self._process_of: dict[Rank, RankProcess] = {}
        self._log_of: dict[Rank, Path] = {}
        self._garbage: Counter[tuple[Rank, int]] = Counter()  # by process
        self._settings: JobSettings | None = None
        self._store_failures = 0  # in a row
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._link = CoordinatorLink(
            coordinator,
            token=token,
            on_connected=self._connected,
            on_message=self._from_coordinator,
            on_lost=lambda: self._feed(CoordinatorLost()),
            before_joining=self._pass_gate,
        )
        self._gate = Gate(checks, clock)
        self._health: HealthReported | None = None  # of the last look, if there was any
        self._has_joined = False
        state = NodeState(node=node_id, host=host, pid=os.getpid(), slot_root="", log_root="")
        self._driver: Driver[NodeState, NodeInput] = Driver(node.step, state, self, clock)
        self.status = NodeStatus(clock, lambda: self._driver.state)

    def stop(self, reason: str, *, drains: bool = False) -> None:
        """End this node in order; `drains`: what it holds may be made durable first."""
        self._feed(NodeStopRequested(reason, drains))

    async def run(self, join_limit_s: float) -> int:
        """Serve until the job is over here; the exit code."""
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self._fail(
                context.get("exception") or OperatingError(context["message"])
            )
        )
        link = asyncio.create_task(self._link.keep(join_limit_s))
        ticking = asyncio.create_task(self._tick())
        try:
            ended = asyncio.ensure_future(self._exit)
            waits: set[asyncio.Future[Any]] = {link, ticking, ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in (link, ticking):
                if task.done() and not self._exit.done():
                    task.result()
            return self._exit.result()
        finally:
            ticking.cancel()
            await self._link.drain(_DRAIN_LIMIT_S)
            link.cancel()
            await self._close()

    async def _close(self) -> None:
        if self._processes is not None:
            await self._processes.close(_CLOSE_GRACE_S)
        self._tail.finish()
        if self._durable is not None:
            self._durable.close(is_job_over=self._driver.state.is_job_over)
        if self._settings is None or not self._driver.state.is_job_over:
            return  # a node that only left may be needed again
        slot_root = Path(self._driver.state.slot_root)
        finish = self._driver.state.finish
        is_wanted = finish is not None and finish.keep_memory
        is_needed = is_wanted and not memory.holds_nothing(slot_root.parent)
        if is_needed or memory.has_set_aside(slot_root):
            (slot_root.parent / KEPT_MARK).touch(mode=0o600)
            return
        # An orderly end of the job leaves nothing.
        shutil.rmtree(slot_root, ignore_errors=True)
        with contextlib.suppress(OSError):
            slot_root.parent.rmdir()  # goes with the last node

    async def _tick(self) -> None:
        looked_at = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            self.status.turned()
            ranks = self._driver.state.ranks.items()
            awaited = [r for r, local in ranks if local.is_leaving or local.is_watched]
            writes = () if self._durable is None else self._durable.signs()
            self._feed(NodeTick(self._stopped_of(awaited), writes))
            if self._clock.monotonic() - looked_at >= _LOOK_S:
                looked_at = self._clock.monotonic()
                self._tail.look()
                self._mend_memory()

    def _mend_memory(self) -> None:
        """For the next run: ranks lay their slots anew, and say so."""
        settings = self._settings
        if settings is not None:
            with contextlib.suppress(OSError, OperatingError):  # no room, or gone: the next look
                memory.mend(Path(self._driver.state.slot_root), _layout_of(settings))

    def _feed(self, given: NodeInput) -> None:
        self._driver.feed(given)

    def _spawn(self, work: asyncio.Task[None]) -> None:
        self._tasks.add(work)
        work.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, work: asyncio.Task[None]) -> None:
        self._tasks.discard(work)
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """What fails in the loop ends this process: a node that is half there is worse than
        none.
        """
        if not self._exit.done():
            self._exit.set_exception(error)

    # --- the gate --------------------------------------------------------------------------------

    async def _pass_gate(self) -> None:
        """Before the first connection and whenever one has ended. Raises UnfitError where this node
        may not join, behind having told the coordinator why.
        """
        seen = await self._gate.look(REJOIN if self._has_joined else JOIN)
        if seen is None:
            return
        admitted = self._gate.admits(seen)
        self.status.health = {f.check: f.verdict.value for f in seen.findings}
        self._health = health_message(self._node_id, seen, admitted=admitted)
        if not admitted:
            await self._link.tell_once(self._health, _UNFIT_TELL_LIMIT_S)
            raise UnfitError(refusal_of(seen))

    def _connected(self) -> None:
        self._has_joined = True
        self._feed(CoordinatorConnected())
        if self._health is not None:
            self._link.send(self._health)

    # --- inputs ----------------------------------------------------------------------------------

    def _from_coordinator(self, message: FromCoordinator) -> None:
        if isinstance(message, Welcome) and self._settings is None:
            try:
                self._prepare(message.settings)
            except (OSError, OperatingError) as error:
                self._fail(OperatingError(f"cannot prepare this node: {error}"))
                return
            except StepfastError as error:
                self._fail(error)
                return
        elif isinstance(message, StartGeneration):
            memory.remove_set_aside(Path(self._driver.state.slot_root))
        is_question = isinstance(message, ProbeRanks)
        stopped = self._stopped_of(self._process_of) if is_question else frozenset()
        self._feed(FromJob(message, stopped))

    def _stopped_of(self, ranks: Iterable[Rank]) -> frozenset[Rank]:
        processes = ((rank, self._process_of.get(rank)) for rank in ranks)
        return frozenset(rank for rank, p in processes if p is not None and _is_stopped(p.pid))

    def _prepare(self, settings: JobSettings) -> None:
        """The first welcome: directories, zygote."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        too_few = limits.too_few_files(soft, settings.nproc_per_node, settings.world_size)
        if too_few is not None:
            raise ConfigError(too_few)
        job = job_slots(settings.memory_dir, settings.job_id)
        slot_root = job / f"node-{self._node_id}"
        make_private(slot_root.parent)
        found = memory.settle_layout(slot_root, _layout_of(settings))
        (slot_root.parent / KEPT_MARK).unlink(missing_ok=True)
        log_root = Path(settings.job_dir) / "logs"
        log_root.mkdir(parents=True, exist_ok=True)
        self._driver.state = node.with_places(self._driver.state, str(slot_root), str(log_root))
        callbacks = NodeCallbacks(
            on_rank_end=self._rank_ended,
            on_store_end=lambda pid, end: self._feed(StoreLost(f"store (pid {pid}) ended: {end}")),
            on_preload_note=lambda note: self._note("preload", f"{note.module}: {note.reason}"),
            on_zygote_end=lambda end: self._note("zygote ended", str(end)),
            on_stuck=lambda entries: self._note("stuck processes", str(entries)),
        )
        log_directory = log_root / f"node-{self._node_id}"
        log_directory.mkdir(exist_ok=True)
        self._processes = NodeProcesses(
            script=self._script.path,
            log_directory=log_directory,
            callbacks=callbacks,
            preload_names=settings.preload,
        )
        self._processes.start()
        self._durable = DurableWork(settings, slot_root, self._feed)
        self._settings = settings
        if found.problem is not None:
            self._note("memory of another layout", found.problem)
        refusal = refuse_without_store(found, settings.checkpoints)
        if refusal is not None:
            self._feed(refusal)

    def _note(self, topic: str, text: str) -> None:
        self._feed(NodeNoted(topic, text))

    def _rank_ended(self, pid: int, end: RankEnd) -> None:
        rank, incarnation = self._rank_of_pid.pop(pid)
        process = self._process_of[rank]
        if process.pid == pid:
            self._read_rank(rank, incarnation, process.socket, to_the_end=True)
            self._close_rank(process.socket)
            del self._process_of[rank]
        self._tail.look()
        self._feed(
            RankEnded(
                rank=rank,
                incarnation=incarnation,
                exit_code=end.exit_code,
                signal=end.signal,
                log_tail=log_tail(self._log_of[rank]),
                snapshots=self._held_by(rank),
            )
        )

    def _close_rank(self, sock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()

    def _read_rank(
        self, rank: Rank, incarnation: int, sock: socket.socket, *, to_the_end: bool = False
    ) -> None:
        # At the end there is what the socket's buffer holds; before, others want to be heard too.
        for _ in itertools.count() if to_the_end else range(_MESSAGES_AT_ONCE):
            try:
                data = sock.recv(RANK_TO_AGENT.bytes_max + 1)
            except (BlockingIOError, OSError):
                return
            if not data:
                if not to_the_end:
                    asyncio.get_running_loop().remove_reader(sock.fileno())
                return
            try:
                message: FromRank = RANK_TO_AGENT.decode(data)
            except OperatingError as error:
                self._note_garbage(rank, incarnation, str(error))
                continue
            self.status.heard(self._driver.state.ranks.get(rank), message)
            snapshots = self._held_by(rank) if isinstance(message, _LOOK_AT_SLOTS) else None
            self._feed(FromLocalRank(rank, incarnation, message, snapshots))

    def _note_garbage(self, rank: Rank, incarnation: int, text: str) -> None:
        """A process that writes into every descriptor it finds must not fill the log."""
        self._garbage[rank, incarnation] += 1
        if self._garbage[rank, incarnation] <= _GARBAGE_NOTED_MAX:
            self._note("garbage from a rank", f"rank {rank}: {text}")

    def _held_by(self, rank: Rank) -> tuple[SnapshotId, ...]:
        directory = Path(self._driver.state.slot_root) / f"rank-{rank}"
        if not directory.exists():
            return ()
        return tuple(sorted(slot.snapshot for slot in sealed_slots(directory)))

    # --- the machine's hands ---------------------------------------------------------------------

    def perform(self, output: Output) -> None:
        """Carry out one order of the node's machine."""
        match output:
            case SendToCoordinator(message):
                self._link.send(message)
            case SendToRank(rank, message):
                self._send_to_rank(rank, AGENT_TO_RANK.encode(message))
                if isinstance(message, RankStart):
                    self._follow(rank, Path(message.log_path))
            case ForkRank(rank, incarnation):
                self._spawn(asyncio.create_task(self._fork(rank, incarnation)))
            case KillRank(rank):
                if rank in self._process_of:
                    self._end(self._process_of[rank].pid)
            case OpenStore():
                self._spawn(asyncio.create_task(self._open_store()))
            case ListCheckpoints() | WriteSlot() | CancelWrite() | CommitShards():
                self._in_store(output)
            case EndProcess(exit_code):
                if not self._exit.done():
                    self._exit.set_result(exit_code)
            case _:
                raise AssertionError(f"not a node's output: {output}")

    def _in_store(self, order: ListCheckpoints | WriteSlot | CancelWrite | CommitShards) -> None:
        assert self._durable is not None, "the store is named by the welcome"
        match order:
            case ListCheckpoints():
                self._durable.list_checkpoints()
            case WriteSlot():
                self._durable.write(order)
            case CancelWrite():
                self._durable.cancel(order)
            case CommitShards():
                self._durable.commit(order)

    def _end(self, pid: int) -> None:
        assert self._processes is not None, "ranks exist, so processes do"
        self._processes.end_rank(pid)

    def _send_to_rank(self, rank: Rank, data: bytes) -> None:
        process = self._process_of.get(rank)
        if process is None:
            return  # its end is on the way
        try:
            process.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            # A rank that reads nothing is stopped or wedged; the deadline that follows replaces it.
            self._note("rank reads nothing", f"rank {rank}: an order was dropped")
        except OSError:
            return  # its end is on the way

    def _follow(self, rank: Rank, path: Path) -> None:
        self._log_of[rank] = path
        self._tail.follow(path, f"[node {self._node_id} rank {rank}]")

    async def _fork(self, rank: Rank, incarnation: int) -> None:
        assert self._processes is not None and self._settings is not None, (
            "forked after the welcome"
        )
        log = Path(self._driver.state.log_root) / f"rank-{rank}-start-{incarnation}.log"
        if log.is_symlink():
            self._feed(ForkFailed(rank, incarnation, f"{log} is a link; remove it"))
            return
        self._follow(rank, log)
        launch = RankLaunch(
            script=self._script.path,
            script_args=list(self._script.args),
            working_directory=self._script.working_directory,
            log_path=str(log),
            label=f"stepfast-r{rank}",
            environment=self._launcher_names(rank),
        )
        try:
            await self._processes.wait_ready(_READY_LIMIT_S)
            process = await self._processes.fork_rank(launch, socket_kind=socket.SOCK_SEQPACKET)
        except StepfastError as error:
            self._feed(ForkFailed(rank, incarnation, str(error)))
            return
        process.socket.setblocking(False)
        self._process_of[rank] = process
        self._rank_of_pid[process.pid] = (rank, incarnation)
        self._feed(RankForked(rank, incarnation, process.pid))
        loop = asyncio.get_running_loop()
        loop.add_reader(process.socket.fileno(), self._read_rank, rank, incarnation, process.socket)

    def _launcher_names(self, rank: Rank) -> dict[str, str | None]:
        """What scripts expect of a launcher at their top level; ranks stay where they are."""
        settings = self._settings
        assert settings is not None, "forked after the welcome"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % settings.nproc_per_node),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.nproc_per_node),
            "GROUP_RANK": str(self._node_id),
        }

    async def _open_store(self) -> None:
        assert self._processes is not None, "a store is wanted after the welcome"
        try:
            await self._processes.wait_ready(_READY_LIMIT_S)
            port = await self._processes.open_store(self._host)
        except StepfastError as error:
            self._store_failures += 1
            pause_s = _STORE_PAUSE_S * 2 ** min(self._store_failures, _STORE_PAUSES_MAX)
            await asyncio.sleep(pause_s)  # a store that dies at once must not spin
            self._feed(StoreLost(str(error)))
            return
        self._store_failures = 0
        self._feed(StoreReady(port))


def _layout_of(settings: JobSettings) -> str:
    return memory.layout_words(settings.world_size, settings.nproc_per_node)


def _is_stopped(pid: int) -> bool:
    entry = read_process(pid)
    return entry is not None and entry.state in "Tt"
