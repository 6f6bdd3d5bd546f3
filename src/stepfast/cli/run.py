"""`stepfast run`: a whole cluster on this machine, of the same processes that pods run.

Owns: the coordinator's and the agents' processes, the console they share. Does not own: the job.
Invariants: nothing that was started here outlives this process in order; the coordinator's exit
code is the job's; an agent that dies is started again as the same node, as a container would be.
"""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from stepfast.agent import memory
from stepfast.agent.daemon import KEPT_MARK
from stepfast.checkpoint.arena import job_slots
from stepfast.cli.parser import AGENT_ONLY, HEALTH
from stepfast.cli.serve import SUMMARY_FILE, listen, new_job_dir
from stepfast.config import SETTINGS, JobConfig
from stepfast.core.durable import DRAIN_LIMIT_S
from stepfast.core.terms import JobId
from stepfast.errors import (
    EXIT_FINISHED,
    EXIT_NODE_UNFIT,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    ConfigError,
)
from stepfast.health import limits
from stepfast.observe.console import LAST_WORDS_MARK, PROGRESS_MARK
from stepfast.runtime.descendants import ProcessTable, try_signal
from stepfast.runtime.lines import LineWriter
from stepfast.runtime.spawning import become_subreaper

# From the first signal; then everything is killed. What is in memory is made durable meanwhile.
_STOP_LIMIT_S = 8.0 + DRAIN_LIMIT_S
_HURRY_LIMIT_S = 1.0  # from the second one
_AGENTS_LIMIT_S = 6.0  # agents may outlive the coordinator by so much
_RESTARTS_MAX = 5
_SERVED_S = 60.0  # who served for so long is not counted as failing again and again
_LEAVE_S = 1.5  # agents of a job that ends leave so long before its coordinator, at the most
_READ_BYTES = 1 << 16
_EXIT_AFTER_SIGNAL = 128


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    rest: bytes = b""
    restarts: int = 0
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None  # when its end was seen

    @property
    def restarts_in_a_row(self) -> int:
        """A child that has served for a while begins with a clean slate."""
        return self.restarts if time.monotonic() - self.started_at < _SERVED_S else 0


class _Console:
    """One writer for everybody's lines; on a terminal the progress line stays at the bottom."""

    def __init__(self, out: IO[str]) -> None:
        self._lines = LineWriter(out)
        self._in_place = out.isatty()
        self._progress = ""
        self._shown_at = 0.0
        self.last_words: list[str] = []

    def line(self, text: str) -> None:
        if text.startswith(LAST_WORDS_MARK):
            self.last_words.append(text.removeprefix(LAST_WORDS_MARK))
        elif text.startswith(PROGRESS_MARK):
            self._show_progress(text.removeprefix(PROGRESS_MARK))
        else:
            self._write(f"\r\x1b[K{text}\n{self._progress}" if self._in_place else f"{text}\n")

    def _show_progress(self, text: str) -> None:
        if self._in_place:
            self._progress = text
            self._write(f"\r\x1b[K{text}")
        elif time.monotonic() - self._shown_at >= 10.0:
            self._shown_at = time.monotonic()
            self._write(f"[stepfast] {text}\n")

    def finish(self) -> None:
        if self._in_place and self._progress:
            self._write("\n")
        self._progress = ""
        for text in self.last_words:
            self._write(f"{text}\n")
        self._lines.flush()

    def _write(self, text: str) -> None:
        self._lines.write(text)


class _Cluster:
    """The children and their output, in one loop."""

    def __init__(
        self,
        config: JobConfig,
        script: str,
        script_args: tuple[str, ...],
        check_of: str | None = None,
    ) -> None:
        """`check_of`: only a check, of the job in this directory (empty: in a new one)."""
        self._config = config
        self._check_of = check_of
        self._script = script
        self._script_args = script_args
        self._console = _Console(sys.stdout)
        self._selector = selectors.DefaultSelector()
        self._stops = 0
        self._told = 0  # how many of them the coordinator has been told of
        self._signal: int = signal.SIGTERM
        self._kill_at: float | None = None
        self._code_of_agent: int | None = None  # of one that left by itself before the job's end
        self._agents: dict[int, _Child] = {}
        self._listener = listen(config.listen)
        self._coordinator = self._start_coordinator()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    def run(self) -> int:
        host, port = self._listener.getsockname()[:2]
        for node in range(self._config.nodes):
            self._agents[node] = self._start_agent(node, f"{host}:{port}")
        while self._coordinator.process.poll() is None or self._try_restart_coordinator():
            self._pump(0.1)
            self._restart_dead_agents(f"{host}:{port}")
            self._pass_stops_on()
        code = self._coordinator.process.returncode
        self._end_agents(at_once=code != EXIT_FINISHED)
        self._console.finish()
        if self._code_of_agent is not None:
            return self._code_of_agent
        if code >= 0:
            return code
        return _EXIT_AFTER_SIGNAL + self._signal if self._stops else EXIT_TRY_AGAIN

    @property
    def coordinator_was_killed(self) -> bool:
        """Whether it could not say how the job ended."""
        return (self._coordinator.process.poll() or 0) < 0

    def stop(self, number: int) -> None:
        """A signal: in order; a second one: now."""
        self._stops += 1
        limit_s = _STOP_LIMIT_S if self._stops == 1 else _HURRY_LIMIT_S
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + limit_s)
        self._signal = number
        os.write(self._wake_write, b"s")

    # --- children --------------------------------------------------------------------------------

    def _start_coordinator(self, *more: str) -> _Child:
        listen_fd = self._listener.fileno()
        arguments = ["coordinator", "--listen-fd", str(listen_fd), "--marked", *more]
        if self._check_of is not None:
            arguments += ["--check-of", self._check_of]
        names = [name for name in SETTINGS if name not in (*AGENT_ONLY, "token_file")]
        arguments += ["--script-name", self._script, *flags_of(self._config, names)]
        return self._start("coordinator", arguments, pass_fds=(listen_fd,))

    def _try_restart_coordinator(self) -> bool:
        """One that was killed comes back on the same port; agents and ranks wait, and train,
        meanwhile.
        """
        old = self._coordinator
        killed = old.process.returncode < 0
        is_wanted = not self._stops and self._check_of is None
        if not killed or not is_wanted or old.restarts_in_a_row >= _RESTARTS_MAX:
            return False
        self._console.line("[stepfast] the coordinator was killed; starting it again")
        self._coordinator = self._start_coordinator("--restarted")
        self._coordinator.restarts = old.restarts_in_a_row + 1
        return True

    def _start_agent(self, node: int, address: str) -> _Child:
        arguments = ["agent", "--coordinator", address, "--node", str(node)]
        arguments += ["--metrics-port", "0"]  # one port of one machine: the coordinator has it
        arguments += flags_of(self._config, ("device", *HEALTH))
        return self._start(f"node {node}", [*arguments, "--", self._script, *self._script_args])

    def _start(self, name: str, arguments: list[str], pass_fds: tuple[int, ...] = ()) -> _Child:
        parent = ["--parent-pid", str(os.getpid())]
        process = subprocess.Popen(
            [sys.executable, "-m", "stepfast", arguments[0], *parent, *arguments[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone
        )
        child = _Child(name, process)
        assert process.stdout is not None, "a pipe was asked for"
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        return child

    def _restart_dead_agents(self, address: str) -> None:
        """One that died or left comes back as the same node; one that cannot serve ends the job."""
        for node, child in list(self._agents.items()):
            code = child.process.poll()
            if code is None or self._stops:
                continue
            child.ended_at = child.ended_at or time.monotonic()
            leaves_with_its_job = code >= 0 and time.monotonic() - child.ended_at < _LEAVE_S
            if code == EXIT_FINISHED or leaves_with_its_job:
                continue
            is_final = code in (EXIT_USER_ERROR, EXIT_NODE_UNFIT)  # this machine stays what it is
            if is_final or child.restarts_in_a_row >= _RESTARTS_MAX:
                self._code_of_agent = code if code > 0 else EXIT_TRY_AGAIN
                self.stop(signal.SIGTERM)
                continue
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._console.line(
                f"[stepfast] the agent of node {node} ended ({how}); starting it again"
            )
            fresh = self._start_agent(node, address)
            fresh.restarts = child.restarts_in_a_row + 1
            self._agents[node] = fresh

    def _pass_stops_on(self) -> None:
        coordinator = self._coordinator.process
        while self._told < self._stops and coordinator.poll() is None:
            coordinator.send_signal(self._signal)
            self._told += 1
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for child in (self._coordinator, *self._agents.values()):
                if child.process.poll() is None:
                    child.process.kill()

    def _end_agents(self, *, at_once: bool) -> None:
        """Most have been told by the coordinator; the others are now. Who does not go is made
        to.
        """
        deadline = time.monotonic() + (0.0 if at_once else _AGENTS_LIMIT_S)
        if self._kill_at is not None:
            deadline = min(deadline, self._kill_at)
        terminated = False
        while any(child.process.poll() is None for child in self._agents.values()):
            self._pump(0.05)
            if time.monotonic() > deadline and not terminated:
                terminated = True
                deadline += 2.0
                for child in self._agents.values():
                    child.process.terminate()
            elif time.monotonic() > deadline:
                for child in self._agents.values():
                    child.process.kill()
        while self._pump(0.0):
            continue
        for entry in ProcessTable.read().descendants(os.getpid()):
            try_signal(entry.id, signal.SIGKILL)

    # --- output ----------------------------------------------------------------------------------

    def _pump(self, wait_s: float) -> bool:
        """Show what the children wrote; whether there was anything."""
        shown = False
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.read(self._wake_read, _READ_BYTES)
                continue
            data = os.read(key.fd, _READ_BYTES)
            child: _Child = key.data
            if not data:
                self._selector.unregister(key.fileobj)
                data = b"\n" if child.rest else b""
            shown = shown or bool(data)
            *lines, child.rest = (child.rest + data).split(b"\n")
            for line in lines:
                self._console.line(line.decode(errors="replace"))
        return shown


def flags_of(config: JobConfig, names: Iterable[str]) -> list[str]:
    """These settings as flags: who is started here gets what this process read."""
    flags: list[str] = []
    for name in names:
        value = getattr(config, name)
        if value in ("", None, ()):
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, tuple):
            for part in value:
                flags += [flag, part]
        else:
            flags += [flag, str(value)]
    return flags


def _remove_slots(config: JobConfig, job_dir: Path) -> None:
    """An orderly end leaves no shared memory, also where an agent had to be killed; but what could
    not be made durable stays for the next run.
    """
    id_file = job_dir / "job-id"
    if id_file.exists():
        slots = job_slots(config.memory_dir, JobId(id_file.read_text().strip()))
        if not (slots / KEPT_MARK).exists() or memory.holds_nothing(slots):
            shutil.rmtree(slots, ignore_errors=True)


def _record_of(job_dir: Path) -> tuple[int, int] | None:
    """Which summary lies there; a coordinator that concludes writes a new one."""
    try:
        status = (job_dir / SUMMARY_FILE).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _check_memory_dir(path: Path) -> None:
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise ConfigError(f"--memory-dir {path} is not a writable directory")


def run_cluster(config: JobConfig, script: str, script_args: tuple[str, ...]) -> int:
    """Run the job to its end; its exit code."""
    from dataclasses import replace

    job_dir = Path(config.job_dir or new_job_dir()).resolve()
    return _run(replace(config, job_dir=str(job_dir)), script, script_args)


def check_cluster(config: JobConfig, script: str, script_args: tuple[str, ...]) -> int:
    """Run the script up to its first step, and say what a whole run would use; the exit code.

    It is a job of its own, in a directory that is removed again; the one that the settings name,
    its memory and its checkpoints are only looked at.
    """
    from dataclasses import replace

    if config.fault:
        raise ConfigError("--check injects no fault; leave --fault out")
    check_of = str(Path(config.job_dir).resolve()) if config.job_dir else ""
    with TemporaryDirectory(prefix="stepfast-check-") as job_dir:
        own = replace(config, job_dir=str(Path(job_dir).resolve()), summary="")
        return _run(own, script, script_args, check_of)


def _run(
    config: JobConfig, script: str, script_args: tuple[str, ...], check_of: str | None = None
) -> int:
    _check_memory_dir(Path(config.memory_dir))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    too_few = limits.too_few_files(soft, config.nproc_per_node, config.world_size)
    if too_few is not None:
        raise ConfigError(too_few)
    become_subreaper()
    cluster = _Cluster(config, script, script_args, check_of)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, frame: cluster.stop(given))
    job_dir = Path(config.job_dir)
    before = _record_of(job_dir)
    code = cluster.run()
    # Without a new record nobody knows whether the memory is needed: the coordinator was killed, or
    # refused to begin, perhaps because the directory is that of a job that runs.
    holds_nothing = config.checkpoints == "none" and cluster.coordinator_was_killed
    if holds_nothing or _record_of(job_dir) != before:
        _remove_slots(config, job_dir)
    return code
