"""Durable checkpoints of whole jobs: written beside the training, committed whole, gone on from."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Reference
from cluster.harness import SCRIPTS, TINY, Job, finish, run_job, running
from stepfast.checkpoint.catalog import committed, verify
from stepfast.checkpoint.store import open_store
from stepfast.cli.main import main
from stepfast.core.terms import SnapshotId
from stepfast.events import (
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRejected,
    GenerationOpened,
    JobEnded,
    NodeLeft,
    Note,
)

ARGS = ("--steps", 40)
PACED = (*ARGS, "--pace-ms", 30)
LAYOUT = (1, 2)
BY_STEPS = ("--checkpoint-interval-steps", 10)


def opened(job: Job) -> list[tuple[int | None, str]]:
    """Where each generation went on, and from what."""
    return [(event.step, event.source) for event in job.of_type(GenerationOpened)]


def checkpoints(store: Path) -> list[SnapshotId]:
    """What is committed, newest first; each of it whole."""
    opened_store = open_store(store)
    found = committed(opened_store)
    for snapshot in found:
        assert verify(opened_store, snapshot) == []
    return found


def kill_everything(job: Job) -> None:
    job.may_leave_files = True
    for pid in [job.process.pid, *job.pids()]:
        os.kill(pid, signal.SIGKILL)
    job.process.wait()


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def half_way(tmp_path: Path) -> Path:
    """A store with steps 10 and 20 of the job."""
    store = tmp_path / "store"
    flags = ("--checkpoints", store, *BY_STEPS)
    run_job(tmp_path / "first", TINY, "--steps", 20, layout=LAYOUT, flags=flags)
    assert [s.step for s in checkpoints(store)] == [20, 10]
    return store


def test_a_job_leaves_its_last_step_and_the_one_before(tmp_path: Path, reference_digest: Reference):
    job = run_job(tmp_path, TINY, *ARGS, layout=LAYOUT, flags=BY_STEPS)
    assert [s.step for s in checkpoints(job.directory / "checkpoints")] == [40, 30]
    assert [e.step for e in job.of_type(CheckpointCommitted)] == [10, 20, 30, 40]
    assert job.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ((), ("--snapshot-interval-steps", 4)),  # between two snapshots
        (("--behind",), ("--fault", "kill@rank=1,step=9")),  # its last turn counts, and is repeated
    ],
)
def test_a_loop_that_is_left_early_has_its_last_step_too(
    args: tuple[str, ...], flags: tuple[Any, ...], tmp_path: Path, reference_digest: Reference
):
    script = SCRIPTS / "leaving.py"
    job = run_job(tmp_path, script, "--steps", 10, *args, layout=LAYOUT, flags=flags)
    (last,) = checkpoints(job.directory / "checkpoints")
    assert last.step == 10
    expected = reference_digest(TINY, "--steps", 10, layout=LAYOUT)
    assert job.summary()["final_digest"] == expected


def test_another_job_goes_on_from_the_store(
    half_way: Path, tmp_path: Path, reference_digest: Reference
):
    job = run_job(tmp_path, TINY, *ARGS, layout=LAYOUT, flags=("--checkpoints", half_way))
    assert opened(job) == [(20, "checkpoint")]
    assert job.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)
    assert [s.step for s in checkpoints(half_way)] == [40, 20, 10], "another job's stay"
    (said,) = [e.text for e in job.of_type(Note) if "starts from" in e.text]
    assert said.startswith("starts from step 20 of job ")


def test_a_second_job_in_one_store_is_refused(tmp_path: Path):
    store = ("--checkpoints", tmp_path / "store")
    with running(tmp_path / "first", TINY, *PACED, layout=LAYOUT, flags=store) as job:
        job.until_step(1)
        second = run_job(tmp_path / "second", TINY, *ARGS, layout=LAYOUT, flags=store, expected=78)
        assert "and lives; give this job another" in second.of_type(JobEnded)[0].reason
        finish(job)
    assert [s.step for s in checkpoints(tmp_path / "store")] == [40]


def test_another_number_of_ranks_goes_on_from_the_store(half_way: Path, tmp_path: Path):
    for ranks in (1, 3):
        store = shutil.copytree(half_way, tmp_path / f"store-{ranks}")
        flags = ("--checkpoints", store)
        job = run_job(tmp_path / str(ranks), TINY, *ARGS, layout=(1, ranks), flags=flags)
        assert opened(job) == [(20, "checkpoint")]
        assert job.summary()["steps"] == 40


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks_or_an_error(
    half_way: Path, tmp_path: Path, reference_digest: Reference
):
    newest = sorted(half_way.glob("step-000000020-*"))[0]
    flip_a_byte(newest / "rank-00001-of-00002.safetensors")
    flags = ("--checkpoints", half_way)
    strict = run_job(
        tmp_path / "s", TINY, *ARGS, layout=LAYOUT, flags=(*flags, "--strict"), expected=1
    )
    assert "rank-00001-of-00002.safetensors" in strict.of_type(JobEnded)[0].reason
    job = run_job(tmp_path / "f", TINY, *ARGS, layout=LAYOUT, flags=flags)
    assert opened(job) == [(20, "checkpoint"), (10, "checkpoint")]
    (event,) = job.of_type(CheckpointRejected)
    assert "rank-00001-of-00002.safetensors" in event.reason
    assert job.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)


def test_where_all_are_damaged_nothing_begins_anew(half_way: Path, tmp_path: Path):
    for file in half_way.glob("*/rank-00000-*"):
        flip_a_byte(file)
    flags = ("--checkpoints", half_way)
    job = run_job(tmp_path, TINY, *ARGS, layout=LAYOUT, flags=flags, expected=78)
    assert "of 2 checkpoints none can be used" in job.of_type(JobEnded)[0].reason


def test_a_store_that_cannot_be_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("no directory")
    flags = ("--checkpoints", tmp_path / "file" / "store")
    job = run_job(tmp_path, TINY, *ARGS, layout=LAYOUT, flags=flags, expected=1)
    assert "the checkpoint store cannot be used" in job.of_type(JobEnded)[0].reason
    assert opened(job) == []


def test_a_stopped_job_loses_nothing(tmp_path: Path, reference_digest: Reference):
    with running(tmp_path, TINY, *PACED, layout=LAYOUT) as job:
        job.until_step(15)
        job.process.send_signal(signal.SIGTERM)
        finish(job, expected=128 + signal.SIGTERM)
    (stopped,) = checkpoints(job.directory / "checkpoints")
    assert stopped.step >= 15
    again = run_job(tmp_path, TINY, *PACED, layout=LAYOUT)
    assert opened(again)[-1] == (stopped.step, "checkpoint")
    assert again.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)


def test_where_everything_was_killed_memory_is_gone_on_from(
    tmp_path: Path, reference_digest: Reference
):
    with running(tmp_path, TINY, *PACED, layout=LAYOUT) as job:
        job.until_step(15)
        kill_everything(job)
    again = run_job(tmp_path, TINY, *PACED, layout=LAYOUT)
    step, source = opened(again)[-1]
    assert source == "memory"
    assert step is not None and step >= 14, "a step lost, at the most"
    assert again.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)


def test_memory_of_another_layout_is_void_and_never_a_reason_to_begin_anew(tmp_path: Path):
    """Everything is killed before there is a checkpoint, then behind one."""
    with running(tmp_path, TINY, *PACED, layout=LAYOUT) as job:
        job.until_step(15)
        kill_everything(job)
    with running(tmp_path, TINY, *PACED, layout=(1, 1)) as refused:
        refused.may_leave_files = True
        assert refused.wait() == 1
    assert "memory holds steps of another layout" in refused.of_type(JobEnded)[-1].reason
    with running(tmp_path, TINY, *PACED, layout=LAYOUT, flags=BY_STEPS) as job:
        job.until(lambda: job.of_type(CheckpointCommitted), "a checkpoint")
        assert opened(job)[-1][1] == "memory", "it was kept for its own layout"
        durable = job.of_type(CheckpointCommitted)[0].step
        kill_everything(job)
    again = run_job(tmp_path, TINY, *PACED, layout=(1, 3))
    step, source = opened(again)[-1]
    assert source == "checkpoint" and step is not None and step >= durable
    assert again.notes("memory of another layout")
    assert again.summary()["steps"] == 40


def test_a_machine_whose_memory_is_gone_goes_on_from_the_store(
    tmp_path: Path, reference_digest: Reference
):
    with running(tmp_path, TINY, *PACED, layout=(2, 1), flags=BY_STEPS) as job:
        job.until(lambda: len(job.of_type(CheckpointCommitted)) >= 1, "a checkpoint")
        identity = (job.directory / "job-id").read_text().strip()
        os.kill(job.agent_pid(1), signal.SIGKILL)
        job.until(lambda: job.of_type(NodeLeft), "the node is gone")
        shutil.rmtree(f"/dev/shm/stepfast-{os.getuid()}-{identity}/node-1/rank-1")
        summary = finish(job)
    assert opened(job)[-1][1] == "checkpoint"
    assert summary["final_digest"] == reference_digest(TINY, *ARGS, layout=(2, 1))


def test_an_agent_that_dies_while_it_writes_loses_no_checkpoint(
    tmp_path: Path, reference_digest: Reference
):
    """The write of step 20 takes seconds; its agent is killed in it."""
    slow = (*BY_STEPS, "--checkpoint-bytes-per-s", 30_000)
    store = tmp_path / "job" / "checkpoints"
    with running(tmp_path, TINY, *PACED, layout=(2, 1), flags=slow) as job:
        job.until(lambda: list(store.glob("step-*/*")), "a file is being written")
        assert not job.of_type(CheckpointCommitted)
        os.kill(job.agent_pid(1), signal.SIGKILL)
        summary = finish(job)
    assert summary["final_digest"] == reference_digest(TINY, *ARGS, layout=(2, 1))
    assert checkpoints(store)[0].step == 40
    assert not [p for p in store.rglob("*") if p.name.startswith(".")], "halves are left"


def test_time_makes_checkpoints_too(tmp_path: Path):
    flags = ("--checkpoint-interval-s", 0.5)
    job = run_job(tmp_path, TINY, "--steps", 100, "--pace-ms", 30, layout=LAYOUT, flags=flags)
    steps = [event.step for event in job.of_type(CheckpointCommitted)]
    assert len(steps) >= 3 and steps[-1] == 100


def test_a_full_store_costs_checkpoints_and_no_training(
    tmp_path: Path, reference_digest: Reference
):
    """The store is a small file system of its own where that can be had; the last step fails."""
    if os.geteuid() != 0 or not _mount_small(tmp_path / "full"):
        pytest.skip("needs to be allowed to mount a tmpfs")
    try:
        flags = (*BY_STEPS, "--checkpoints", tmp_path / "full")
        with running(tmp_path, TINY, *ARGS, layout=LAYOUT, flags=flags) as job:
            job.wait()
        end = job.of_type(JobEnded)[0]
        assert (end.status, end.exit_code, end.steps) == ("failed", 1, 40)
        assert "step 40 is done but could not be made durable" in end.reason
    finally:
        os.system(f"umount {tmp_path / 'full'}")
    again = run_job(tmp_path, TINY, *ARGS, layout=LAYOUT)
    assert opened(again)[-1] == (40, "memory"), "what could not be written was kept"
    assert again.summary()["final_digest"] == reference_digest(TINY, *ARGS, layout=LAYOUT)
    assert checkpoints(again.directory / "checkpoints")[0].step == 40


def _mount_small(directory: Path) -> bool:
    directory.mkdir()
    return os.system(f"mount -t tmpfs -o size=16k tmpfs {directory} 2>/dev/null") == 0


def test_a_write_that_hangs_holds_nobody(tmp_path: Path):
    """Slower than the job: steps go on, and what is due meanwhile is given up by name."""
    flags = ("--checkpoint-interval-steps", 5, "--checkpoint-bytes-per-s", 60_000)
    began = time.monotonic()
    job = run_job(tmp_path, TINY, *PACED, layout=LAYOUT, flags=flags)
    print(f"{time.monotonic() - began:.1f} s")
    skipped = job.of_type(CheckpointLost)
    assert skipped and "the one before is still being written" in skipped[0].reason
    assert checkpoints(job.directory / "checkpoints")[0].step == 40


def test_weights_that_were_exported_start_another_job(half_way: Path, tmp_path: Path):
    exported, store = tmp_path / "exported", tmp_path / "weights"
    assert main(["ckpt", "export", str(half_way), str(exported)]) == 0
    assert main(["ckpt", "import", str(exported), str(store)]) == 0
    flags = ("--checkpoints", store, "--start-fresh", "optimizer")
    job = run_job(tmp_path / "second", TINY, "--steps", 3, layout=(1, 1), flags=flags)
    assert opened(job) == [(0, "checkpoint")]
    assert any("has no optimizer" in event.text for event in job.of_type(Note))
    assert [(s.step, s.generation) for s in checkpoints(store)] == [(3, 1), (0, 0)]
