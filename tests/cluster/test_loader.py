"""A tracked loader with workers: every sample exactly once in each epoch, whatever happens."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cluster.harness import SCRIPTS, Job, assert_survivors_kept, causes_of, finish, start_job

SCRIPT = SCRIPTS / "loading.py"
STEPS, STEPS_OF_AN_EPOCH, SAMPLES = 40, 12, 96
# In the first epoch, around its end (the last batch, the first of the next one), and later.
FAULTS = (
    "exception@rank=0,step=5",
    "kill@rank=1,step=11,at=optimizer",
    "exception@rank=1,step=12,at=boundary",
    "kill@rank=0,step=25,at=backward",
    "exception@rank=0,step=35,at=forward",
)


def run_with(directory: Path, faults: tuple[str, ...]) -> Job:
    directory.mkdir()
    flags = [part for fault in faults for part in ("--fault", fault)]
    args = ("--marks", directory, "--steps", STEPS)
    with start_job(directory, SCRIPT, *args, flags=flags) as job:
        job.may_leave_files = True
        finish(job)
    return job


def used_by(directory: Path, rank: int) -> dict[int, list[int]]:
    """What each step used in the end: a step that was run again replaces its first try."""
    used = {}
    for line in (directory / f"rank-{rank}").read_text().splitlines():
        if line.startswith("step "):
            _, step, numbers = line.split(" ", 2)
            used[int(step)] = ast.literal_eval(numbers)
    return used


def stays_of(directory: Path, rank: int) -> list[str]:
    return [
        x for x in (directory / f"rank-{rank}").read_text().splitlines() if x.startswith("stay")
    ]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    directory = tmp_path_factory.mktemp("loader") / "disturbed"
    return directory, run_with(directory, FAULTS)


def test_every_sample_is_used_once_in_each_epoch(disturbed: tuple[Path, Job]):
    directory, job = disturbed
    assert len(causes_of(job.summary())) == len(FAULTS), "one may meet the recovery of another"
    assert_survivors_kept(job.summary())
    used = [used_by(directory, rank) for rank in range(2)]
    for epoch in range(STEPS // STEPS_OF_AN_EPOCH):
        steps = range(epoch * STEPS_OF_AN_EPOCH, (epoch + 1) * STEPS_OF_AN_EPOCH)
        numbers = sorted(n for of_rank in used for step in steps for n in of_rank[step])
        assert numbers == list(range(SAMPLES)), f"epoch {epoch}"


def test_the_order_is_that_of_the_undisturbed_job(disturbed: tuple[Path, Job], tmp_path: Path):
    directory, job = disturbed
    clean = run_with(tmp_path / "clean", ())
    for rank in range(2):
        assert used_by(directory, rank) == used_by(tmp_path / "clean", rank)
    assert job.summary()["final_digest"] == clean.summary()["final_digest"]


def test_the_workers_of_an_interrupted_stay_are_gone(disturbed: tuple[Path, Job]):
    """Whoever enters the function again finds no child of an older stay."""
    directory, _ = disturbed
    for rank in range(2):
        stays = stays_of(directory, rank)
        assert len(stays) == len(FAULTS) + 1
        assert all(stay.endswith("[]") for stay in stays), stays


def test_no_temporary_file_of_a_killed_worker_is_left(disturbed: tuple[Path, Job]):
    """multiprocessing makes sockets there, and whoever is killed does not remove them."""
    _, job = disturbed
    assert job.temporary_files() == []
