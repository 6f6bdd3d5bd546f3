"""A small cluster for the tests of `train.groups`: rank processes that a test drives over pipes.

Owns: the processes, the store server (one process, one server for each generation), orders and
answers.
Does not own: what a rank does when a generation stands: that is the test's `Workload`.

A rank's second thread plays the monitor: it takes orders and calls `abort` at once; its main thread
does the rest.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from stepfast.core.terms import Generation, Rank
from stepfast.errors import Interrupted
from stepfast.train.backends import GLOO, Backend
from stepfast.train.groups import Groups, Membership
from stepfast.train.storehost import open_server

ANSWER_LIMIT_S = 30.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "stepfast.train.torch_kept"]
)


class Workload(Protocol):
    """What a rank does in a generation; lives as long as its process."""

    def run(
        self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]
    ) -> Any:
        """From a formed generation to its end; returns the answer."""

    def quiet(self, groups: Groups) -> Any:
        """What to report once the generation was left."""


def _serve_stores(pipe: Connection) -> None:
    servers = []
    while pipe.recv() is not None:
        server, port = open_server("127.0.0.1")
        servers = [*servers[-1:], server]
        pipe.send(port)


def gloo() -> Backend:
    """Groups as a job on CPUs has them."""
    return GLOO


def nccl_like() -> Backend:
    """Groups with NCCL's manners."""
    from fakes.nccl_like import group, wiring

    group.register()
    return wiring.NCCL_LIKE


def _serve_rank(
    pipe: Connection,
    make_workload: Callable[[int], Workload],
    rank: int,
    backend_of: Callable[[], Backend],
) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    backend = backend_of()
    backend.prepare(os.environ)
    groups, workload = Groups(backend), make_workload(rank)
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
    aborted = threading.Event()
    times: dict[str, Any] = {}

    def monitor() -> None:
        while True:
            kind, content = pipe.recv()
            if kind == "abort":
                aborted.set()
                times["abort"] = time.monotonic()
                times["first report"] = groups.abort()
            else:
                aborted.clear()
                orders.put((kind, content))
                if kind == "stop":
                    return

    threading.Thread(target=monitor, daemon=True).start()
    while (order := orders.get())[0] != "stop":
        membership, content = order[1]
        begun_s = time.monotonic()
        try:
            groups.form(membership, aborted.is_set)
            times["form"] = time.monotonic() - begun_s
            answer = ("done", workload.run(groups, membership, content, aborted.is_set))
        except (Interrupted, Exception) as error:  # noqa: BLE001 - the test hears of it
            times["left"] = time.monotonic()
            text = "".join(traceback.format_exception(error))
            del error
            if not aborted.wait(5.0):
                pipe.send(("failed", text, times))
                continue
            answer = ("quiet", text)
        begun_s = time.monotonic()
        groups.dissolve()
        times["dissolve"] = time.monotonic() - begun_s
        if answer[0] == "quiet":
            answer = ("quiet", (workload.quiet(groups), answer[1]))
        pipe.send((*answer, dict(times)))
        times.clear()


class Cluster:
    """Ranks 0 to `world_size - 1`, and the store process."""

    def __init__(
        self,
        world_size: int,
        make_workload: Callable[[int], Workload],
        backend_of: Callable[[], Backend] = gloo,
    ) -> None:
        self.world_size = world_size
        self._backend_of = backend_of
        self.generation = 0
        self._make = make_workload
        self._store_pipe, theirs = PROCESSES.Pipe()
        self._store = PROCESSES.Process(target=_serve_stores, args=(theirs,), daemon=True)
        self._store.start()
        self.pipes: dict[int, Any] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Starts a process for the rank, a replacement if there was one."""
        self.pipes[rank], theirs = PROCESSES.Pipe()
        self.processes[rank] = PROCESSES.Process(
            target=_serve_rank, args=(theirs, self._make, rank, self._backend_of), daemon=True
        )
        self.processes[rank].start()

    def replace(self, rank: int) -> None:
        """Ends the rank's process, if it still lives, and starts another."""
        self.processes[rank].kill()
        self.processes[rank].join(ANSWER_LIMIT_S)
        self.start(rank)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)
        if number == signal.SIGKILL:
            self.processes[rank].join(ANSWER_LIMIT_S)

    def open_generation(self, content: Any, *, forming_timeout_s: float = 15.0) -> None:
        """Orders every rank into the next generation."""
        self.generation += 1
        self._store_pipe.send("next")
        port = self._store_pipe.recv()
        for rank, pipe in self.pipes.items():
            membership = Membership(
                generation=Generation(self.generation),
                rank=Rank(rank),
                world_size=self.world_size,
                store_host="127.0.0.1",
                store_port=port,
                forming_timeout_s=forming_timeout_s,
            )
            pipe.send(("form", (membership, content)))

    def abort(self, ranks: list[int] | None = None) -> None:
        for rank in self.pipes if ranks is None else ranks:
            self.pipes[rank].send(("abort", None))

    def answers(
        self, ranks: list[int] | None = None, limit_s: float = ANSWER_LIMIT_S
    ) -> dict[int, Any]:
        """One answer of each rank: (kind, content, times)."""
        found = {}
        for rank in list(self.pipes) if ranks is None else ranks:
            if not self.pipes[rank].poll(limit_s):
                self.signal(rank, signal.SIGUSR1)  # its stacks, to stderr
                threading.Event().wait(0.5)
                raise AssertionError(f"rank {rank} did not answer within {limit_s} s")
            found[rank] = self.pipes[rank].recv()
        return found

    def wait_for_step(self, directory: Path, step: int) -> None:
        """Returns once rank 0 has saved the step's snapshot."""
        deadline_s = time.monotonic() + ANSWER_LIMIT_S
        while not (directory / f"rank-0-step-{step}.pt").exists():
            assert time.monotonic() < deadline_s, f"step {step} was not reached: {self._heard()}"
            threading.Event().wait(0.002)

    def _heard(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes.values() if pipe.poll(0)]

    def close(self) -> None:
        self._store_pipe.send(None)
        for process in [*self.processes.values(), self._store]:
            process.kill()
            process.join(ANSWER_LIMIT_S)
