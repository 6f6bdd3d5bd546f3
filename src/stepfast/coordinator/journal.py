"""The event log of a job, `events.jsonl`: what happened, durable where that was asked for.

Owns: the job directory's lock, its identity and its log. Does not own: what the events mean.
Invariants: one coordinator at a time holds a job directory; a line is whole or absent to a reader;
what was persisted is on the disk before the caller goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import IO

import msgspec

from stepfast.core.recovery import Lineage
from stepfast.core.terms import NO_GENERATION, NOTHING_HELD, Generation, JobId, Step
from stepfast.errors import ConfigError, OperatingError
from stepfast.events import (
    EVENTS_VERSION,
    Event,
    EventLine,
    GenerationOpened,
    GenerationRunning,
    JobEnded,
    JobOpened,
    Recovered,
    StepLogged,
)
from stepfast.runtime.disk import open_own, write_own
from stepfast.runtime.ports import Clock

EVENTS_FILE = "events.jsonl"
_LOCK_FILE = "lock"
_ID_FILE = "job-id"
_LOCK_PAUSE_S = 0.2  # between tries, where the lock is waited for
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(EventLine)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What the log of earlier runs of this job directory says."""

    generation: Generation = NO_GENERATION
    lineage: Lineage = Lineage()
    steps_max: Step = Step(0)
    logged_max: Step = Step(-1)
    finished: bool = False
    end: JobEnded | None = None  # of the newest run, if it has one


class Journal:
    """The open log of one job directory, held under its lock."""

    def __init__(
        self, directory: Path, clock: Clock, job_id: str = "", *, lock_limit_s: float = 0.0
    ) -> None:
        """Take the lock; raises ConfigError where another coordinator holds it, or the directory is
        that of a job with another id than the one that is given.

        `lock_limit_s`: the one before may still be on its way out, and is waited for so long.
        """
        self._clock = clock
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(open_own(directory / _LOCK_FILE, os.O_WRONLY), "wb")
        except OSError as error:
            raise _unusable(directory, error) from error
        if not self._try_lock(lock_limit_s):
            self._lock.close()
            text = f"the job directory {directory} belongs to a running job"
            if lock_limit_s:
                raise OperatingError(f"{text}, still after {lock_limit_s:g} s")
            raise ConfigError(f"{text}; choose another --job-dir")
        try:
            self.job_id = self._read_or_make_id(job_id)
            self.history = read_history(directory / EVENTS_FILE)
            self._file: IO[bytes] = _open_log(directory / EVENTS_FILE)
        except OSError as error:
            self._lock.close()
            raise _unusable(directory, error) from error

    def _try_lock(self, limit_s: float) -> bool:
        deadline = self._clock.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock.monotonic() >= deadline:
                    return False
                time.sleep(_LOCK_PAUSE_S)

    def append(self, event: Event, *, durable: bool) -> EventLine:
        """Write one line, and return it; with `durable`, only when it is on the disk."""
        line = EventLine(
            v=EVENTS_VERSION, at=self._clock.wall(), t=self._clock.monotonic(), event=event
        )
        try:
            self._file.write(_ENCODER.encode(line) + b"\n")
            self._file.flush()
            if durable:
                os.fdatasync(self._file.fileno())
        except OSError as error:
            path = self.directory / EVENTS_FILE
            raise OperatingError(f"cannot write {path}: {error.strerror}") from error
        return line

    def events(self) -> list[EventLine]:
        """All of the log, also where somebody removed the file meanwhile."""
        return read_events(Path(f"/proc/self/fd/{self._file.fileno()}"))

    def close(self) -> None:
        """Everything on the disk, the lock given back."""
        self._file.close()
        self._lock.close()

    def _read_or_make_id(self, given: str) -> JobId:
        path = self.directory / _ID_FILE
        if path.exists() and (text := path.read_text().strip()):
            if given not in ("", text):
                self._lock.close()
                raise ConfigError(
                    f"the job directory {self.directory} is that of job {text}, not of {given};"
                    " choose another --job-dir, or leave --job-id out"
                )
            return JobId(text)
        digest = hashlib.sha256(f"{self.directory.resolve()}{secrets.token_hex(8)}".encode())
        job_id = JobId(given or digest.hexdigest()[:12])
        write_own(path, f"{job_id}\n".encode())
        return job_id


def _unusable(directory: Path, error: OSError) -> ConfigError:
    where = error.filename or directory
    return ConfigError(f"cannot use the job directory {directory}: {where}: {error.strerror}")


def is_held(directory: Path) -> bool:
    """Whether a coordinator holds this job directory. Only looks: nothing in it is made or changed.

    The look takes the lock, shared, for an instant.
    """
    try:
        with (directory / _LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no lock, or none that could be looked at: a run will say so
    return False


def read_job_id(directory: Path) -> JobId | None:
    """What the job in this directory is called; None where none has begun."""
    try:
        text = (directory / _ID_FILE).read_text().strip()
    except OSError:
        return None
    return JobId(text) if text else None


def _open_log(path: Path) -> IO[bytes]:
    """The log, ready for a whole line: one that a crash tore gets its end, and stays unreadable."""
    is_torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab")
    if is_torn:
        file.write(b"\n")
        file.flush()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(directory)
    os.close(directory)
    return file


def read_events(path: Path) -> list[EventLine]:
    """All whole lines of a log; a torn last line and types of other versions are passed over."""
    if not path.exists():
        return []
    lines: list[EventLine] = []
    for raw in path.read_bytes().splitlines():
        try:
            lines.append(_DECODER.decode(raw))
        except msgspec.DecodeError:
            continue
    return lines


def read_history(path: Path) -> History:
    """What earlier runs left: the generation's number only grows, the lineage goes on."""
    generation, lineage, steps_max, logged_max = NO_GENERATION, Lineage(), 0, -1
    end: JobEnded | None = None
    for line in read_events(path):
        match line.event:
            case GenerationOpened(generation=g, step=step):
                generation = Generation(g)
                lineage = lineage.opened(generation, NOTHING_HELD if step is None else Step(step))
                steps_max = max(steps_max, step or 0)
            case GenerationRunning(step=step) | Recovered(resumed_step=step):
                steps_max = max(steps_max, step)
            case StepLogged(step=step):
                logged_max = max(logged_max, step)
                steps_max = max(steps_max, step)
            case JobEnded():
                end = line.event
            case JobOpened(resumes=False):
                end = None
    return History(
        generation=generation,
        lineage=lineage,
        steps_max=Step(steps_max),
        logged_max=Step(logged_max),
        finished=end is not None and end.status == "finished",
        end=end,
    )
