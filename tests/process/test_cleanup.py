"""Clean-up takes all that a rank started, and nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import SCRIPTS, Job, causes_of, run_job
from stepfast.runtime.spawning import TAG_BYTES, TAG_VARIABLE

LABEL = "stepfast-r1"  # a stranger may have any name


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Job, list[int | None]]]:
    """A job whose rank 1 died with descendants, beside strangers; how these are afterwards."""
    directory = tmp_path_factory.mktemp("swept")
    tagged = {**os.environ, TAG_VARIABLE: "another-node:rank-1".ljust(TAG_BYTES, "_")}
    strangers = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True, env=tagged),
        subprocess.Popen([LABEL, "600"], executable="/bin/sleep"),
    ]
    try:
        job = run_job(directory, SCRIPTS / "parenting.py", directory)
        yield directory, job, [stranger.poll() for stranger in strangers]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_descendants_of_a_dead_rank_are_gone_before_its_replacement_runs(
    swept: tuple[Path, Job, list[int | None]],
):
    directory, job, _ = swept
    assert causes_of(job.summary()) == [("kill", 1)]
    assert len((directory / "family").read_text().split()) == 3
    assert (directory / "left").read_text() == "[]"


def test_a_foreign_process_is_left_alone(swept: tuple[Path, Job, list[int | None]]):
    """Neither a rank's death nor the job's end touches what the job did not start."""
    _, _, ended = swept
    assert ended == [None, None, None]
