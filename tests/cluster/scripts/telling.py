"""`tiny` whose rank 0 prints each loss to its last digit."""

from __future__ import annotations

import sys
from typing import Any

import tiny
import torch

import stepfast


def build(run: stepfast.Run) -> Any:
    return tiny.build(run)


@stepfast.resilient
def train(run: stepfast.Run, steps: int) -> None:
    torch.set_num_threads(1)
    state = run.once(build)
    for _ in run.steps(steps):
        x = torch.randn(8, 16)
        loss = (state.model(x) - x).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.log(loss=loss)
        if run.rank == 0:
            print("loss", repr(loss.item()), flush=True)


if __name__ == "__main__":
    train(int(sys.argv[1]))
