"""`tiny` fed by torchdata's loader; each rank writes down which samples each step used."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import stepfast

SAMPLES = 96  # with 2 ranks and batches of 4 an epoch is 12 steps


class Numbered(Dataset[tuple[int, int]]):
    """A sample is its number and the worker's pid."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def build(run: stepfast.Run, workers: int) -> Any:
    data = Numbered()
    sampler = DistributedSampler(data, run.world_size, run.rank, seed=3)
    batches = StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    return tiny.build(run, batches=batches)


def living_workers() -> list[int]:
    """Children of this process that have not ended."""
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread ended meanwhile
    return sorted(children)


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    before = living_workers()
    state = run.once(lambda run: build(run, args.workers))
    with open(f"{args.marks}/rank-{run.rank}", "a") as file:
        file.write(f"stay {os.getpid()} {before}\n")
        for step in run.steps(args.steps):
            numbers, pids = next(state.batches)
            assert set(pids.tolist()) <= set(living_workers()) or not args.workers
            file.write(f"step {step} {numbers.tolist()}\n")
            file.flush()
            tiny.turn(run, state, step)
            dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    train(parser.parse_args())
