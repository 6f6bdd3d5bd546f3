"""What `run.once` built is kept: same objects, new groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.conftest import Reference
from cluster.harness import SCRIPTS, Job, assert_survivors_kept, run_job

SCRIPT = SCRIPTS / "keeping.py"
FAULTS = (
    "exception@rank=1,step=8,at=backward",
    "kill@rank=2,step=16,at=forward",
    "exception@rank=3,step=24,at=optimizer",
)


def run_disturbed(tmp_path: Path, *script_args: str) -> Job:
    flags = [part for fault in FAULTS for part in ("--fault", fault)]
    job = run_job(tmp_path, SCRIPT, tmp_path, *script_args, layout=(1, 4), flags=flags)
    summary = job.summary()
    assert len(summary["recoveries"]) == len(FAULTS)
    assert_survivors_kept(summary)
    return job


@pytest.fixture(scope="module")
def clean_digest(tmp_path_factory: pytest.TempPathFactory, reference_digest: Reference) -> str:
    return reference_digest(SCRIPT, tmp_path_factory.mktemp("clean"), layout=(1, 4))


def test_a_kept_model_uses_the_new_groups(tmp_path: Path, clean_digest: str):
    """A 2 x 2 mesh and a sharded model on it go on, beside a group that nobody holds."""
    summary = run_disturbed(tmp_path).summary()
    assert [r["kept_model"] for r in summary["recoveries"]] == [True] * len(FAULTS)
    assert summary["final_digest"] == clean_digest
    stays = {rank: (tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(4)}
    for rank, lines in stays.items():
        assert len(lines) == len(FAULTS) + 1
        assert [line.endswith("True") for line in lines] == [False, True, True, True]
        objects = {line.rpartition(" ")[0] for line in lines}
        assert len(objects) == (2 if rank == 2 else 1), lines


def test_a_held_group_makes_it_build_again(tmp_path: Path, clean_digest: str):
    """A `ProcessGroup` in the script's own hands would be a dead one: said by an event."""
    job = run_disturbed(tmp_path, "--hold")
    summary = job.summary()
    assert [r["kept_model"] for r in summary["recoveries"]] == [False] * len(FAULTS)
    assert len(job.notes("build again")) >= len(FAULTS)
    assert summary["final_digest"] == clean_digest
