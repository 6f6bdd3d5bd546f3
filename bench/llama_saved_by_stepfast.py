"""The example's job with two differences: turns without snapshots, and times of each turn.

`turns` says which. Into BENCH_DIR/turns-RANK, one JSON line for each turn: when it
began, what held the training thread at its boundary and at its fence.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchdata.stateful_dataloader  # noqa: F401 - for the zygote, which reads this file's imports

from stepfast.train.rank_host import RankHost
from stepfast.train.snapshots import Snapshots
from turns import is_without

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama


class Times:
    """What held the training thread in the present turn."""

    def __init__(self) -> None:
        self.boundary_s = self.fence_s = self.began_s = 0.0
        self.step = 0
        self._is_at_boundary = False

    def at_boundary(self, begin: Callable[..., None]) -> Callable[..., None]:
        def timed(host: Any, step: int, *, whole: bool = False) -> None:
            self.step, self.began_s = step, time.monotonic()
            if is_without(step) and not whole:
                return
            began, self._is_at_boundary = time.perf_counter(), True
            begin(host, step, whole=whole)
            self.boundary_s, self._is_at_boundary = time.perf_counter() - began, False

        return timed

    def at_fence(self, fence: Callable[..., None]) -> Callable[..., None]:
        def timed(snapshots: Any) -> None:
            began = time.perf_counter()
            fence(snapshots)
            if not self._is_at_boundary:
                self.fence_s += time.perf_counter() - began

        return timed


times = Times()
RankHost._begin_snapshot = times.at_boundary(RankHost._begin_snapshot)
Snapshots.fence = times.at_fence(Snapshots.fence)
loss_as_it_is = train_llama.next_byte_loss
turn_before: dict[str, float] = {}


def loss_of_a_turn(*args: Any) -> torch.Tensor:
    """Called once a turn. Fences of the turn before are known by now."""
    now = {"began_s": times.began_s, "boundary_s": times.boundary_s, "step": times.step}
    if turn_before:
        with (Path(os.environ["BENCH_DIR"]) / f"turns-{dist.get_rank()}").open("a") as file:
            turn = {**turn_before, "fence_s": times.fence_s, "ended_s": now["began_s"]}
            file.write(json.dumps(turn) + "\n")
    times.boundary_s = times.fence_s = 0.0
    turn_before.update(now)
    return loss_as_it_is(*args)


train_llama.next_byte_loss = loss_of_a_turn

if __name__ == "__main__":
    train_llama.main()
