"""A training script whose steps take milliseconds, with everything that has to come back exactly.

Its data are drawn from torch's own generator, a layer drops out: a generator that is not restored
shows in the digest, as does an optimizer's state. Other scripts here use its parts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import stepfast

Hook = Callable[[stepfast.Run, Any, int], None]


def no_hook(run: stepfast.Run, state: Any, step: int) -> None:
    """Nothing happens in the middle of the step."""


def make_model(run: stepfast.Run) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=run.mesh)
    return fully_shard(model, mesh=run.mesh)  # type: ignore[return-value]  # the same module


def build(run: stepfast.Run, **more: Any) -> Any:
    """`more`: further objects to track."""
    model = make_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2 + run.rank)
    return run.track(model=model, optimizer=optimizer, **more)


def turn(run: stepfast.Run, state: Any, step: int, in_the_middle: Hook = no_hook) -> None:
    """One optimizer step."""
    x = torch.randn(8, 16)
    loss = (state.model(x) - x.roll(1, dims=1)).square().mean()
    in_the_middle(run, state, step)
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    run.log(loss=loss)


def once_ever(marks: str, name: str) -> bool:
    """Whether this is the first time that anybody asks, in whatever process."""
    try:
        Path(marks, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@stepfast.resilient
def train(run: stepfast.Run, steps: int, pace_ms: float) -> None:
    torch.set_num_threads(1)  # the result is that of any number of cores
    state = run.once(build)
    for step in run.steps(steps):
        turn(run, state, step)
        time.sleep(pace_ms / 1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="a pause in each step")
    given = parser.parse_args()
    train(given.steps, given.pace_ms)
