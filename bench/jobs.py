"""Run one job per case, several faults in each, and read how long each of them took.

Owns: the two launchers' command lines and reading their records. Does not own: what is measured
(`cases`) or what becomes of it (`record`). All moments are CLOCK_MONOTONIC of this machine: the
injector writes the fault's, the coordinator or the script's own ranks the first completed step's.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import (
    AFTER_DETECTION,
    DETECTION,
    TO_FIRST_STEP,
    TORCHRUN_GROUP_TIMEOUT_S,
    Case,
)

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "train_llama.py"
RANKS = (0, 3, 1, 2)  # on both nodes, in turn
FIRST_STEP, SPACING_STEPS, TAIL_STEPS = 15, 15, 20  # limits are learned before the first fault
TORCHRUN_FIRST_STEP, TORCHRUN_SPACING_STEPS = 3, 3  # nothing is learned there
JOB_LIMIT_S = 900.0
_INJECTED_AT = re.compile(r" t=([0-9.]+)$")


class BenchError(Exception):
    """A job did not go as the measurement needs; no number of it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The samples of one case, in seconds, by measure; `step_s`: a step's time in the same job."""

    samples_s: dict[str, list[float]]
    step_s: float


def measure(case: Case, samples: int, directory: Path) -> Measured:
    """Run the case's job in `directory`; raises BenchError where it failed."""
    directory.mkdir()
    return (_stepfast if case.system == "stepfast" else _torchrun)(case, samples, directory)


def run(command: list[str], directory: Path, **more: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STEPFAST_")} | more
    console = directory / "console"
    with console.open("wb") as out:
        job = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=directory,
            start_new_session=True,
        )
        try:
            code = job.wait(JOB_LIMIT_S)
        except BaseException:
            os.killpg(job.pid, signal.SIGTERM)
            job.wait()
            raise
    if code != 0:
        last = "\n".join(console.read_text(errors="replace").splitlines()[-30:])
        raise BenchError(f"{' '.join(command)} ended with {code}:\n{last}")


def _faults(kind: str, samples: int, first: int, spacing: int) -> list[str]:
    ranks = [RANKS[i % len(RANKS)] for i in range(samples)]
    return [f"{kind}@rank={rank},step={first + i * spacing}" for i, rank in enumerate(ranks)]


# --- stepfast ------------------------------------------------------------------------------------


def _stepfast(case: Case, samples: int, directory: Path) -> Measured:
    script = HERE / "llama_holding_group.py" if case.holds_group else EXAMPLE
    steps = FIRST_STEP + samples * SPACING_STEPS + TAIL_STEPS
    faults = _faults(case.kind, samples, FIRST_STEP, SPACING_STEPS)
    command = [sys.executable, "-m", "stepfast", "run", "--nodes", "2", "--nproc-per-node", "2"]
    command += ["--job-dir", str(directory / "job")]
    command += [part for fault in faults for part in ("--fault", fault)]
    run([*command, str(script), "--steps", str(steps)], directory)
    lines = (directory / "job" / "events.jsonl").read_text().splitlines()
    return _read_events(case, samples, [json.loads(line) for line in lines])


def _read_events(case: Case, samples: int, lines: list[dict[str, Any]]) -> Measured:
    def of(kind: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["event"]["type"] == kind]

    notes = [line["event"]["text"] for line in of("Note")]
    injected = sorted(float(m[1]) for text in notes if (m := _INJECTED_AT.search(text)))
    recovered = of("Recovered")
    if len(injected) != samples or len(recovered) != samples:
        counts = f"{len(injected)} faults injected, {len(recovered)} recoveries, {samples} wanted"
        raise BenchError(f"{case.name}: {counts}")
    found: dict[str, list[float]] = {name: [] for name in case.sketch_s}
    for at, line in zip(injected, recovered, strict=True):
        _check(case, line["event"])
        seen = min(fault["t"] for fault in of("FaultSeen") if fault["t"] > at)
        if not at < seen < line["t"]:
            raise BenchError(f"{case.name}: a recovery without its fault")
        spans = {
            TO_FIRST_STEP: line["t"] - at,
            DETECTION: seen - at,
            AFTER_DETECTION: line["t"] - seen,
        }
        for name in found:
            found[name].append(spans[name])
    last = recovered[-1]
    end = of("JobEnded")[-1]
    tail = end["event"]["steps"] - last["event"]["resumed_step"] - 1
    return Measured(samples_s=found, step_s=(end["t"] - last["t"]) / tail)


def _check(case: Case, event: dict[str, Any]) -> None:
    """A number counts only for what it claims to be."""
    wrong = [
        f"{name} is {event[name]}"
        for name, wanted in (
            ("kind", (case.kind,)),
            ("steps_lost", (0, 1)),
            ("survivors_kept_pid", (True,)),
            ("kept_model", (not case.holds_group,)),
        )
        if event[name] not in wanted
    ]
    if wrong:
        raise BenchError(f"{case.name}, recovery at step {event['step']}: {', '.join(wrong)}")


# --- torchrun ------------------------------------------------------------------------------------


def _torchrun(case: Case, samples: int, directory: Path) -> Measured:
    steps = TORCHRUN_FIRST_STEP + samples * TORCHRUN_SPACING_STEPS
    faults = _faults(case.kind, samples, TORCHRUN_FIRST_STEP, TORCHRUN_SPACING_STEPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "--max-restarts", str(samples)]
    run(
        [*command, str(HERE / "llama_checkpointed.py")],
        directory,
        BENCH_DIR=str(directory),
        BENCH_FAULTS=";".join(faults),
        BENCH_STEPS=str(steps),
        BENCH_GROUP_TIMEOUT_S=str(TORCHRUN_GROUP_TIMEOUT_S),
        OMP_NUM_THREADS="1",  # as torchrun would set it, without its warning
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # or a restart meets the addresses of the last one
    )
    notes = (directory / "faults").read_text().splitlines()
    injected = sorted(float(m[1]) for text in notes if (m := _INJECTED_AT.search(text)))
    turns = [_turns(directory / f"steps-{rank}") for rank in RANKS]
    if len(injected) != samples or any(set(t) != set(range(samples + 1)) for t in turns):
        raise BenchError(f"{case.name} on torchrun: {len(injected)} of {samples} faults injected")
    # Fault n ends restart n; the job is back when every rank has completed a step of restart n + 1.
    resumed = [max(t[i + 1][0] for t in turns) for i in range(samples)]
    spans = [end - at for at, end in zip(injected, resumed, strict=True)]
    last = turns[0][samples]
    step_s = (last[-1] - last[0]) / max(1, len(last) - 1)
    return Measured(samples_s={TO_FIRST_STEP: spans}, step_s=step_s)


def _turns(path: Path) -> dict[int, list[float]]:
    """The moments at which one rank completed steps, by restart."""
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        restart, _, moment = line.split()
        found.setdefault(int(restart), []).append(float(moment))
    return found
