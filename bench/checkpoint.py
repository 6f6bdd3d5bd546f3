"""What checkpoints cost a training loop: stepfast beside torch's own ways, in the same run.

    python bench/checkpoint.py                      or: make bench-checkpoint
    python bench/checkpoint.py --quick              a look whether it works
    python bench/checkpoint.py --only storage       one part alone: stepfast, peers, storage, loader

Two ranks, `small` with 512 tokens a rank and step, CPU and Gloo; the bytes in a larger state. Ends
with 1 where a claim is not met, with 2 where something failed.
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
    SPEED_MIN,
    against_peers,
    row,
    storage_claims,
    table,
)
from jobs import HERE, BenchError
from record import QUIET_LOAD, RESULT_VERSION, surroundings
from saved_jobs import Pair, Saves, model_words, peers_job, stepfast_job, storage_job

PARTS = ("stepfast", "peers", "storage", "loader")
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
    blocked: dict[str, list[float]] = {}
    lost: dict[str, list[float]] = {}
    if "stepfast" in parts:
        print("stepfast, in a job ...", flush=True)
        saves, pairs = stepfast_job(args.samples, words, directory / "stepfast")
        rows += loop_rows(pairs, saves)
        blocked["stepfast"], lost["stepfast"] = _ms(saves.blocked_s), _ms(saves.lost_s)
    if "peers" in parts:
        print("the others, in one job ...", flush=True)
        for name, saves in peers_job(args.samples, words, directory / "peers").items():
            rows += save_rows(name, saves)
            blocked[name], lost[name] = _ms(saves.blocked_s), _ms(saves.lost_s)
    if "stepfast" in blocked and "peers" in parts:
        rows += against_peers(blocked, lost)
    if "storage" in parts:
        print("a larger state ...", flush=True)
        rows += storage_rows(args, directory / "storage")
    if "loader" in parts:
        rows += loader_rows()
    if args.quick:  # one sample of another model claims nothing
        rows = [{**line, "limit": None, "limit_is": None, "within_limit": None} for line in rows]
    return rows


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
