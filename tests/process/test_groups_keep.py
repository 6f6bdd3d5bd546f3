"""A kept FSDP2 model goes on through interrupts at any point of a step, bit for bit."""

from __future__ import annotations

import functools
import random
import signal
import threading
from pathlib import Path

from process.groups_cluster import Cluster
from process.groups_workloads import Training

STEPS = 30
ROUNDS = 8
WORLD_SIZE = 4


def _reference(directory: Path) -> dict[int, str]:
    directory.mkdir()
    cluster = Cluster(WORLD_SIZE, functools.partial(Training, str(directory)))
    try:
        cluster.open_generation((0, STEPS))
        answers = cluster.answers()
        assert {answer[0] for answer in answers.values()} == {"done"}, answers
        return {rank: answer[1][1] for rank, answer in answers.items()}
    finally:
        cluster.close()


def _resume_step(directory: Path, newest: dict[int, int]) -> int:
    step = max(0, min(newest.values()))
    assert all((directory / f"rank-{rank}-step-{step}.pt").exists() for rank in range(WORLD_SIZE))
    return step


def test_interrupts_at_random_points_change_nothing(tmp_path: Path):
    reference = _reference(tmp_path / "reference")
    directory = tmp_path / "interrupted"
    directory.mkdir()
    chance = random.Random(4)
    cluster = Cluster(WORLD_SIZE, functools.partial(Training, str(directory)))
    try:
        pids = {rank: process.pid for rank, process in cluster.processes.items()}
        step, killed = 0, 2
        for round_number in range(ROUNDS):
            cluster.open_generation((step, 10_000))
            cluster.wait_for_step(directory, step + 2)
            threading.Event().wait(chance.random() * 0.03)
            survivors = list(range(WORLD_SIZE))
            if round_number == 3:
                cluster.signal(killed, signal.SIGKILL)
                survivors.remove(killed)
            cluster.abort(survivors)
            answers = cluster.answers(survivors)
            assert {a[0] for a in answers.values()} == {"quiet"}, answers
            newest = {rank: answer[1][0] for rank, answer in answers.items()}
            if round_number == 3:
                cluster.start(killed)
                newest[killed] = max(
                    int(f.stem.rpartition("-")[2])
                    for f in directory.glob(f"rank-{killed}-step-*.pt")
                )
            step = _resume_step(directory, newest)
            print(
                step, {r: (a[2].get("left", 0) - a[2]["abort"]) * 1e3 for r, a in answers.items()}
            )
        cluster.open_generation((step, max(STEPS, step + 1)))
        answers = cluster.answers()
        assert {a[0] for a in answers.values()} == {"done"}, answers
        if step < STEPS:
            assert {rank: a[1][1] for rank, a in answers.items()} == reference
        assert {a[1][0] for a in answers.values()} == {"kept"}
        assert step < STEPS
        for rank, process in cluster.processes.items():
            assert (process.pid == pids[rank]) == (rank != killed)
    finally:
        cluster.close()
