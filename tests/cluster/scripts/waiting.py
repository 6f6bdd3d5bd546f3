"""Two deaths while others wait: for data that does not come, and in a group of the user's own."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import tiny
import torch
import torch.distributed as dist

import stepfast


def build(run: stepfast.Run) -> Any:
    return tiny.build(run), dist.new_group(range(run.world_size), timeout=timedelta(minutes=30))


def die_once(marks: str, name: str, after_s: float) -> None:
    if tiny.once_ever(marks, name):
        time.sleep(after_s)  # the others are where they wait by then
        os.kill(os.getpid(), signal.SIGKILL)


@stepfast.resilient
def train(run: stepfast.Run, marks: str) -> None:
    torch.set_num_threads(1)
    state, group = run.once(build)
    for step in run.steps(40):
        if step == 10:
            if run.rank == 0:
                die_once(marks, "died-for-data", 0.5)
            elif not os.path.exists(f"{marks}/waited-{run.rank}") and run.rank > 1:
                open(f"{marks}/waited-{run.rank}", "w").close()
                time.sleep(60)  # a loader that stalls
        if step == 20:
            if run.rank == 1:
                die_once(marks, "died-for-a-group", 0.5)
            dist.all_reduce(torch.ones(4), group=group)
        tiny.turn(run, state, step)


if __name__ == "__main__":
    train(sys.argv[1])
