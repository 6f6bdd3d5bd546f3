"""The coordinator's and the agent's processes: event loop, signals, last words.

Owns: what a process does around its shell. Does not own: the shells (`coordinator.server`,
`agent.daemon`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import stepfast
from stepfast.agent import memory
from stepfast.agent.daemon import KEPT_MARK, Agent, Script
from stepfast.agent.gate import Checks
from stepfast.checkpoint.arena import job_slots
from stepfast.cli.check import Outlook, check_settings, look_ahead, misfits, obstacles, table
from stepfast.config import JobConfig, metadata_of, split_address
from stepfast.coordinator.journal import (
    EVENTS_FILE,
    History,
    Journal,
    is_held,
    read_history,
)
from stepfast.coordinator.server import JobServer
from stepfast.core.durable import CheckpointSettings
from stepfast.core.faults import is_plain_refusal
from stepfast.core.job_state import JobEnd, JobState, Phase
from stepfast.core.messages import AFTER_FINISH_LIMIT_S, JobSettings
from stepfast.core.node import COORDINATOR_RETURN_LIMIT_S
from stepfast.core.objectives import Objectives
from stepfast.core.policy import Budget
from stepfast.core.terms import NO_GENERATION, NodeId
from stepfast.core.timeouts import timeouts_of
from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, EXIT_USER_ERROR, ConfigError
from stepfast.events import JobEnded, JobOpened
from stepfast.health.command import parsed
from stepfast.health.look import NO_GPUS
from stepfast.observe.console import LAST_WORDS_MARK, PROGRESS_MARK
from stepfast.observe.summary import summarize, write_summary
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.lines import LineWriter
from stepfast.runtime.status_port import Page, StatusPort

SUMMARY_FILE = "summary.json"
CHECKPOINTS_DIRECTORY = "checkpoints"
_PLAIN_PROGRESS_INTERVAL_S = 10.0
_EXIT_AFTER_SIGNAL = 128
_LOCK_LIMIT_S = 60.0  # of records on shared storage, whose last holder's machine is gone


class _Voice:
    """The coordinator's lines on standard output."""

    def __init__(self, *, is_marked: bool) -> None:
        self._is_marked = is_marked
        self._shown_at = 0.0
        self._lines = LineWriter(sys.stdout)

    def say(self, line: str) -> None:
        self._write(f"[stepfast] {line}")

    def say_progress(self, line: str) -> None:
        """Marked: every time, for `stepfast run` to show in place; plain: now and then."""
        if self._is_marked:
            self._write(f"{PROGRESS_MARK}{line}")
        elif time.monotonic() - self._shown_at >= _PLAIN_PROGRESS_INTERVAL_S:
            self._shown_at = time.monotonic()
            self._write(f"[stepfast] {line}")

    def say_last(self, text: str) -> None:
        for line in text.splitlines():
            self._write(f"{LAST_WORDS_MARK}{line}" if self._is_marked else line)

    def flush(self) -> None:
        self._lines.flush()

    def _write(self, line: str) -> None:
        self._lines.write(line + "\n")


def serve_coordinator(
    config: JobConfig,
    *,
    token: str | None,
    listen_fd: int | None,
    script_name: str,
    is_marked: bool,
    is_restarted: bool,
    is_replaceable: bool,
    check_of: str | None,
) -> int:
    """Serve one job to its end; its exit code. `is_restarted`: a killed one came back for it;
    `is_replaceable`: so may this one be, and it is known from the records whether it came back;
    `check_of`: only a check, of the job in that directory (empty: in a new one).
    """
    outlook = None if check_of is None else _look_ahead(config, check_of)
    if outlook is not None:
        # Wherever they were set: a check leaves nothing, and is no part of the job.
        config = replace(config, summary="", job_id="")
    clock = SystemClock()
    job_dir = Path(config.job_dir or new_job_dir()).resolve()
    listener = socket.socket(fileno=listen_fd) if listen_fd is not None else listen(config.listen)
    status_listener = _status_listener(config, split_address(config.listen)[0])
    lock_limit_s = _LOCK_LIMIT_S if is_replaceable else 0.0
    journal = Journal(job_dir, clock, config.job_id, lock_limit_s=lock_limit_s)
    is_restarted = is_restarted or (is_replaceable and _goes_on(journal.history))
    if not is_restarted:
        _refuse_finished(journal.history, job_dir, config)
    voice = _Voice(is_marked=is_marked)
    state = _first_state(config, journal, job_dir, clock.monotonic(), is_restarted=is_restarted)
    if is_replaceable:
        state = replace(state, rejoin_limit_s=COORDINATOR_RETURN_LIMIT_S + state.rejoin_limit_s)
    if outlook is not None:
        state = replace(state, settings=check_settings(state.settings, outlook))
    if listen_fd is None:
        host, port = listener.getsockname()[:2]
        voice.say(f"listening on {host}:{port}")
    opened = JobOpened(
        job_id=journal.job_id,
        nodes=config.nodes,
        nproc_per_node=config.nproc_per_node,
        script=script_name,
        stepfast_version=stepfast.__version__,
        resumes=is_restarted,
    )
    serving = _serve_job(
        state,
        journal,
        voice,
        token,
        listener,
        opened,
        status_listener,
        is_replaceable=is_replaceable,
    )
    state = asyncio.run(serving)
    if is_replaceable and state.end is None:
        voice.say("this coordinator leaves, the job goes on; another one comes back for it")
        voice.flush()
        journal.close()
        return _EXIT_AFTER_SIGNAL + signal.SIGTERM
    code = _conclude(state.end, journal, voice, config, is_check=outlook is not None)
    if state.end is not None and state.end.keep_memory:
        _keep_memory(job_slots(config.memory_dir, journal.job_id))
    if outlook is not None and code == EXIT_FINISHED:
        code = _conclude_check(outlook, state, voice)
    voice.flush()
    return code


async def _serve_job(
    state: JobState,
    journal: Journal,
    voice: _Voice,
    token: str | None,
    listener: socket.socket,
    opened: JobOpened,
    status_listener: socket.socket | None,
    *,
    is_replaceable: bool,
) -> JobState:
    server = JobServer(
        state,
        journal=journal,
        clock=SystemClock(),
        token=token,
        say=voice.say,
        say_progress=voice.say_progress,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        name = signal.Signals(number).name
        loop.add_signal_handler(number, server.stop, name, _EXIT_AFTER_SIGNAL + number)
    if is_replaceable:
        loop.add_signal_handler(signal.SIGTERM, server.leave)
    with _showing(server.status.pages(), status_listener):
        await server.run(listener, opened)
    return server.state


@contextlib.contextmanager
def _showing(
    pages: Mapping[str, Callable[[], Page]], listener: socket.socket | None
) -> Iterator[None]:
    """The pages at the socket, where there is one."""
    if listener is None:
        yield
        return
    port = StatusPort(listener, pages)
    port.start()
    try:
        yield
    finally:
        port.close()


def _status_listener(config: JobConfig, host: str) -> socket.socket | None:
    if config.metrics_port == 0:
        return None
    return _listen_at(host, config.metrics_port, "--metrics-port")


def _keep_memory(slots: Path) -> None:
    """For a node of this machine whose agent cannot say it any more."""
    with contextlib.suppress(OSError):
        if not memory.holds_nothing(slots):
            (slots / KEPT_MARK).touch(mode=0o600)


def _conclude(
    end: JobEnd | None, journal: Journal, voice: _Voice, config: JobConfig, *, is_check: bool
) -> int:
    """The summary, and the last words: traceback and one line of cause."""
    summary = summarize(journal.events())
    journal.close()
    places = [journal.directory / SUMMARY_FILE, *([Path(config.summary)] if config.summary else [])]
    unwritten = [text for path in places if (text := _try_write_summary(path, summary)) is not None]
    if end is None:
        return 1
    for fault_text in _never_fired(config, journal.directory):
        voice.say(f"--fault {fault_text} never fired: its step or place was not reached")
    if end.status == "stopped":
        voice.say(f"job stopped at step {summary['steps']}")
    if not (journal.directory / EVENTS_FILE).exists():
        voice.say(f"{EVENTS_FILE} was removed from {journal.directory} while the job ran")
    elif not is_check:  # which removes its own
        voice.say(f"records in {journal.directory}")
    if end.status == "failed":
        fault = end.fault
        if fault is not None and fault.error is not None:
            if not is_plain_refusal(fault.error):
                voice.say_last(fault.error.traceback.rstrip())
        elif fault is not None and fault.log_tail:
            voice.say_last(fault.log_tail)
        where = f"rank {fault.rank}: " if fault is not None and fault.rank is not None else ""
        voice.say_last(f"stepfast: job failed: {where}{end.reason}")
    for text in unwritten:
        voice.say_last(f"stepfast: the job has {end.status}, but {text}")
    return end.exit_code or (EXIT_TRY_AGAIN if unwritten else EXIT_FINISHED)


def _try_write_summary(path: Path, summary: dict[str, Any]) -> str | None:
    """Write it; why it could not be (the job directory was removed, the disk is full)."""
    try:
        write_summary(path, summary)
    except OSError as error:
        return f"its summary cannot be written to {path}: {error.strerror}"
    return None


def _never_fired(config: JobConfig, job_dir: Path) -> list[str]:
    """Injected faults that proved nothing; each one that fires leaves a mark."""
    marks = job_dir / "faults"
    return [text for at, text in enumerate(config.fault) if not (marks / str(at)).exists()]


def _conclude_check(outlook: Outlook, state: JobState, voice: _Voice) -> int:
    """The table, as the last words; what stands in the way of a run is a failure."""
    voice.say_last("\n".join(table(outlook, state)))
    found, unfit = obstacles(outlook, state), misfits(state)
    for obstacle in (*found, *unfit):
        voice.say_last(f"stepfast: a run would fail: {obstacle}")
    if unfit:
        return EXIT_USER_ERROR
    return EXIT_TRY_AGAIN if found else EXIT_FINISHED


def _look_ahead(config: JobConfig, check_of: str) -> Outlook:
    """What a run would find. Raises ConfigError where it would be refused."""
    job_dir = Path(check_of) if check_of else None
    history = History()
    if job_dir is not None:
        if is_held(job_dir):
            text = f"the job directory {job_dir} belongs to a running job"
            raise ConfigError(f"{text}; choose another --job-dir")
        history = read_history(job_dir / EVENTS_FILE)
        _refuse_finished(history, job_dir, config)
    place = job_dir if job_dir is not None else Path(new_job_dir()).resolve()
    return look_ahead(config, _checkpoint_settings(config, place), history, job_dir)


def _goes_on(history: History) -> bool:
    """Whether a replaceable coordinator goes on with the newest run of the records: one that has no
    end, or one whose end is final and may not have been heard by all.
    """
    if history.end is None:
        return history.generation != NO_GENERATION
    return history.end.exit_code in (EXIT_FINISHED, EXIT_USER_ERROR)


def _refuse_finished(history: History, job_dir: Path, config: JobConfig) -> None:
    if not history.finished:
        return
    text = f"the job in {job_dir} has finished; choose another --job-dir"
    if store := _checkpoint_settings(config, job_dir).url:
        text += f"; with --checkpoints {store} and more steps that one goes on from here"
    raise ConfigError(text)


def _first_state(
    config: JobConfig, journal: Journal, job_dir: Path, now: float, *, is_restarted: bool
) -> JobState:
    device = config.device
    if device == "auto":
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    settings = JobSettings(
        job_id=journal.job_id,
        world_size=config.world_size,
        nproc_per_node=config.nproc_per_node,
        job_dir=str(job_dir),
        device=device,
        recovery=config.recovery,
        hang=config.hang,
        hang_floor_s=config.hang_floor_s,
        hang_ceiling_s=config.hang_ceiling_s,
        heartbeat_interval_s=config.heartbeat_interval_s,
        snapshot_interval_steps=config.snapshot_interval_steps,
        memory_dir=config.memory_dir,
        preload=config.preload,
        faults=config.fault,
        checkpoints=_checkpoint_settings(config, job_dir),
    )
    timeouts = timeouts_of(settings)
    history = journal.history
    may_hold = bool(settings.checkpoints.url) and history.generation != NO_GENERATION
    end = history.end if is_restarted else None
    return JobState(
        settings=settings,
        timeouts=timeouts,
        budget=Budget.full(config.restarts_per_hour, now),
        opened_at=now,
        join_limit_s=config.join_limit_s,
        objectives=Objectives(recovery_s=config.slo_recovery_s, steps_lost=config.slo_steps_lost),
        generation=history.generation,
        lineage=history.lineage,
        steps_max=history.steps_max,
        logged_max=history.logged_max,
        phase=Phase.FORMING if end is None else Phase.ENDING,
        end=None if end is None else _end_again(end, now, may_hold=may_hold),
        came_back=is_restarted,
    )


def _checkpoint_settings(config: JobConfig, job_dir: Path) -> CheckpointSettings:
    if config.checkpoints == "none":
        return CheckpointSettings()
    url = config.checkpoints or str(job_dir / CHECKPOINTS_DIRECTORY)
    return CheckpointSettings(
        url=url if "://" in url else str(Path(url).resolve()),
        interval_steps=config.checkpoint_interval_steps,
        interval_s=config.checkpoint_interval_s,
        keep_last=config.keep_checkpoints,
        keep_every_steps=config.keep_every_steps,
        bytes_per_s_max=config.checkpoint_bytes_per_s,
        user=metadata_of(config),
        is_strict=config.on_damage == "stop",
        start_fresh=config.start_fresh,
    )


def _end_again(end: JobEnded, now: float, *, may_hold: bool) -> JobEnd:
    """The end that was decided before; nodes that have not heard of it will be told.

    `may_hold`: slots may hold what was not made durable, and who knew is gone.
    """
    return JobEnd(
        status=end.status,
        exit_code=end.exit_code,
        reason=end.reason,
        deadline=now + AFTER_FINISH_LIMIT_S,
        keep_memory=may_hold and end.status != "finished",
    )


def new_job_dir() -> str:
    """A directory of its own for a job that was given none."""
    return f"stepfast-jobs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def listen(address: str) -> socket.socket:
    """A listening socket; raises ConfigError that names the port's present owner's address."""
    return _listen_at(*split_address(address), "--listen")


def _listen_at(host: str, port: int, flag: str) -> socket.socket:
    address = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{address} is in use; choose another {flag}, or port 0") from error
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
    return listener


def serve_agent(
    config: JobConfig,
    *,
    coordinator: tuple[str, int],
    node: int,
    token: str | None,
    script: str,
    script_args: tuple[str, ...],
    machine_root: str,
) -> int:
    """Serve one node to the job's end; the exit code."""

    checks = Checks(
        command=parsed(config.health_check),
        unknown=config.health_unknown,
        gpus=NO_GPUS if config.device == "cpu" else config.health_gpus,
        efas=config.health_efas,
        limit_s=config.health_limit_s,
        root=Path(machine_root),
    )
    lines = LineWriter(sys.stdout)
    status_listener = _status_listener(config, config.host)

    async def serve() -> int:
        agent = Agent(
            node_id=NodeId(node),
            host=config.host,
            coordinator=coordinator,
            token=token,
            clock=SystemClock(),
            show=lambda line: lines.write(line + "\n"),
            checks=checks,
            script=Script(path=script, args=script_args, working_directory=os.getcwd()),
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, agent.stop, "SIGINT")
        # Whoever sends it gives a grace: a cluster that takes the node, or ends the job.
        loop.add_signal_handler(signal.SIGTERM, lambda: agent.stop("SIGTERM", drains=True))
        with _showing(agent.status.pages(), status_listener):
            return await agent.run(config.join_limit_s)

    code = asyncio.run(serve())
    lines.flush()
    return code
