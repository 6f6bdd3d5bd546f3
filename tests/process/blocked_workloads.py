"""Ranks that wait in groups of all sorts for somebody who does not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stepfast.errors import Interrupted
from stepfast.train.groups import Groups, Membership

JOIN_LIMIT_S = 5.0


class Blocked:
    """`order` says in what: "two groups", "own group", "different groups"."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.thread: threading.Thread | None = None

    def run(
        self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]
    ) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
        first, second = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
        value = torch.ones(1000)
        dist.all_reduce(value, group=first)  # everybody is here, the groups work
        if self.rank == 3:
            self.stay_away(leaving)
        if order == "two groups":
            self.thread = threading.Thread(target=self.wait_in, args=(second,))
            self.thread.start()
            dist.all_reduce(value, group=first)
        elif order == "own group":
            dist.all_reduce(value, group=second)
        elif self.rank == 0:
            dist.all_reduce(value, group=mesh.get_group("row"))  # of 0 and 1, who is elsewhere
        elif self.rank == 1:
            work = dist.all_reduce(value, group=mesh.get_group("column"), async_op=True)
            work.wait()  # of 1 and 3
        else:
            dist.barrier()
        value.sum().item()  # where a wait returns early, the host waits here
        if leaving():
            raise Interrupted("what an aborted collective left is worth nothing")
        raise AssertionError("nobody came, and yet the collective is over")

    def stay_away(self, leaving: Callable[[], bool]) -> None:
        while not leaving():
            time.sleep(0.001)
        raise Interrupted("left while it was away")

    def wait_in(self, group: Any) -> None:
        try:
            value = torch.ones(10)
            dist.all_reduce(value, group=group)
            value.sum().item()
        except RuntimeError:
            return

    def quiet(self, groups: Groups) -> Any:
        """Whether the second thread is out as well."""
        if self.thread is None:
            return True
        self.thread.join(JOIN_LIMIT_S)
        is_out = not self.thread.is_alive()
        self.thread = None
        return is_out
