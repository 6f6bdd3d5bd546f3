"""A node's processes in a loop of their own, with everything that they report."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from stepfast.agent.processes import NodeCallbacks, NodeProcesses, RankEnd, RankProcess
from stepfast.agent.zygotes import ZygoteEnd
from stepfast.runtime import spawning
from stepfast.runtime.descendants import ProcessId, ProcessTable

T = TypeVar("T")

READY_LIMIT_S = 60.0
LIMIT_S = 10.0

# What a rank does in these tests, by name; it lies beside the "script", as a user's own module
# would.
ENTRIES = """
import atexit, os, signal, socket, subprocess, sys, time

def tell(sock):
    sock.sendall(b"here")

def wait(sock, script, arguments):
    tell(sock)
    print("written before the end")
    time.sleep(600)
    return 0

def leave(sock, script, arguments):
    atexit.register(print, "exit function ran")
    tell(sock)
    return int(arguments[0])

def fail(sock, script, arguments):
    raise ValueError("of the user's")

def look(sock, script, arguments):
    import gc, torch
    directory = "/proc/self/fd/"
    fds = [os.readlink(directory + n) for n in os.listdir(directory)
        if os.path.exists(directory + n)]
    print("argv", sys.argv)
    print("path", sys.path[0])
    print("cwd", os.getcwd())
    print("added", os.environ.get("ADDED"), "omp", os.environ.get("OMP_NUM_THREADS"))
    print("copies", os.environ.get("GLIBC_TUNABLES"))
    nvml = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    print("nvml", nvml, torch.cuda.is_initialized())
    print("session", os.getsid(0) == os.getpid(), "parent", os.getppid())
    print("stdin", os.readlink("/proc/self/fd/0"), "sockets", sum("socket:" in f for f in fds))
    print("memfds", sum("memfd:" in f for f in fds), "pipes", sum("pipe:" in f for f in fds))
    print("term", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "gc", gc.isenabled())
    print("threads", len(os.listdir("/proc/self/task")))
    print("dynamo", "torch._dynamo" in sys.modules, "fsdp", "torch.distributed.fsdp" in sys.modules)
    tell(sock)
    return 0

def stubborn(sock, script, arguments):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(sock)
    time.sleep(600)

def family(sock, script, arguments):
    sleeper = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", sleeper])
    subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(0)
    os.wait()
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.3)
    tell(sock)
    time.sleep(600)
"""


HARMFUL_AND_MISSING = ("starts_a_thread", "initialises_cuda", "not_installed_anywhere")


class Node:
    """A NodeProcesses with its own loop, and everything that it reported."""

    def __init__(
        self,
        directory: Path,
        preload_names: Sequence[str] = HARMFUL_AND_MISSING,
    ) -> None:
        self.preload_names = preload_names
        self.directory = directory
        self.runner = asyncio.Runner()
        self.closing = contextlib.ExitStack()
        self.rank_ends: dict[int, RankEnd] = {}
        self.store_ends: dict[int, RankEnd] = {}
        self.zygote_ends: list[ZygoteEnd] = []
        self.ready: list[spawning.Ready] = []
        self.notes: list[spawning.PreloadNote] = []
        self.processes = self.run(self._make())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def _make(self) -> NodeProcesses:
        processes = NodeProcesses(
            script=str(self.directory / "script.py"),
            preload_names=self.preload_names,
            log_directory=self.directory,
            callbacks=NodeCallbacks(
                on_rank_end=self.rank_ends.__setitem__,
                on_store_end=self.store_ends.__setitem__,
                on_zygote_end=self.zygote_ends.append,
                on_zygote_ready=self.ready.append,
                on_preload_note=self.notes.append,
            ),
        )
        processes.start()
        return processes

    def launch(self, function: str, *arguments: str) -> spawning.RankLaunch:
        return spawning.RankLaunch(
            script=str(self.directory / "script.py"),
            script_args=list(arguments),
            working_directory="/",
            log_path=str(self.directory / "rank.log"),
            label="sf-rank-0",
            environment={"ADDED": "yes"},
            entry=f"entries:{function}",
        )

    def fork(self, function: str, *arguments: str) -> RankProcess:
        launch = self.launch(function, *arguments)
        rank = self.run(self.processes.fork_rank(launch, timeout_s=READY_LIMIT_S))
        rank.socket.settimeout(LIMIT_S)
        self.closing.enter_context(rank.socket)
        return rank

    def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Let the node's loop run until the condition holds."""

        async def wait() -> None:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await asyncio.sleep(0.001)

        self.run(wait())

    def log(self) -> str:
        return (self.directory / "rank.log").read_text()


def job_directory(directory: Path) -> Path:
    (directory / "entries.py").write_text(ENTRIES)
    (directory / "script.py").write_text("import numpy\nimport entries\n")
    return directory


def below_this_process() -> set[ProcessId]:
    return {entry.id for entry in ProcessTable.read().descendants(os.getpid())}
