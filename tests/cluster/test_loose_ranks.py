"""What user code does not hold together, stepfast does: no rank is two steps ahead of another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.harness import ROOT, SCRIPTS, run_arguments, run_job

SCRIPT = SCRIPTS / "loose.py"


@pytest.mark.parametrize("kind", [(), ("--chain",)], ids=["broadcast", "chain"])
def test_ranks_that_run_apart_still_hold_a_common_step(tmp_path: Path, kind: tuple[str, ...]):
    flags = ("--fault", "kill@rank=1,step=12,at=boundary", "--fault", "kill@rank=0,step=20")
    job = run_job(tmp_path, SCRIPT, *kind, layout=(1, 4), flags=flags)
    summary = job.summary()
    assert [r["steps_lost"] <= 1 for r in summary["recoveries"]] == [True, True]


def test_swallowing_the_interrupt_is_named_with_its_line(tmp_path: Path):
    flags = ("--fault", "exception@rank=0,step=10,at=boundary")
    job = run_job(tmp_path, SCRIPT, "--swallow", layout=(1, 2), flags=flags)
    (note,) = job.notes("Interrupted swallowed")
    assert note.rank == 1
    assert "loose.py:" in note.text
    assert "catch Exception" in note.text


def test_listening_to_everybody_needs_a_token(tmp_path: Path):
    arguments = run_arguments(
        tmp_path / "job", SCRIPT, (), layout=(1, 1), flags=("--listen", "0.0.0.0:0")
    )
    refused = subprocess.run(
        [str(part) for part in arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 78
    assert "needs a token" in refused.stderr


def test_the_demo_ends_in_the_same_state(tmp_path: Path):
    """`make demo`, as a new user runs it."""
    demo = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert demo.returncode == 0, demo.stdout[-3000:]
    assert "same state" in demo.stdout
