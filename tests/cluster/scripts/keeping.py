"""`tiny` on a 2 x 2 mesh; writes down what is kept. `--hold`: the script holds a group itself."""

from __future__ import annotations

import os
import sys
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import stepfast

STEPS = 40


def build(run: stepfast.Run) -> Any:
    mesh = run.init_mesh((2, 2), ("replicate", "shard"))
    own = dist.new_group([0, 3])
    held = own if "--hold" in sys.argv else None
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    torch.manual_seed(2 + run.rank)
    state = run.track(model=model, optimizer=optimizer, schedule=schedule)
    return state, mesh, held


def read_tokenizer(run: stepfast.Run) -> list[str]:
    """Anything expensive."""
    return ["read by", str(os.getpid())]


@stepfast.resilient
def train(run: stepfast.Run, marks: str) -> None:
    torch.set_num_threads(1)
    tokenizer = run.once(read_tokenizer)
    state, mesh, held = run.once(build)
    assert tokenizer == ["read by", str(os.getpid())]
    ids = (
        id(tokenizer),
        id(state),
        id(mesh),
        run.init_mesh((2, 2), ("replicate", "shard")) is mesh,
    )
    with open(f"{marks}/rank-{run.rank}", "a") as file:
        file.write(f"{os.getpid()} {ids} {run.resuming}\n")
    for step in run.steps(STEPS):
        count = torch.ones(1)
        dist.all_reduce(count, group=mesh.get_group("shard"))
        if held is not None and run.rank in (0, 3):
            dist.all_reduce(count, group=held)
            assert count.item() == 4
        tiny.turn(run, state, step)
        state.schedule.step()


if __name__ == "__main__":
    train(sys.argv[1])
