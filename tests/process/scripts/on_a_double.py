"""A job on the CPU whose ranks believe in a device: a double of `torch.cuda` stands for theirs.

What befalls it is told by name: `graph`, `lost`, `held`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import stepfast
from fakes.device import FakeCuda
from stepfast.train import entry
from stepfast.train.device import CudaDevice

CUDA = FakeCuda()


class Graph:
    """In the place of torch.cuda.CUDAGraph."""


CUDA.CUDAGraph = Graph  # type: ignore[attr-defined]  # as torch.cuda has it
HELD: list[Graph] = []


def put_double_in_place() -> None:
    rank: Any = entry._Attached.rank
    rank._host.device._make = lambda kind, local_rank: CudaDevice(local_rank, CUDA)


def build(run: stepfast.Run) -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=run.mesh)
    return run.track(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def befall(run: stepfast.Run, what: str, marks: Path, step: int) -> None:
    if step != 6 or what == "nothing" or (marks / f"{what}-{run.rank}").exists():
        return
    (marks / f"{what}-{run.rank}").touch()
    if what == "graph":
        if run.rank == 0:
            HELD.append(Graph())
        else:
            raise ValueError("something else ends the generation")
    elif what == "lost" and run.rank == 1:
        CUDA.lose_context(700)
        time.sleep(600)  # the main thread never asks its device
    elif what == "held":
        CUDA.is_holding = True  # nothing that is queued from now on ends


@stepfast.resilient
def train(run: stepfast.Run, what: str, marks: Path) -> None:
    torch.set_num_threads(1)
    state = run.once(build)
    for step in run.steps(12 if what != "held" else 10_000):
        befall(run, what, marks, step)
        if (marks / "held-0").exists() and not CUDA.is_holding and step > 12:
            break
        CUDA.launch()
        loss = state.model(torch.ones(4, 8)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.log(loss=loss)
        time.sleep(0.005)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("nothing", "graph", "lost", "held"))
    parser.add_argument("marks", type=Path)
    given = parser.parse_args()
    put_double_in_place()
    train(given.what, given.marks)
