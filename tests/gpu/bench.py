"""What a claim about a GPU is, where it is measured, and the report of a run.

Owns: the kinds of outcome, the machine's description, child processes, `gpu-report.json`.
Does not own: the claims (`gpu.claims`) and what they measure.

Never run on a GPU. All of it is executed over the double of `torch.cuda` (tests/fakes/device.py),
where its numbers mean nothing and its verdicts only that the code runs.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

import stepfast
from stepfast.errors import StepfastError

REPORT_VERSION = 1
CHILD_LIMIT_S = 300.0
_HERE = Path(__file__).parent


class Status(StrEnum):
    """What a run says of a claim."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"


class NotRun(Exception):
    """The claim cannot be measured here; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found."""

    holds: bool
    reason: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a claim is measured: on a GPU, or over the double, with small sizes."""

    cuda: Any  # `torch.cuda` or its double
    device: torch.device  # where tensors lie
    directory: Path
    state_bytes: int = 1 << 30
    turns: int = 20
    recoveries: int = 100

    @property
    def is_fake(self) -> bool:
        """Whether no GPU is there: numbers mean nothing."""
        return self.cuda is not torch.cuda

    @property
    def gpu_count(self) -> int:
        """How many there are."""
        return int(self.cuda.device_count())

    @property
    def device_type(self) -> str:
        """`cuda`, or what the double stands on."""
        return self.device.type

    def new_directory(self, name: str) -> Path:
        """One of its own for each claim."""
        path = self.directory / name
        path.mkdir(parents=True)
        return path

    def start_child(self, what: str, *args: object) -> Child:
        """A process of `gpu/children.py`, with a context of its own."""
        return Child([what, *map(str, args)], is_fake=self.is_fake)


class Child:
    """A process that says lines of JSON and is ended in any case. Use it as a context."""

    def __init__(self, arguments: list[str], *, is_fake: bool) -> None:
        paths = [str(_HERE.parent), *sys.path]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        fake = ["--fake"] if is_fake else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu.children", *fake, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def says(self, limit_s: float = CHILD_LIMIT_S) -> dict[str, Any]:
        """Its next line of JSON; what else it prints is kept for the case that none comes."""
        deadline_s = time.monotonic() + limit_s
        assert self.process.stdout is not None, "asked for"
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            self._lines.append(line)
            if time.monotonic() > deadline_s:
                break
        raise AssertionError("the child said nothing more:\n" + "".join(self._lines[-30:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence about a GPU, how it is measured, and what shows it without one."""

    name: str
    says: str
    measure: Callable[[Bench], Outcome]
    gpus: int = 1
    doubles: tuple[str, ...] = ()  # tests that run without a GPU
    not_shown: str = ""  # what a PASS leaves open

    def run(self, bench: Bench | None, why_not: str = "") -> dict[str, Any]:
        """The row of the report; `bench` is None on a machine without a GPU."""
        if bench is None:
            return self.row(Status.NOT_RUN, why_not)
        if bench.gpu_count < self.gpus:
            why = f"needs {self.gpus} GPUs, and there is {bench.gpu_count}"
            return self.row(Status.NOT_RUN, why)
        try:
            outcome = self.measure(bench)
        except NotRun as reason:
            return self.row(Status.NOT_RUN, str(reason))
        except (AssertionError, RuntimeError, OSError, ValueError, StepfastError) as error:
            return self.row(Status.FAIL, f"{type(error).__name__}: {error}")
        status = Status.PASS if outcome.holds else Status.FAIL
        return self.row(status, outcome.reason, outcome.numbers)

    def row(
        self, status: Status, reason: str, numbers: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As it stands in the report."""
        row = {"name": self.name, "status": status.value, "reason": reason}
        return {**row, "numbers": numbers or {}}


def on_this_machine(directory: Path) -> tuple[Bench | None, str]:
    """The bench, or why there is none."""
    if not torch.backends.cuda.is_built():
        return None, f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return None, "torch sees no CUDA device"
    device = torch.device("cuda", torch.cuda.current_device())
    return Bench(cuda=torch.cuda, device=device, directory=directory), ""


def report_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole of `gpu-report.json`."""
    return {
        "version": REPORT_VERSION,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "claims": list(rows),
    }


def machine() -> dict[str, Any]:
    """What makes a number comparable; an empty driver and no GPU where there is none."""
    has_gpu = torch.backends.cuda.is_built() and torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "driver": _asked("driver_version"),
        "gpus": gpus if has_gpu else [],
        "cuda": torch.version.cuda or "",
        "nccl": _nccl_version() if has_gpu else "",
        "torch": torch.__version__,
        "stepfast": stepfast.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _asked(field_name: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.strip()


def summary_lines(report: dict[str, Any]) -> list[str]:
    """For people: one line a claim, and the count."""
    rows = report["claims"]
    width = max(len(row["name"]) for row in rows)
    lines = [f"{row['status']:<8} {row['name']:<{width}}  {row['reason']}" for row in rows]
    counts = {s.value: sum(row["status"] == s.value for row in rows) for s in Status}
    return [*lines, ", ".join(f"{n} {status}" for status, n in counts.items())]
