"""An interrupt reaches whoever waits, wherever that is."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import SCRIPTS, pids_of, run_job
from process.blocked_workloads import Blocked
from process.groups_cluster import Cluster, gloo, nccl_like

OUT_LIMIT_S = 1.5  # of milliseconds, on a machine that may be busy
BLOCKED_S = 0.15  # long enough for everybody to be where he waits


@pytest.fixture(scope="module", params=[gloo, nccl_like], ids=lambda made_of: made_of.__name__)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(4, Blocked, request.param)
    cluster.open_generation("own group")  # imports are paid here
    threading.Event().wait(BLOCKED_S)
    cluster.abort()
    cluster.answers(limit_s=60)
    yield cluster
    cluster.close()


def interrupted(cluster: Cluster, where: str, *, kill: int | None = None) -> None:
    """Everybody waits, one may die; all others come out, threads included."""
    cluster.open_generation(where)
    threading.Event().wait(BLOCKED_S)
    ranks = [rank for rank in range(4) if rank != kill]
    if kill is not None:
        cluster.signal(kill, signal.SIGKILL)
    cluster.abort(ranks)
    for rank, (kind, content, times) in cluster.answers(ranks).items():
        assert kind == "quiet", (rank, content)
        assert content[0] is True, f"rank {rank}: a thread is still blocked"
        if "left" in times and "abort" in times:
            assert times["left"] - times["abort"] < OUT_LIMIT_S, (rank, times)
    if kill is not None:
        cluster.start(kill)


@pytest.mark.parametrize("kill", [None, 3])
def test_two_blocked_groups_are_released_together(cluster: Cluster, kill: int | None):
    """One in the main thread, one in another: whichever was aborted first, both are over."""
    interrupted(cluster, "two groups", kill=kill)


@pytest.mark.parametrize("kill", [None, 3])
def test_groups_that_the_user_made_are_released(cluster: Cluster, kill: int | None):
    interrupted(cluster, "own group", kill=kill)


@pytest.mark.parametrize("kill", [None, 3])
def test_ranks_blocked_in_different_groups_all_come_out(cluster: Cluster, kill: int | None):
    """A row of the mesh, a column through a work handle, the world's barrier."""
    interrupted(cluster, "different groups", kill=kill)


def test_wherever_the_main_thread_is_it_arrives_or_is_replaced(tmp_path: Path):
    """Rank 1 fails while rank 0 sleeps, waits for a lock, reads a socket, imports, ..."""
    job = run_job(tmp_path, SCRIPTS / "elsewhere.py", tmp_path, flags=("--restarts-per-hour", 100))
    places = json.loads((tmp_path / "places").read_text())
    summary = job.summary()
    assert len(places) >= 9
    assert len(summary["recoveries"]) >= len(places)
    pids = pids_of(summary, 0)
    replaced = [p for p, old, new in zip(places, pids, pids[1:], strict=False) if old != new]
    print(f"replaced in: {replaced}")
    # Who is in C and deaf to signals may be lost; everybody else arrives.
    assert set(replaced) <= {"a slow C call"}, replaced
    assert len(set(pids_of(summary, 1))) == 1
    entered = (tmp_path / "entered-0").read_text().splitlines()
    assert all(line == "clean" for line in entered), entered
    assert summary["steps"] == len(places) * 2 + 1
