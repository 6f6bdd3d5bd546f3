"""A rendered manifest trains on this machine's pods, through the death of everything in it."""

from __future__ import annotations

from pathlib import Path

from cluster.conftest import Reference
from cluster.harness import LLAMA, finish
from cluster.pods import COORDINATOR, COORDINATOR_POD, NODE, PodsJob, pod_of
from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import CheckpointCommitted, GenerationOpened, NodeJoined


def test_the_manifest_trains_through_everything_that_dies(
    tmp_path: Path, reference_digest: Reference
) -> None:
    """In this order: the coordinator's pod is deleted while the job forms, a rank killed, a node's
    pod evicted, a container killed, and the coordinator's pod lost together with a rank.
    """
    with PodsJob(tmp_path) as job:
        job.until(lambda: len(job.of_type(NodeJoined)) == 2, "both nodes are there")
        job.tell("delete", COORDINATOR_POD)
        job.until_step(3)
        job.tell("signal", pod_of(1), job.pid_of(3))
        job.until_running(2)
        job.tell("evict", pod_of(1))
        job.until_running(3)
        job.until_step(job.of_type(GenerationOpened)[-1].step + 2)
        job.tell("kill", pod_of(0), NODE)
        job.until_running(4)
        job.until_step(job.of_type(GenerationOpened)[-1].step + 2)
        job.tell("lose", COORDINATOR_POD)
        job.tell("signal", pod_of(1), job.pid_of(2))
        seen = job.all_pids()
        summary = finish(job)
    _assert_what_each_cost(job, summary)
    assert summary["final_digest"] == reference_digest(
        LLAMA, "--size", "debug", "--steps", 40, layout=(2, 2)
    )
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    assert not job.control.exists()
    assert str(job.temporary) not in Path("/proc/mounts").read_text()


def _assert_what_each_cost(job: PodsJob, summary: dict) -> None:
    opened = job.of_type(GenerationOpened)
    assert [g.source for g in opened] == ["nothing", "memory", "checkpoint", "memory", "memory"]
    assert len(job.notes("drain")) == 1, "the evicted pod made its state durable first"
    assert opened[2].step in {c.step for c in job.of_type(CheckpointCommitted)}
    lost = [recovery["steps_lost"] for recovery in summary["recoveries"]]
    assert len(lost) == 4 and max(lost[0], lost[2], lost[3]) <= 1, lost
    # Processes of ranks: of whom the fault took nothing, the same one goes on.
    for before, after, taken in zip(opened, opened[1:], [{3}, {2, 3}, {0, 1}, {2}], strict=False):
        replaced = {
            rank
            for rank, incarnation in after.incarnations.items()
            if (incarnation, after.pids[rank]) != (before.incarnations[rank], before.pids[rank])
        }
        assert replaced == taken, (before.generation, replaced)
    for words in (
        f"{COORDINATOR} of {COORDINATOR_POD} ended with 143",  # SIGTERM: its job goes on
        f"{NODE} of {pod_of(1)} ended with {EXIT_TRY_AGAIN}",
        f"{NODE} of {pod_of(0)} ended with 137: started again by restart rule 0, at once",
        f"{COORDINATOR} of {COORDINATOR_POD} ended with 137",
    ):
        assert words in job.console, words
