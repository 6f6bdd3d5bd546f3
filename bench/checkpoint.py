"""What checkpoints cost a training loop: stepfast beside torch's own ways, in the same run.

    python bench/checkpoint.py                      or: make bench-checkpoint
    python bench/checkpoint.py --quick              a look whether it works
    python bench/checkpoint.py --only storage       one part alone, see PARTS

Two ranks, CPU and Gloo: `small` with 512 tokens a rank and step; the third claim with `medium`'s
1.6 GB of state as well; the bytes alone in a larger state. Ends with 1 where a claim is not met,
with 2 where something failed.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from claims import (
    BOUNDARY_MS_MAX,
    DOES_NOT_SHOW,
    HELD_SHARE_MAX,
    SKETCH,
    SPEED_MIN,
    against_peers,
    row,
    storage_claims,
    table,
)
from jobs import HERE, BenchError
from record import QUIET_LOAD, RESULT_VERSION, surroundings
from saved_jobs import Pair, Saves, model_words, peers_job, stepfast_job, storage_job

PARTS = ("stepfast", "peers", "medium", "storage", "loader")
OWN_SAMPLES = 2  # times as many of `small`: what is lost is a small difference of long turns
MEDIUM_SAMPLES_MAX = 3
MEDIUM_TOKENS = 128  # a turn still takes longer than a copy of the state
LOADER_LIMIT_S = 120.0
Rows = list[dict[str, Any]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=5, help="of each number")
    parser.add_argument(
        "--quick", action="store_true", help="one sample, `debug`, no claims: does it work?"
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--store", type=Path, help="directory to write to (default: temporary)")
    parser.add_argument("--out", type=Path, help="default: bench/results/checkpoint-DATE.jsonl")
    args = parser.parse_args()
    if args.samples < 1:
        parser.error("at least one sample")
    return args


# --- the parts ------------------------------------------------------------------------------------


def loop_rows(pairs: list[Pair], saves: Saves) -> Rows:
    """The first claim."""
    speeds = [sum(pair.without_s) / sum(pair.with_s) for pair in pairs]
    boundary = [1e3 * t for pair in pairs for t in pair.boundary_s]
    fence = [1e3 * t for pair in pairs for t in pair.fence_s]
    held = [(sum(p.boundary_s) + sum(p.fence_s)) / sum(p.with_s) for p in pairs]
    steps = [1e3 * sum(p.without_s) / len(p.without_s) for p in pairs]
    return [
        row(
            "stepfast",
            "speed with a snapshot at every step",
            "ratio",
            speeds,
            at_least=SPEED_MIN,
        ),
        row("stepfast", "held at the boundary", "ms", boundary, at_most=BOUNDARY_MS_MAX),
        row("stepfast", "held at the fence", "ms", fence),
        row("stepfast", "held, share of a step", "ratio", held, at_most=HELD_SHARE_MAX),
        row("stepfast", "step without snapshots", "ms", steps),
        *save_rows("stepfast", saves),
    ]


def save_rows(name: str, saves: Saves) -> Rows:
    return [
        row(name, "blocked", "ms", _ms(saves.blocked_s)),
        row(name, "of it at the boundary", "ms", _ms(saves.boundary_s)),
        row(name, "lost", "ms", _ms(saves.lost_s)),
        row(name, "a turn meanwhile", "ratio", saves.slower),
        row(name, "time to durable", "ms", _ms(saves.durable_s)),
        row(name, "clean turn", "ms", _ms(saves.clean_s)),
    ]


def storage_rows(args: argparse.Namespace, directory: Path) -> Rows:
    """The second claim, and what it is measured against."""
    slots = Path(tempfile.mkdtemp(prefix="stepfast-bench-", dir="/dev/shm"))
    try:
        samples, size_bytes, peaks_mb = storage_job(
            args.samples, directory, slots, is_quick=args.quick
        )
    finally:
        shutil.rmtree(slots, ignore_errors=True)
    rows = [row(*_system_and(what), "ms", _ms(seconds)) for what, seconds in samples.items()]
    rows = [{**r, "bytes_per_rank": size_bytes} for r in rows]
    for name, peak_mb in peaks_mb.items():
        per_rank = peak_mb * 1e6 / 2 / size_bytes
        note = f"{per_rank:.1f} times the state; private memory and /dev/shm of both ranks"
        rows.append(row(name, "peak of memory while saving", "MB", [peak_mb], note=note))
    return rows + storage_claims(samples)


def loader_rows() -> Rows:
    rows = []
    for workers in (0, 8):
        done = subprocess.run(
            [sys.executable, str(HERE / "loader_cost.py"), str(workers)],
            capture_output=True,
            text=True,
            timeout=LOADER_LIMIT_S,
        )
        if done.returncode != 0:
            raise BenchError(f"loader_cost.py {workers}: {done.stderr.strip()[-500:]}")
        words = f"{workers} workers" if workers else "no workers"
        seconds = json.loads(done.stdout.splitlines()[-1])
        rows.append(row("stepfast", f"loader state, {words}", "ms", _ms(seconds)))
    return rows


def of_medium(line: dict[str, Any]) -> dict[str, Any]:
    """The row under the name and with the sketch of the 1.6 GB model."""
    measure = f"{line['measure']}, 1.6 GB"
    return {**line, "measure": measure, "sketch": SKETCH.get(f"{line['system']}: {measure}")}


def why_no_nvrx() -> str:
    """One line; it is nobody's dependency here, so it may well be missing."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "nvrx_probe.py")],
        capture_output=True,
        text=True,
        timeout=LOADER_LIMIT_S,
    )
    if done.returncode == 0:
        return "NVRx's asynchronous writer: it works on this machine and is not measured yet"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["it died"]
    return f"NVRx's asynchronous writer: left out, {lines[-1]}"


# --- the whole ------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, directory: Path) -> Rows:
    rows: Rows = []
    parts = args.only or PARTS
    words = model_words("debug", 64) if args.quick else model_words("small", 512)
    loops = Loops(words, args.samples, directory / "small")
    if "stepfast" in parts:
        pairs = loops.add_stepfast(args.samples * OWN_SAMPLES)
        rows += loop_rows(pairs, loops.found["stepfast"])
    if "peers" in parts:
        loops.add_peers()
        rows += [line for name in loops.peers() for line in save_rows(name, loops.found[name])]
    rows += loops.claims()
    if "medium" in parts:
        words = model_words("debug", 64) if args.quick else model_words("medium", MEDIUM_TOKENS)
        loops = Loops(words, min(args.samples, MEDIUM_SAMPLES_MAX), directory / "medium")
        loops.add_stepfast(min(args.samples, MEDIUM_SAMPLES_MAX))
        loops.add_peers()
        own = [line for name, saves in loops.found.items() for line in save_rows(name, saves)]
        rows += [of_medium(line) for line in own + loops.claims()]
    if "storage" in parts:
        print("a larger state ...", flush=True)
        rows += storage_rows(args, directory / "storage")
    if "loader" in parts:
        rows += loader_rows()
    if args.quick:  # one sample of another model claims nothing
        rows = [{**line, "limit": None, "limit_is": None, "within_limit": None} for line in rows]
    return rows


class Loops:
    """Trainings of one model, with what each system's durable saves cost them."""

    def __init__(self, words: list[str], samples: int, directory: Path) -> None:
        directory.mkdir()
        self._words, self._samples, self._directory = words, samples, directory
        self.found: dict[str, Saves] = {}

    def add_stepfast(self, cycles: int) -> list[Pair]:
        print(f"stepfast, in a job, {' '.join(self._words[:2])} ...", flush=True)
        self.found["stepfast"], pairs = stepfast_job(
            cycles, self._words, self._directory / "stepfast"
        )
        shutil.rmtree(self._directory / "stepfast")  # room for what the others write
        return pairs

    def add_peers(self) -> None:
        print(f"the others, in one job, {' '.join(self._words[:2])} ...", flush=True)
        self.found |= peers_job(self._samples, self._words, self._directory / "peers")

    def peers(self) -> list[str]:
        return [name for name in self.found if name != "stepfast"]

    def claims(self) -> Rows:
        """The third claim, where all that it needs was measured."""
        if "stepfast" not in self.found or not self.peers():
            return []
        blocked = {name: _ms(saves.blocked_s) for name, saves in self.found.items()}
        lost = {name: _ms(saves.lost_s) for name, saves in self.found.items()}
        return against_peers(blocked, lost)


def main() -> int:
    args = parse_args()
    args.samples = 1 if args.quick else args.samples
    around = surroundings(shlex.join(["python", "bench/checkpoint.py", *sys.argv[1:]]))
    around["does_not_show"] = [*DOES_NOT_SHOW, why_no_nvrx()]
    if not around["quiet"]:
        load = around["load_before"]
        print(f"NOT QUIET: load {load:.1f} > {QUIET_LOAD}; the numbers are for a look only\n")
    print(around["does_not_show"][-1])
    directory = Path(tempfile.mkdtemp(prefix="stepfast-bench-", dir=args.store))
    try:
        rows = measure(args, directory)
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    today = datetime.now(UTC).date().isoformat()
    kept = HERE / "results" / f"checkpoint-{today}.jsonl"
    out = args.out or (
        Path(tempfile.gettempdir()) / "checkpoint-quick.jsonl" if args.quick else kept
    )
    out.parent.mkdir(exist_ok=True)
    head = {"v": RESULT_VERSION, "bench": "checkpoint"}
    with out.open("a") as file:
        file.writelines(json.dumps({**head, **line, **around}) + "\n" for line in rows)
    print(f"\n{table(rows)}\n\nwritten to {out}{_plotted(rows, out)}")
    return 1 if any(line["within_limit"] is False for line in rows) else 0


def _plotted(rows: Rows, out: Path) -> str:
    from plot import bars  # its library is needed by nothing else

    return f" and {bars(rows, out.with_suffix('.svg'))}"


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def _system_and(what: str) -> tuple[str, str]:
    system, _, measure = what.partition(": ")
    return system, measure


if __name__ == "__main__":
    sys.exit(main())
