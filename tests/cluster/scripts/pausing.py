"""Many very short steps, and every legal pause that a training run makes.

A first step, an evaluation in a section, a recompilation in the middle of a step, a loader that
stalls, a library that keeps the interpreter's lock for a while.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stepfast

STEPS = 5000
EVAL_EVERY = 50
RECOMPILE_STEP = 1030
STALL_STEP = 2040
DEAF_STEP = 3060
FIRST_STEP_S = 1.0  # more than a hundred of the others
LONG_S = 3.0  # beyond the floor of a step's limit
DEAF_S = 1.0


class Batches:
    """A loader of the user's own that once has to wait for its storage."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.position == STALL_STEP:
                time.sleep(LONG_S)
            self.position += 1
            yield torch.full((2, 8), self.position / STEPS)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def slow_compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend whose only talent is to take long."""
    time.sleep(LONG_S)
    return graph.forward


def build(run: stepfast.Run) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return run.track(model=model, optimizer=optimizer, batches=Batches())


def pause(step: int, compiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if step == 0:
        time.sleep(FIRST_STEP_S)
        compiled(torch.ones(3))
    if step == RECOMPILE_STEP:
        compiled(torch.ones(3, 3))
    if step == DEAF_STEP:
        ctypes.PyDLL(None).poll(None, 0, int(DEAF_S * 1000))  # keeps the interpreter's lock


@stepfast.resilient
def train(run: stepfast.Run, report: str) -> None:
    state = run.once(build)
    torch.set_num_threads(1)
    compiled = torch.compile(lambda x: x * 2 + 1, backend=slow_compiler)
    began = time.monotonic()
    sections_s = 0.0
    for step in run.steps(STEPS):
        x = next(state.batches)
        pause(step, compiled)
        if step == 1:
            began = time.monotonic()
        loss = (state.model(x) - x).square().mean()
        loss.backward()
        for weight in state.model.parameters():
            dist.all_reduce(weight.grad)
        state.optimizer.step()
        state.optimizer.zero_grad()
        run.log(loss=loss)
        if step and step % EVAL_EVERY == 0:
            if step == EVAL_EVERY:
                sections_s = 100 * (time.monotonic() - began) / step
            with run.section("eval"):
                time.sleep(sections_s)
    with open(f"{report}/rank-{run.rank}", "w") as file:
        file.write(f"{sections_s / 100} {time.monotonic() - began}\n")


if __name__ == "__main__":
    train(sys.argv[1])
