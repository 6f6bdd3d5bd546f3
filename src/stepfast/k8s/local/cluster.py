"""The runner's shell: performs the pods' machine's orders on this machine.

Owns: processes of containers, addresses and the hosts file, the clock's ticks, commands of users.
Does not own: any decision (`machine`). Runs in the main thread, whose end is the end of every
container.
Invariants: every wait has a limit; when `run` has returned there is no process of a container, no
mount and no file of the run's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepfast.errors import OperatingError
from stepfast.k8s.local import environment, machine
from stepfast.k8s.local.box import Box
from stepfast.k8s.local.image import Image
from stepfast.k8s.local.life import (
    AskProbe,
    ContainerEnded,
    EndRun,
    Given,
    MakePod,
    Order,
    Pod,
    ProbeAnswered,
    RemovePod,
    Say,
    SignalContainer,
    StartContainer,
    StopAsked,
    Tick,
)
from stepfast.k8s.local.looking import look
from stepfast.k8s.local.model import Container, Workload
from stepfast.k8s.local.volumes import Volumes

_TICK_S = 0.05
_START_LIMIT_S = 30.0  # of a box: mounts and a fork
_LINE_BYTES_MAX = 1 << 20
_NETS = range(1, 255)


@dataclass(slots=True)
class _Process:
    """A container's box, and its first process once it stands."""

    box: asyncio.subprocess.Process
    first_pid: int = 0


class Cluster:
    """One manifest's run, in the running event loop."""

    def __init__(
        self,
        workload: Workload,
        *,
        directory: Path,
        volumes: Volumes,
        image: Image,
        has_namespaces: bool,
        base_delay_s: float,
        show: Callable[[str], None],
    ) -> None:
        """`directory`: of the run's own; `show` prints one line."""
        self._workload = workload
        self._directory = directory
        self._volumes = volumes
        self._image = image
        self._has_namespaces = has_namespaces
        self._show = show
        self.state = machine.first_run(workload, base_delay_s=base_delay_s)
        self._processes: dict[tuple[str, str], _Process] = {}
        self._addresses: dict[str, str] = {}
        self._net = random.choice(_NETS), random.choice(_NETS)
        self._hosts = directory / "hosts"
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()

    async def run(self) -> EndRun:
        """Serve until everything has ended."""
        self._write_hosts()
        ticking = asyncio.create_task(self._tick())
        try:
            waits: set[asyncio.Future[Any]] = {ticking, self._end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():
                ticking.result()
            return self._end.result()
        finally:
            ticking.cancel()
            for task in self._tasks:
                task.cancel()
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.box.kill()  # whose container goes with it
            for process in self._processes.values():
                await process.box.wait()

    def stop(self, signal_number: int) -> None:
        """End the run: in order, and when asked again at once."""
        self.feed(StopAsked(128 + signal_number))

    def feed(self, given: Given) -> None:
        """One step of the machine, and its orders."""
        now = asyncio.get_running_loop().time()
        self.state, orders = machine.step(self.state, given, now)
        for order in orders:
            self._perform(order)

    def pod_named(self, name: str) -> Pod | None:
        """By its name or its host's name."""
        for pod in self.state.pods.values():
            if name in (pod.name, pod.hostname):
                return pod
        return None

    def first_pid(self, pod: Pod, container: str) -> int:
        """The first process of a container, as this machine counts; 0: there is none."""
        process = self._processes.get((pod.name, container))
        return 0 if process is None else process.first_pid

    async def _tick(self) -> None:
        while True:
            self.feed(Tick())
            await asyncio.sleep(_TICK_S)

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._end.done():
            self._end.set_exception(error)

    # --- the machine's hands ---------------------------------------------------------------------

    def _perform(self, order: Order) -> None:
        match order:
            case Say(text):
                self._show(f"[k8s] {text}")
            case MakePod(pod):
                self._make_pod(pod)
            case RemovePod(pod):
                self._addresses.pop(pod.name)
                self._write_hosts()
                self._volumes.remove(pod, self._workload.job(pod.job).pod)
            case StartContainer(pod, container, restarts):
                work = self._run_container(pod, container, restarts)
                self._spawn(asyncio.create_task(work))
            case SignalContainer(pod_name, container, is_kill):
                self._signal(pod_name, container, is_kill=is_kill)
            case AskProbe():
                self._spawn(asyncio.create_task(self._ask(order)))
            case EndRun():
                if not self._end.done():
                    self._end.set_result(order)

    def _make_pod(self, pod: Pod) -> None:
        # Without a hosts file of their own processes know a pod by its address alone, which stays.
        number = pod.number if self._has_namespaces else _place_of(self._workload, pod)
        high, low = divmod(number, 250)
        address = f"127.{self._net[0]}.{(self._net[1] + high) % 255}.{low + 1}"
        self._addresses[pod.name] = address
        self._write_hosts()
        self._volumes.make(pod, self._workload.job(pod.job).pod)
        self._show(f"[k8s] pod {pod.name} at {address}")

    def _write_hosts(self) -> None:
        """In place, for containers have it mounted; one write, for they read it at any time."""
        lines = ["127.0.0.1 localhost"]
        for name, address in sorted(self._addresses.items()):
            pod = self.state.pods.get(name)
            if pod is not None:
                lines.append(f"{address} {' '.join(environment.names_of(self._workload, pod))}")
        data = ("\n".join(lines) + "\n").encode()
        descriptor = os.open(self._hosts, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def _signal(self, pod_name: str, container: str, *, is_kill: bool) -> None:
        process = self._processes.get((pod_name, container))
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if process.first_pid == 0:
                process.box.kill()  # it does not stand yet: nobody could hear
            else:
                os.kill(process.first_pid, signal.SIGKILL if is_kill else signal.SIGTERM)

    async def _run_container(self, pod: Pod, name: str, restarts: int) -> None:
        """From its start to its end, which the machine is told."""
        container = self._workload.job(pod.job).pod.container(name)
        read_end, write_end = os.pipe()
        box = self._box(pod, container, report_fd=write_end)
        try:
            process = _Process(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "stepfast.k8s.local.box",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    limit=_LINE_BYTES_MAX,
                    pass_fds=(write_end,),
                    start_new_session=True,  # the terminal's Ctrl-C is the runner's alone
                )
            )
        finally:
            os.close(write_end)
        self._processes[pod.name, name] = process
        assert process.box.stdin is not None and process.box.stdout is not None, "piped"
        process.box.stdin.write(msgspec.json.encode(box))
        process.box.stdin.close()
        self._spawn(asyncio.create_task(self._print(pod, name, process.box.stdout)))
        try:
            process.first_pid = await _first_pid(read_end)
            code = await process.box.wait()
        finally:
            os.close(read_end)
        if self._processes.get((pod.name, name)) is process:
            del self._processes[pod.name, name]
        code = code if code >= 0 else 128 - code
        self.feed(ContainerEnded(pod.name, name, restarts, code))

    def _box(self, pod: Pod, container: Container, *, report_fd: int) -> Box:
        address = self._addresses[pod.name]
        known = self._image.environment() | environment.variables(
            self._workload, pod, container, address, self._volumes.secret
        )
        command = environment.command(container, known, address)
        template = self._workload.job(pod.job).pod
        binds = [
            (str(self._volumes.mounted(pod, template, m)), m.path, m.is_read_only)
            for m in container.mounts
        ]
        box = Box(
            command=command,
            environment=known,
            working_directory=container.working_directory,
            hostname=pod.hostname,
            report_fd=report_fd,
            runner_pid=os.getpid(),
        )
        if not self._has_namespaces:
            return self._image.plain_box(box, binds, self._names())
        root = self._directory / f"root-{pod.name}-{container.name}"
        root.mkdir(exist_ok=True)
        own = [(str(self._hosts), "/etc/hosts", True), *self._image.binds]
        return msgspec.structs.replace(box, root=str(root), binds=[*own, *binds])

    def _names(self) -> dict[str, str]:
        """Every pod's names and its address, for processes without a hosts file of their own."""
        found = {}
        for pod in self.state.pods.values():
            for name in environment.names_of(self._workload, pod):
                found[name] = self._addresses.get(pod.name, "")
        return found

    async def _print(self, pod: Pod, container: str, stream: asyncio.StreamReader) -> None:
        label = f"[{pod.hostname} {container}]"
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than anybody reads
            if not line:
                return
            self._show(f"{label} {line.decode(errors='replace').rstrip()}")

    async def _ask(self, order: AskProbe) -> None:
        pod = order.pod
        container = self._workload.job(pod.job).pod.container(order.container)
        probe = container.probes[order.probe]
        address = self._addresses.get(pod.name, "")
        pid = self.first_pid(pod, order.container)
        command = list(probe.command)
        if self._has_namespaces and command:
            command = ["nsenter", f"--target={pid}", "--mount", "--pid", "--root", "--wd", *command]
        is_ok, words = await look(probe, address, command)
        self.feed(
            ProbeAnswered(pod.name, order.container, order.restarts, order.probe, is_ok, words)
        )


def _place_of(workload: Workload, pod: Pod) -> int:
    """A number that every pod of this index has."""
    before = 1
    for job in workload.jobs:
        if job.name == pod.job:
            break
        before += job.completions
    return before + pod.index


async def _first_pid(read_end: int) -> int:
    """What the box reports; 0 where it ended before it had anything to report."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bytes] = loop.create_future()

    def take() -> None:
        loop.remove_reader(read_end)
        found.set_result(os.read(read_end, 32))

    loop.add_reader(read_end, take)
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            text = await found
    except TimeoutError as error:
        raise OperatingError(f"a container did not start within {_START_LIMIT_S:g} s") from error
    finally:
        loop.remove_reader(read_end)  # again is no error
    return int(text) if text else 0
