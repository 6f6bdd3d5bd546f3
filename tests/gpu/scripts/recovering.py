"""A job that fails as it is told to, and writes down what its processes hold on the device.

On a CPU a device's error is raised as torch words it, for there is none to be provoked. Never run
on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import stepfast

FAIL_EVERY = 3
STICKY = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"


def build(run: stepfast.Run) -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 16))
    model.to(run.device)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2 + run.rank)
    return run.track(model=model, optimizer=optimizer)


def turn(run: stepfast.Run, state: Any) -> None:
    x = torch.randn(8, 16, device=run.device)
    loss = (state.model(x) - x.roll(1, dims=1)).square().mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    run.log(loss=loss.detach())


def write_down(run: stepfast.Run, args: argparse.Namespace, entered_s: float) -> None:
    gc.collect()
    held: dict[str, Any] = {"pid": os.getpid(), "rank": run.rank, "entered_s": entered_s}
    if run.device.type == "cuda":
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        held |= {"device_bytes": total_bytes - free_bytes}
        held |= {"allocated_bytes": torch.cuda.memory_allocated()}
    with open(f"{args.marks}/held-{run.rank}.jsonl", "a") as file:
        file.write(json.dumps(held) + "\n")


def fail(run: stepfast.Run, how: str) -> None:
    if how == "exception":
        raise ValueError("a failure that leaves the device whole")
    if run.device.type == "cuda":
        torch.zeros(4, device=run.device)[torch.tensor([1 << 20], device=run.device)]
        torch.cuda.synchronize()
    raise torch.AcceleratorError(STICKY)


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    torch.ones(1, device=run.device).item()
    write_down(run, args, time.perf_counter() - began)
    state = run.once(build)
    for step in run.steps(args.failures * FAIL_EVERY + 3):
        due = step > 0 and step % FAIL_EVERY == 0 and step // FAIL_EVERY <= args.failures
        mark = Path(args.marks, f"failed-{step}")
        mine = run.rank == step // FAIL_EVERY % run.world_size
        if due and mine and not args.spared and not mark.exists():
            mark.touch()
            fail(run, args.how)
        turn(run, state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("marks")
    parser.add_argument("--failures", type=int, default=1)
    parser.add_argument("--spared", action="store_true", help="as many steps, and no failure")
    parser.add_argument("--how", choices=("exception", "device"), default="exception")
    train(parser.parse_args())
