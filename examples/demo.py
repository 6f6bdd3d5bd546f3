"""The main job through an exception, a kill of rank 0 and a hang, beside one without faults.

    python examples/demo.py            or: make demo
    python examples/demo.py --keep     keep logs, events and summaries, and say where they are

Ends with 0 only if both jobs finished in the same state and every fault cost at most one step.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("train_llama.py")
CLUSTER = ("--nodes", "2", "--nproc-per-node", "2")
# Kind, rank, and at which part of the job: ranks on both nodes, rank 0 among them.
FAULTS = (("exception", 1, 0.25), ("kill", 0, 0.5), ("hang", 3, 0.75))
STEPS_LOST_MAX = 1
PHASES = (
    "detect",
    "interrupt",
    "respawn",
    "rendezvous",
    "build",
    "restore",
    "first_step",
    "total",
)


def run_job(job_dir: Path, steps: int, faults: list[str]) -> dict[str, Any]:
    """Run the job, its console live; its summary, empty where it did not come so far."""
    flags = [part for fault in faults for part in ("--fault", fault)]
    command = [sys.executable, "-m", "stepfast", "run", *CLUSTER, "--job-dir", str(job_dir)]
    command += [*flags, str(SCRIPT), "--size", "debug", "--steps", str(steps)]
    print(f"$ stepfast {' '.join(command[3:])}\n", flush=True)
    # What is compared depends on no setting of the caller's: environment, stepfast.toml.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STEPFAST_")}
    with subprocess.Popen(command, env=environment, cwd=job_dir.parent) as job:
        try:
            code = job.wait()
        except KeyboardInterrupt:
            job.wait()  # it heard the same Ctrl-C and ends in order
            raise
    print(f"\nexit code {code}\n", flush=True)
    summary = job_dir / "summary.json"
    return json.loads(summary.read_text()) if summary.exists() else {}


def recovery_row(recovery: dict[str, Any]) -> list[str]:
    told = [recovery[name] for name in ("kind", "rank", "node", "step", "steps_lost")]
    told += ["yes" if recovery["survivors_kept_pid"] else "NO"]
    return [*map(str, told), *(f"{recovery['seconds'][name] * 1000:.0f}" for name in PHASES)]


def show_table(recoveries: list[dict[str, Any]]) -> None:
    heads = ["kind", "rank", "node", "step", "lost", "same pids", *PHASES]
    rows = [[h.replace("_", " ") for h in heads], *map(recovery_row, recoveries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("Recoveries; times in ms, total from the detection to the first completed step:\n")
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join([cells[0].strip().ljust(widths[0]), *cells[1:]]))
    print()


def wrongs(faulty: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What did not go as promised, in words."""
    found = []
    for name, summary in (("with faults", faulty), ("without faults", plain)):
        if summary.get("status") != "finished":
            found.append(f"the job {name} did not finish")
    if not faulty.get("final_digest") or faulty["final_digest"] != plain.get("final_digest"):
        found.append("the final states differ")
    recoveries = faulty.get("recoveries", [])
    for kind, rank, _ in FAULTS:
        if not any((r["kind"], r["rank"]) == (kind, rank) for r in recoveries):
            found.append(f"no recovery from the {kind} of rank {rank} is recorded")
    for recovery in recoveries:
        what = f"the recovery from the {recovery['kind']} of rank {recovery['rank']}"
        if recovery["steps_lost"] > STEPS_LOST_MAX:
            found.append(f"{what} lost {recovery['steps_lost']} steps")
        if not recovery["survivors_kept_pid"]:
            found.append(f"{what} replaced a survivor")
    if plain.get("recoveries"):
        found.append("the job without faults has recoveries")
    return found


def report(faulty: dict[str, Any], plain: dict[str, Any]) -> int:
    """The table and the verdict; the exit code."""
    show_table(faulty.get("recoveries", []))
    print(f"final state with faults     {faulty.get('final_digest')}")
    print(f"final state without faults  {plain.get('final_digest')}")
    found = wrongs(faulty, plain)
    for wrong in found:
        print(f"WRONG: {wrong}")
    if not found:
        print(f"The same state, bit for bit, after {len(FAULTS)} faults.")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="keep the job directories")
    args = parser.parse_args()
    if args.steps < 8:
        parser.error("--steps: at least 8, so that each fault has a step of its own")
    faults = [f"{kind}@rank={rank},step={int(args.steps * at)}" for kind, rank, at in FAULTS]
    directory = Path(tempfile.mkdtemp(prefix="stepfast-demo-"))
    try:
        faulty = run_job(directory / "faults", args.steps, faults)
        plain = run_job(directory / "plain", args.steps, [])
        return report(faulty, plain)
    finally:
        if args.keep:
            print(f"kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
