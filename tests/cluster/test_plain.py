"""The same script under python, torchrun and stepfast: the same losses."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cluster.harness import Command, run_job
from stepfast.events import StepLogged

SCRIPT = Path(__file__).parent / "scripts" / "telling.py"
STEPS = 8


def losses_of(command: Command) -> list[str]:
    assert command.wait() == 0, command.console
    command.assert_nothing_left()
    return re.findall(r"^(?:\[.*\] )?loss (\S+)$", command.console, re.MULTILINE)


def test_one_rank_tells_the_same_losses_however_it_was_started(tmp_path: Path):
    with Command(tmp_path / "python", [sys.executable, SCRIPT, STEPS]) as command:
        plain = losses_of(command)
    assert len(plain) == STEPS
    assert under_torchrun(tmp_path, 1) == plain
    assert under_stepfast(tmp_path, 1) == plain


def test_two_ranks_tell_the_same_losses_under_torchrun_and_stepfast(tmp_path: Path):
    plain = under_torchrun(tmp_path, 2)
    assert len(plain) == STEPS
    assert under_stepfast(tmp_path, 2) == plain


def under_torchrun(tmp_path: Path, ranks: int) -> list[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    arguments = [*launcher, "--nproc-per-node", ranks, SCRIPT, STEPS]
    with Command(tmp_path / f"torchrun-{ranks}", arguments) as command:
        return losses_of(command)


def under_stepfast(tmp_path: Path, ranks: int) -> list[str]:
    job = run_job(tmp_path / f"stepfast-{ranks}", SCRIPT, STEPS, layout=(1, ranks))
    logged = [event.values["loss"] for event in job.of_type(StepLogged)]
    told = losses_of(job)
    assert [float(text) for text in told] == pytest.approx(logged, rel=1e-6)
    return told
