"""Ranks that nothing in the user's code holds together: a broadcast, or messages down a chain.

`--chain`: each rank sends to the next. `--swallow`: rank 1 catches whatever rises at step 10.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stepfast

STEPS = 30
caught: list[int] = []  # once in the life of the process


def build(run: stepfast.Run) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(8, 8)
    return run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def exchange(run: stepfast.Run, step: int) -> torch.Tensor:
    inputs = torch.full((8,), float(step))
    if "--chain" not in sys.argv:
        dist.broadcast(inputs, src=0)
        return inputs
    if run.rank > 0:
        dist.recv(inputs, src=run.rank - 1)
    if run.rank < run.world_size - 1:
        dist.send(inputs, dst=run.rank + 1)
    return inputs


def turn(run: stepfast.Run, state: Any, step: int) -> None:
    if run.rank == run.world_size - 1:
        time.sleep(0.03)  # always the last: the others would run away from it
    state.model(exchange(run, step)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


@stepfast.resilient
def train(run: stepfast.Run) -> None:
    state = run.once(build)
    for step in run.steps(STEPS):
        if "--swallow" in sys.argv and run.rank == 1 and step == 10 and not caught:
            caught.append(step)
            try:
                time.sleep(60.0)
            except BaseException:  # noqa: BLE001 - the mistake that is shown
                print("caught everything")
        turn(run, state, step)


train()
