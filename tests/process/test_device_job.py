"""Whole jobs whose ranks have a double of a device: what befalls it, and what becomes of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.harness import Job, assert_survivors_kept, causes_of, pids_of, run_job
from stepfast.events import FaultSeen

SCRIPT = Path(__file__).parent / "scripts" / "on_a_double.py"
TESTS = Path(__file__).parents[1]


def run(directory: Path, what: str, *flags: object) -> tuple[Job, dict[str, Any]]:
    paths = [str(TESTS), *filter(None, sys.path)]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    marks = directory / "marks"
    marks.mkdir(parents=True)
    job = run_job(directory, SCRIPT, what, marks, flags=flags, environment=environment)
    return job, job.summary()


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    _, summary = run(tmp_path_factory.mktemp("nothing"), "nothing")
    assert summary["recoveries"] == [] and summary["steps"] == 12
    return str(summary["final_digest"])


def replaced(summary: dict[str, Any]) -> list[int]:
    return [rank for rank in (0, 1) if len(set(pids_of(summary, rank))) > 1]


def test_a_rank_that_holds_a_graph_gets_a_fresh_process_and_is_not_the_cause(
    tmp_path: Path, digest: str
):
    job, summary = run(tmp_path, "graph")
    assert causes_of(summary) == [("exception", 1)]
    assert replaced(summary) == [0]
    assert_survivors_kept(summary)
    (told,) = [f for f in job.of_type(FaultSeen) if f.kind == "unusable"]
    assert told.collateral and "rank 0: 1 CUDA graph with communicators" in told.reason
    assert summary["final_digest"] == digest


def test_a_lost_device_is_told_though_the_main_thread_sleeps(tmp_path: Path, digest: str):
    job, summary = run(tmp_path, "lost")
    assert causes_of(summary) == [("exception", 1)]
    assert replaced(summary) == [1]
    assert_survivors_kept(summary)
    assert job.of_type(FaultSeen)[0].error_type == "torch.AcceleratorError"
    (recovery,) = summary["recoveries"]
    assert recovery["seconds"]["interrupt"] < 1.0, "nobody waited for its main thread"
    assert summary["final_digest"] == digest


def test_a_device_that_ends_nothing_is_a_hang_though_the_hosts_go_on(tmp_path: Path):
    job, summary = run(tmp_path, "held")
    (recovery,) = summary["recoveries"]
    assert recovery["kind"] == "hang"
    fault = job.of_type(FaultSeen)[0]
    # Who stands for it is chance: the hosts go on, and are asked one after the other.
    assert 1.5 < fault.detect_s < 10.0
    assert replaced(summary) == [0, 1], "who cannot end what is queued cannot go on"
