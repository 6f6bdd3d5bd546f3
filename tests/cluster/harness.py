"""Whole jobs for the tests of this tier: `stepfast run` and its parts, watched from outside.

Owns: starting a command with a mark in its environment, waiting with a limit, reading the job's
records, and the look whether anything is left: every process of the job carries the mark, whatever
session or parent it has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from stepfast.coordinator.journal import read_events
from stepfast.events import (
    EventLine,
    FaultSeen,
    GenerationOpened,
    GenerationRunning,
    JobEnded,
    JobOpened,
    NodeJoined,
    Note,
    StepLogged,
)

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TINY = SCRIPTS / "tiny.py"
LLAMA = ROOT / "examples" / "train_llama.py"
OVER_NCCL_LIKE = SCRIPTS / "over_nccl_like.py"
STEPFAST = (sys.executable, "-m", "stepfast")
JOB_LIMIT_S = 150.0
LOOK_S = 0.005
GONE_LIMIT_S = 3.0  # what was killed needs a moment to vanish on a busy machine
_MARK = "JOB_UNDER_TEST"


Over = Callable[..., tuple[object, ...]]
"""`over(script, *arguments)`: the same with the groups that a test is about."""


def over_gloo(*script: object) -> tuple[object, ...]:
    """As the script says."""
    return script


def over_nccl_like(*script: object) -> tuple[object, ...]:
    """With groups that have NCCL's manners; see `fakes.nccl_like`."""
    return (OVER_NCCL_LIKE, *script)


def over_both(*, long: bool = False) -> Any:
    """Makes a test run over either kind; `long`: over the second when there is time alone."""
    marks = [pytest.mark.long] if long else []
    second = pytest.param(over_nccl_like, id="nccl_like", marks=marks)
    return pytest.mark.parametrize("over", [pytest.param(over_gloo, id="gloo"), second])


class Command:
    """One command with everything it starts. Leaves no process behind, however the test ends."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[object],
        *,
        environment: dict[str, str] | None = None,
    ) -> None:
        """`directory`: a place of its own, for its output, working and temporary files."""
        self.mark = uuid.uuid4().hex
        self.may_leave_files = False  # a test that looks at them itself says so
        self.temporary = directory / "tmp"
        self.working = directory / "cwd"
        for path in (self.temporary, self.working):
            path.mkdir(parents=True, exist_ok=True)
        self._output = directory / f"console-{self.mark[:6]}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPFAST_")}
        self._file = self._output.open("wb")
        self.process = subprocess.Popen(
            [str(part) for part in arguments],
            cwd=self.working,
            env={
                **inherited,
                "TMPDIR": str(self.temporary),
                _MARK: self.mark,
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *ending: object) -> None:
        for _ in range(5):  # who forks while we look is met by the next look
            for pid in [self.process.pid, *self.pids()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        self._file.close()

    @property
    def console(self) -> str:
        """What was printed so far."""
        return self._output.read_text(errors="replace")

    @property
    def last_lines(self) -> list[str]:
        """The printed lines, without empty ones."""
        return [line for line in self.console.splitlines() if line.strip()]

    def wait(self, limit_s: float = JOB_LIMIT_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {limit_s} s:\n{self.console[-6000:]}") from None

    def pids(self) -> list[int]:
        """The living processes of the command, itself included."""
        return [pid for pid in _all_pids() if _environment_of(pid).get(_MARK) == self.mark]

    def stores(self) -> list[int]:
        """The store processes."""
        return [pid for pid in self.pids() if _name_of(pid) == "stepfast-store"]

    def zygotes(self) -> list[int]:
        """The zygotes; what they fork has their command line and a name of its own."""
        own = (pid for pid in self.pids() if "stepfast.train.zygote" in _words_of(pid))
        return [pid for pid in own if not _name_of(pid).startswith("stepfast-")]

    def until(self, found: Callable[[], T], what: str, limit_s: float = 60.0) -> T:
        """Look until the answer is true; the answer."""
        deadline = time.monotonic() + limit_s
        while not (answer := found()):
            assert time.monotonic() < deadline, (
                f"{what}: not within {limit_s} s\n{self.console[-6000:]}"
            )
            assert self.process.poll() is None or found(), (
                f"ended before {what}:\n{self.console[-6000:]}"
            )
            time.sleep(LOOK_S)
        return answer

    def assert_nothing_left(self) -> None:
        """No process and no temporary file; sockets end with their processes."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while left := self.pids():
            words = {pid: _words_of(pid) for pid in left}
            assert time.monotonic() < deadline, (
                f"processes are left: {words}\n{self.console[-3000:]}"
            )
            time.sleep(LOOK_S)
        files = self.temporary_files()
        assert not files or self.may_leave_files, f"temporary files are left: {files}"

    def temporary_files(self) -> list[str]:
        """What lies in the temporary directory, the directories themselves left out."""
        return [str(path) for path in self.temporary.rglob("*") if not path.is_dir()]


class Job(Command):
    """A command with a job directory."""

    def __init__(self, directory: Path, arguments: Sequence[object], **options: Any) -> None:
        """`directory / "job"` is the job directory that the arguments name."""
        self.directory = directory / "job"
        super().__init__(directory, arguments, **options)

    def __enter__(self) -> Job:
        return self

    def events(self) -> list[EventLine]:
        """What the log holds so far."""
        return read_events(self.directory / "events.jsonl")

    def of_type(self, kind: type[T]) -> list[T]:
        """The events of one type so far."""
        return [line.event for line in self.events() if isinstance(line.event, kind)]

    def summary(self) -> dict[str, Any]:
        """The job's account; only behind its end."""
        return json.loads((self.directory / "summary.json").read_bytes())

    def step(self) -> int:
        """The newest step that was logged."""
        return max((event.step for event in self.of_type(StepLogged)), default=-1)

    def until_step(self, step: int, limit_s: float = 90.0) -> None:
        """Wait for a logged step."""
        self.until(lambda: self.step() >= step, f"step {step}", limit_s)

    def until_running(self, generation: int = 1, limit_s: float = 90.0) -> None:
        """Wait until every rank of the generation has resumed."""
        self.until(
            lambda: any(e.generation >= generation for e in self.of_type(GenerationRunning)),
            f"generation {generation} runs",
            limit_s,
        )

    def agent_pid(self, node: int = 0) -> int:
        """The newest agent process of a node."""
        return [e.pid for e in self.of_type(NodeJoined) if e.node == node][-1]

    def pid_of(self, rank: int) -> int:
        """The newest process of a rank."""
        return self.of_type(GenerationOpened)[-1].pids[rank]

    def notes(self, topic: str) -> list[Note]:
        """The notes under one topic."""
        return [note for note in self.of_type(Note) if note.topic == topic]

    def assert_nothing_left(self) -> None:
        """Beyond processes: no slot, no half-written record."""
        super().assert_nothing_left()
        identity = self.directory / "job-id"
        if identity.exists():
            slots = Path(f"/dev/shm/stepfast-{os.getuid()}-{identity.read_text().strip()}")
            assert not slots.exists(), f"slots are left: {sorted(slots.rglob('*'))}"
        halves = [str(path) for path in self.directory.rglob("*.new")]
        assert not halves, f"half-written files are left: {halves}"


def run_arguments(
    job_dir: Path,
    script: Path,
    script_args: Sequence[object],
    *,
    layout: tuple[int, int],
    flags: Sequence[object],
) -> list[object]:
    """`stepfast run` of `layout` = (nodes, ranks on each)."""
    nodes, ranks = layout
    size = ("--nodes", nodes, "--nproc-per-node", ranks, "--job-dir", job_dir)
    return [*STEPFAST, "run", *size, *flags, script, *script_args]


def start_job(
    directory: Path,
    script: Path,
    *script_args: object,
    layout: tuple[int, int] = (1, 2),
    flags: Sequence[object] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """Start `stepfast run`; use it as a context."""
    arguments = run_arguments(directory / "job", script, script_args, layout=layout, flags=flags)
    return Job(directory, arguments, environment=environment)


@contextlib.contextmanager
def running(directory: Path, script: Path, *script_args: object, **options: Any) -> Iterator[Job]:
    """A job that the test disturbs; it has to end within the block or is killed."""
    with start_job(directory, script, *script_args, **options) as job:
        yield job


def run_job(
    directory: Path,
    script: Path,
    *script_args: object,
    expected: int | None = 0,
    limit_s: float = JOB_LIMIT_S,
    **options: Any,
) -> Job:
    """A whole job; its exit code and that nothing is left are checked."""
    with start_job(directory, script, *script_args, **options) as job:
        finish(job, expected=expected, limit_s=limit_s)
    return job


def finish(job: Job, *, expected: int | None = 0, limit_s: float = JOB_LIMIT_S) -> dict[str, Any]:
    """Wait for the job's end, check exit code, records and that nothing is left; the summary."""
    code = job.wait(limit_s)
    job.assert_nothing_left()
    if expected is not None:
        assert code == expected, f"exit code {code}, not {expected}:\n{job.console[-8000:]}"
    check_records(job)
    return job.summary()


def check_records(job: Job) -> None:
    """What every job's records promise, whatever happened to it."""
    summary = job.summary()
    events = [line.event for line in job.events()]
    runs = [i for i, e in enumerate(events) if isinstance(e, JobOpened) and not e.resumes]
    ends = [event for event in events[runs[-1] :] if isinstance(event, JobEnded)]
    assert len(ends) == 1, ends
    assert (summary["status"], summary["exit_code"]) == (ends[0].status, ends[0].exit_code)
    for raw in (job.directory / "events.jsonl").read_bytes().splitlines():
        assert msgspec.json.decode(raw)["v"] == 1
    for generation in job.of_type(GenerationOpened):
        for rank, pid in generation.pids.items():
            assert summary["pids"][str(rank)][str(generation.generation)] == pid
    for recovery in summary["recoveries"]:
        seconds = recovery["seconds"]
        assert all(value >= 0 for value in seconds.values()), recovery
        assert seconds["total"] + 0.1 >= max(
            v for k, v in seconds.items() if k not in ("total", "detect")
        )
    if summary["status"] == "finished":
        assert summary["final_digest"]
        steps = [event.step for event in job.of_type(StepLogged)]
        assert steps == sorted(set(steps)), "a step was logged twice or out of order"


def causes_of(summary: dict[str, Any]) -> list[tuple[str, int | None]]:
    """(kind, rank) of every cause of every recovery, in order."""
    return [(cause["kind"], cause["rank"]) for r in summary["recoveries"] for cause in r["causes"]]


def primary_faults(job: Job) -> list[tuple[str, int | None]]:
    """(kind, rank) of the faults that were not believed to be collateral."""
    return [(fault.kind, fault.rank) for fault in job.of_type(FaultSeen) if not fault.collateral]


def assert_survivors_kept(summary: dict[str, Any]) -> None:
    """Each recovery lost at most a step, and no process of a survivor."""
    for recovery in summary["recoveries"]:
        assert recovery["steps_lost"] <= 1, recovery
        assert recovery["survivors_kept_pid"], recovery


def pids_of(summary: dict[str, Any], rank: int) -> list[int]:
    """The rank's process in each generation."""
    return [
        pid for _, pid in sorted(summary["pids"][str(rank)].items(), key=lambda pair: int(pair[0]))
    ]


def free_tcp_port() -> int:
    """A port that nobody listened on a moment ago."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment_of(pid: int) -> dict[str, str]:
    try:
        raw = Path(
            f"/proc/{pid}/environ"
        ).read_bytes()  # empty for what has ended and was not reaped
    except OSError:
        return {}
    pairs = (part.partition(b"=") for part in raw.split(b"\0"))
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def _words_of(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    return f"{line.decode(errors='replace')} {_name_of(pid)}"


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
