"""Commands to a run, one line each, over a Unix socket: for users and tests that break things.

Owns: the socket, the words. Does not own: what follows (`cluster`, `machine`).
Invariants: only this user can connect; an answer is one line that begins with `ok` or `error`.

    pods                      what runs: pod, address is in its lines, containers with restarts
    kill POD CONTAINER        SIGKILL to a container's first process, as an out-of-memory kill does
    signal POD PID [NUMBER]   a signal (default 9) to the process that is PID inside the pod
    delete POD                in order, within its grace; its index gets another pod
    evict POD                 the same by the eviction API: a disruption, not the pod's failure
    lose POD                  its node is gone: nothing of it is asked, or survives
    stop                      the whole run
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from stepfast.errors import OperatingError
from stepfast.k8s.local.cluster import Cluster
from stepfast.k8s.local.life import Pod, PodDeleted

_LINE_BYTES_MAX = 4096
_ANSWER_LIMIT_S = 10.0


class _Refusal(Exception):
    """A command that cannot be done; the text is the answer."""


class Control:
    """Listens beside a running cluster."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        """`path` must not exist yet."""
        self._cluster = cluster
        self._path = path
        self._server: asyncio.AbstractServer | None = None

    async def __aenter__(self) -> Control:
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, self._path, limit=_LINE_BYTES_MAX
            )
        except OSError as error:
            raise OperatingError(f"cannot listen at {self._path}: {error}") from error
        finally:
            os.umask(before)
        return self

    async def __aexit__(self, *ending: object) -> None:
        assert self._server is not None, "entered"
        self._server.close()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                writer.write(f"{self.answer(line.decode(errors='replace'))}\n".encode())
                await writer.drain()
        writer.close()

    def answer(self, line: str) -> str:
        """Do what the line says; the answer's line."""
        try:
            return f"ok {self._do(line.split())}".rstrip()
        except _Refusal as refusal:
            return f"error {refusal}"

    def _do(self, words: list[str]) -> str:
        match words:
            case ["pods"]:
                return "; ".join(self._described())
            case ["kill", name, container]:
                self._kill(self._pod(name), container)
            case ["signal", name, pid]:
                self._signal(self._pod(name), pid, str(int(signal.SIGKILL)))
            case ["signal", name, pid, number]:
                self._signal(self._pod(name), pid, number)
            case ["delete", name]:
                self._cluster.feed(PodDeleted(self._pod(name).name))
            case ["evict", name]:
                self._cluster.feed(PodDeleted(self._pod(name).name, is_disrupted=True))
            case ["lose", name]:
                self._cluster.feed(PodDeleted(self._pod(name).name, is_lost=True))
            case ["stop"]:
                self._cluster.stop(signal.SIGTERM)
            case _:
                raise _Refusal("commands: pods, kill, signal, delete, evict, lose, stop")
        return ""

    def _pod(self, name: str) -> Pod:
        pod = self._cluster.pod_named(name)
        if pod is None:
            raise _Refusal(f"there is no pod {name}")
        return pod

    def _described(self) -> Iterator[str]:
        for _, pod in sorted(self._cluster.state.pods.items()):
            for name, state in pod.containers.items():
                ready = "ready" if state.is_ready else "not ready"
                yield f"{pod.name} {name} {state.status.value} {ready} restarts={state.restarts}"

    def _kill(self, pod: Pod, container: str) -> None:
        pid = self._cluster.first_pid(pod, container)
        if pid == 0:
            raise _Refusal(f"{pod.name} has no running container {container}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _signal(self, pod: Pod, pid: str, number: str) -> None:
        if not (pid.isdecimal() and number.isdecimal()):
            raise _Refusal("signal POD PID [NUMBER]")
        for container in pod.containers:
            first = self._cluster.first_pid(pod, container)
            outside = pid_outside(first, int(pid)) if first else None
            if outside is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(outside, int(number))
                return
        raise _Refusal(f"{pod.name} has no process {pid}")


def pid_outside(first_pid: int, pid: int) -> int | None:
    """This machine's number of the process that is `pid` in the namespace of `first_pid`."""
    try:
        space = os.readlink(f"/proc/{first_pid}/ns/pid")
    except OSError:
        return None
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{entry}/ns/pid") != space:
                continue
            status = Path(f"/proc/{entry}/status").read_text()
            numbers = next(w for w in status.splitlines() if w.startswith("NSpid:")).split()
            if int(numbers[-1]) == pid:
                return int(entry)
    return None


async def tell(path: Path, command: str) -> str:
    """Say one command to the run that listens there; its answer. Raises OperatingError."""
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(f"{command}\n".encode())
            answer = (await reader.readline()).decode().strip()
            writer.close()
    except (OSError, TimeoutError) as error:
        raise OperatingError(f"nobody answers at {path}: {error}") from error
    return answer
