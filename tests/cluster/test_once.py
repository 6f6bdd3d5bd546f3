"""What `run.once` built is kept: same objects, new groups."""

from __future__ import annotations

from pathlib import Path

from cluster.conftest import Reference
from cluster.harness import SCRIPTS, assert_survivors_kept, run_job

SCRIPT = SCRIPTS / "keeping.py"
FAULTS = (
    "exception@rank=1,step=8,at=backward",
    "kill@rank=2,step=16,at=forward",
    "exception@rank=3,step=24,at=optimizer",
)


def test_a_kept_model_uses_the_new_groups(tmp_path: Path, reference_digest: Reference):
    """A 2 x 2 mesh, a sharded model on it and a group of the user's own go on."""
    flags = [part for fault in FAULTS for part in ("--fault", fault)]
    job = run_job(tmp_path, SCRIPT, tmp_path, layout=(1, 4), flags=flags)
    summary = job.summary()
    assert_survivors_kept(summary)
    assert [r["kept_model"] for r in summary["recoveries"]] == [True] * len(FAULTS)
    assert len(summary["recoveries"]) == len(FAULTS)
    stays = {rank: (tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(4)}
    for rank, lines in stays.items():
        assert len(lines) == len(FAULTS) + 1
        assert [line.endswith("True") for line in lines] == [False, True, True, True]
        objects = {line.rpartition(" ")[0] for line in lines}
        assert len(objects) == (2 if rank == 2 else 1), lines
    clean_marks = tmp_path / "clean"
    clean_marks.mkdir()
    digest = reference_digest(SCRIPT, clean_marks, layout=(1, 4))
    assert summary["final_digest"] == digest
