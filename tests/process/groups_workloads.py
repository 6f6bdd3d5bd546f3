"""What ranks do in the tests of `train.groups`; a module of its own, so that a fresh process can import it."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup

from stepfast.train import torch_private
from stepfast.train.groups import Groups, Membership


def _left_over() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "groups": len(torch_private.groups()),
        "group objects": _count_alive(),
        "excepthooks": _depth_of_excepthook(),
        "resident MiB / 8": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 23,
    }


_ALIVE: list[weakref.ref[ProcessGroup]] = []


def _count_alive() -> int:
    """Groups of earlier generations that something still refers to."""
    return sum(ref() is not None for ref in _ALIVE)


def _depth_of_excepthook() -> int:
    return int("init_process_group" in sys.excepthook.__qualname__)


class Collectives:
    """Collectives for ever in the world, in a mesh's groups and in a group of the user's own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        own = dist.new_group([0, 1, 2])
        _ALIVE[:] = [ref for ref in _ALIVE if ref() is not None]
        _ALIVE.extend(weakref.ref(group) for group in torch_private.groups())
        value = torch.ones(1000)
        turn = 0
        while True:
            dist.all_reduce(value)
            dist.all_reduce(value, group=mesh.get_group("inner"))
            if self.rank < 3:
                dist.all_reduce(value, group=own)
            turn += 1
            if turn == order:
                return groups.progress()

    def quiet(self, groups: Groups) -> Any:
        return _left_over()
