"""A rendered manifest trains on this machine's pods, through the death of everything in it."""

from __future__ import annotations

from pathlib import Path

from cluster.conftest import Reference
from cluster.harness import LLAMA, finish
from cluster.pods import COORDINATOR_POD, NODE, PodsJob, pod_of


def test_the_manifest_trains_through_everything_that_dies(
    tmp_path: Path, reference_digest: Reference
) -> None:
    with PodsJob(tmp_path) as job:
        job.until_step(3)
        job.tell("signal", pod_of(1), job.pid_of(3))
        job.until_running(2)
        job.until_step(9)
        job.tell("kill", pod_of(0), NODE)
        job.until_running(3)
        job.until_step(15)
        job.tell("lose", pod_of(1))
        job.until_running(4)
        job.until_step(24)
        job.tell("lose", COORDINATOR_POD)
        summary = finish(job)
    assert summary["final_digest"] == reference_digest(
        LLAMA, "--size", "debug", "--steps", 40, layout=(2, 2)
    )
