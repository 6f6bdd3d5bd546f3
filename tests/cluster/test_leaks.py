"""A process that restarts a hundred times holds what it held after the fifth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.harness import SCRIPTS, Job, pids_of, run_job

RESTARTS = 100
EARLY = 5
LATE = 5  # the least of so many counts: a thread may just be on its way out, what leaks stays
RESIDENT_SLACK_KIB = 8 * 1024  # one leaked step alone; some 3 MiB are seen, ever more slowly


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[list[dict[str, Any]]]]:
    """A job with a hundred in-process restarts, and what each rank held at each start."""
    directory = tmp_path_factory.mktemp("restarted")
    flags = ("--restarts-per-hour", 1000)
    args = (directory, "--restarts", RESTARTS)
    job = run_job(directory, SCRIPTS / "restarting.py", *args, flags=flags, limit_s=220)
    lines = [(directory / f"held-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return job, [[json.loads(line) for line in of_rank] for of_rank in lines]


@pytest.mark.timeout(260)
def test_many_restarts_leak_nothing(restarted: tuple[Job, list[list[dict[str, Any]]]]):
    job, held = restarted
    summary = job.summary()
    assert len(summary["recoveries"]) == RESTARTS
    assert all(r["kept_model"] for r in summary["recoveries"])
    for rank, of_rank in enumerate(held):
        assert len(set(pids_of(summary, rank))) == 1
        assert len(of_rank) == RESTARTS + 1
        early, late = of_rank[EARLY], of_rank[-1]
        print(rank, early, late, sep="\n")
        for name in ("descriptors", "sockets", "threads", "python threads", "groups", "tensors"):
            held_late = min(line[name] for line in of_rank[-LATE:])
            assert held_late <= early[name], (rank, name, [line[name] for line in of_rank])
        grown_kib = late["resident KiB"] - early["resident KiB"]
        assert grown_kib < RESIDENT_SLACK_KIB, [line["resident KiB"] for line in of_rank]


def test_no_tensor_of_an_interrupted_step_is_alive(
    restarted: tuple[Job, list[list[dict[str, Any]]]],
):
    """Neither through the chained exception nor through one that the script itself keeps."""
    _, held = restarted
    for of_rank in held:
        assert {line["tensors of interrupted steps"] for line in of_rank} == {0}
