"""How long a fault stops the job: stepfast and `torchrun --max-restarts`, in the same run.

    python bench/recovery.py                         or: make bench
    python bench/recovery.py --samples 5 --system stepfast --kind exception --kind kill
    python bench/recovery.py --out numbers.jsonl

Four ranks (2 x 2), `debug`, CPU. From the injected fault to the first step that every rank has
completed again. Ends with 1 where a median is over its limit, with 2 where a job failed.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cases import STEPFAST_CASES, TORCHRUN_CASES, Case
from jobs import BenchError, measure
from record import QUIET_LOAD, rows_of, surroundings, table

SAMPLES_MIN = 5  # fewer give no median worth printing, only a look whether the bench works


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=7, help=f"faults a case, from {SAMPLES_MIN}")
    parser.add_argument("--torchrun-samples", type=int, default=5, help="the same, on torchrun")
    parser.add_argument("--system", choices=("stepfast", "torchrun"), help="this one alone")
    parser.add_argument("--kind", action="append", help="this kind alone; may be repeated")
    parser.add_argument("--out", type=Path, help="default: bench/results/recovery-DATE.jsonl")
    args = parser.parse_args()
    if args.samples < 1 or args.torchrun_samples < 1:
        parser.error("at least one sample")
    return args


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    return [
        case
        for case in (*STEPFAST_CASES, *TORCHRUN_CASES)
        if args.system in (None, case.system) and (not args.kind or case.kind in args.kind)
    ]


def main() -> int:
    args = parse_args()
    around = surroundings(shlex.join(["python", "bench/recovery.py", *sys.argv[1:]]))
    if not around["quiet"]:
        load = around["load_before"]
        print(f"NOT QUIET: load {load:.1f} > {QUIET_LOAD}; the numbers are for a look only\n")
    out = args.out or default_out()
    rows = []
    directory = Path(tempfile.mkdtemp(prefix="stepfast-bench-"))
    try:
        for number, case in enumerate(chosen_cases(args)):
            samples = args.samples if case.system == "stepfast" else args.torchrun_samples
            print(f"{case.system}: {case.name}, {samples} faults ...", flush=True)
            found = rows_of(case, measure(case, samples, directory / str(number)))
            write(out, [{**row, **around} for row in found])
            rows += found
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if rows:
            print(f"\n{table(rows)}\n\nwritten to {out}")
    return 1 if any(row["within_limit"] is False for row in rows) else 0


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Add lines to a result; what was measured before a failure counts."""
    with out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def default_out() -> Path:
    results = Path(__file__).resolve().with_name("results")
    results.mkdir(exist_ok=True)
    return results / f"recovery-{datetime.now(UTC).date().isoformat()}.jsonl"


if __name__ == "__main__":
    sys.exit(main())
