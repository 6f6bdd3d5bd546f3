"""What snapshots cost the loop: `small` with a snapshot at every step beside the same without any.

    python bench/staging.py
    python bench/staging.py --pairs 1 --steps 30             a look whether it works

Two ranks, 512 tokens a rank and step, CPU. One pair is two jobs, one after the other, in turn which
comes first. Ends with 1 where a median misses its aim, with 2 where a job failed.
"""

import argparse
import json
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs import HERE, BenchError, run
from record import QUIET_LOAD, RESULT_VERSION, surroundings

SIZE = "small"
TOKENS = {"--batch-size": 2, "--sequence-length": 256}
RANKS = 2
NEVER = 1_000_000  # steps between two snapshots
# The first snapshots are often whole ones (1st, 2nd, 4th, 8th, 16th); later each 64th is.
WARM_UP_TURNS = 18
# Aims, for the median over the pairs.
SPEED_MIN = 0.97  # of the speed without snapshots
BOUNDARY_MS_MAX = 2.0
HELD_SHARE_MAX = 0.03  # boundary and fence, of a step
SKETCH = {
    "speed": "150 MB a rank in 25 ms of one of its core's 1000 ms: 0.975 if nobody ever waits",
    "boundary_ms": "looking at 300 tensors 1.2, thread 0.1, plain values 0.1: 1.4",
    "held_share": "the copy ends in the forward: boundary alone, 0.0015",
}
_HELD = re.compile(r"held ([0-9.]+) ms at the boundary and ([0-9.]+) ms at the fence")


@dataclass(frozen=True, slots=True)
class Loop:
    """One job's turns behind the warm-up, on its slowest rank, and what it said of snapshots."""

    turns_s: list[float]
    note: str

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.turns_s)


def run_loop(interval_steps: int, steps: int, directory: Path) -> Loop:
    directory.mkdir()
    command = [sys.executable, "-m", "stepfast", "run", "--nproc-per-node", str(RANKS)]
    command += ["--job-dir", str(directory / "job")]
    command += ["--snapshot-interval-steps", str(interval_steps)]
    command += [str(HERE / "llama_timed.py"), "--size", SIZE, "--steps", str(steps)]
    command += ["--eval-every", str(NEVER)]
    command += [word for name, value in TOKENS.items() for word in (name, str(value))]
    run(command, directory, BENCH_DIR=str(directory))
    ranks = [read_turns(directory / f"turns-{rank}", steps) for rank in range(RANKS)]
    events = [json.loads(x) for x in (directory / "job" / "events.jsonl").read_text().splitlines()]
    notes = [e["event"]["text"] for e in events if e["event"].get("topic") == "snapshot cost"]
    return Loop(max(ranks, key=sum), notes[-1] if notes else "")


def read_turns(path: Path, steps: int) -> list[float]:
    began = [float(line) for line in path.read_text().splitlines()]
    if len(began) != steps:
        raise BenchError(f"{path.name}: {len(began)} turns of {steps}")
    turns = [after - before for before, after in pairwise(began)]
    return turns[WARM_UP_TURNS:]


def run_pair(number: int, steps: int, directory: Path) -> dict[str, Any]:
    loops: dict[int, Loop] = {}
    for interval in (1, NEVER) if number % 2 else (NEVER, 1):
        loops[interval] = run_loop(interval, steps, directory / f"{number}-{interval}")
    with_s, without_s = loops[1], loops[NEVER]
    held = _HELD.search(with_s.note)
    if held is None:
        raise BenchError(f"no account of snapshots: {with_s.note!r}")
    boundary_ms, fence_ms = map(float, held.groups())
    return {
        "speed": without_s.mean_s / with_s.mean_s,
        "speed_of_medians": statistics.median(without_s.turns_s)
        / statistics.median(with_s.turns_s),
        "boundary_ms": boundary_ms,
        "fence_ms": fence_ms,
        "held_share": (boundary_ms + fence_ms) / 1e3 / with_s.mean_s,
        "step_with_s": with_s.mean_s,
        "step_without_s": without_s.mean_s,
        "note": with_s.note,
    }


def judged(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    middle = {
        name: round(statistics.median(pair[name] for pair in pairs), 4)
        for name in pairs[0]
        if name != "note"
    }
    within = (
        middle["speed"] >= SPEED_MIN
        and middle["boundary_ms"] <= BOUNDARY_MS_MAX
        and middle["held_share"] <= HELD_SHARE_MAX
    )
    limits = {"speed": SPEED_MIN, "boundary_ms": BOUNDARY_MS_MAX, "held_share": HELD_SHARE_MAX}
    return {
        "v": RESULT_VERSION,
        "bench": "staging",
        "size": SIZE,
        "medians": middle,
        "limits": limits,
        "within_limit": within,
        "sketch": SKETCH,
        "pairs": pairs,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each job")
    parser.add_argument("--out", type=Path, help="default: bench/results/staging-DATE.jsonl")
    args = parser.parse_args()
    if args.pairs < 1 or args.steps < WARM_UP_TURNS + 10:
        parser.error(f"at least one pair and {WARM_UP_TURNS + 10} steps")
    return args


def main() -> int:
    args = parse_args()
    around = surroundings(shlex.join(["python", "bench/staging.py", *sys.argv[1:]]))
    if not around["quiet"]:
        load = around["load_before"]
        print(f"NOT QUIET: load {load:.1f} > {QUIET_LOAD}; the numbers are for a look only\n")
    pairs: list[dict[str, Any]] = []
    directory = Path(tempfile.mkdtemp(prefix="stepfast-bench-"))
    try:
        for number in range(args.pairs):
            pairs.append(run_pair(number, args.steps, directory))
            shown = {k: v if k == "note" else round(v, 4) for k, v in pairs[-1].items()}
            print(f"pair {number + 1}: {json.dumps(shown)}", flush=True)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    row = judged(pairs)
    today = datetime.now(UTC).date().isoformat()
    out = args.out or HERE / "results" / f"staging-{today}.jsonl"
    with out.open("a") as file:
        file.write(json.dumps({**row, **around}) + "\n")
    print(f"\n{json.dumps(row['medians'])}\nlimits {json.dumps(row['limits'])}: ", end="")
    print(f"{'ok' if row['within_limit'] else 'MISSED'}\nwritten to {out}")
    return 0 if row["within_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())
