"""`tiny` that fails again and again, and writes down what its process holds at each start.

Each failing step leaves what a real one leaves: activations, a graph, an exception with a cause,
one that the user keeps. Nobody else may keep them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist

import stepfast

FAIL_EVERY = 3
PAYLOAD_FLOATS = 1_000_000
_tensors: list[weakref.ref[torch.Tensor]] = []
_kept_error: list[BaseException] = []  # what a logger or an error tracker does


def build(run: stepfast.Run) -> Any:
    dist.new_group(list(range(run.world_size)))
    return tiny.build(run)


def what_is_held() -> dict[str, int]:
    # Pages that are free and kept by the C library for later: as many as the order of frees leaves.
    ctypes.CDLL(None).malloc_trim(0)
    links = [read_link(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        "resident KiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
        "descriptors": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "tensors of interrupted steps": sum(ref() is not None for ref in _tensors),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
    }


def read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def fail(step: int, tensors: list[torch.Tensor]) -> None:
    """Raise with a cause; now and then the user keeps the exception."""
    try:
        try:
            raise KeyError(f"the cause, with {len(tensors)} tensors in its frame")
        except KeyError as cause:
            raise ValueError(f"a failure at step {step}") from cause
    except ValueError as error:
        if step % (2 * FAIL_EVERY) == 0:
            _kept_error[:] = [error]
        raise


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with open(f"{args.marks}/held-{run.rank}.jsonl", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **what_is_held()}) + "\n")
    state = run.once(build)
    for step in run.steps(args.restarts * FAIL_EVERY + 2):
        payload = torch.ones(PAYLOAD_FLOATS, requires_grad=True)
        result = (payload * 2).sum()
        _tensors[:] = [ref for ref in _tensors if ref() is not None]
        _tensors.extend(weakref.ref(each) for each in (payload, result))
        due = step > 0 and step % FAIL_EVERY == 0
        mine = run.rank == step // FAIL_EVERY % run.world_size
        if due and mine and tiny.once_ever(args.marks, f"failed-{step}"):
            fail(step, [payload, result])
        tiny.turn(run, state, step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("marks")
    parser.add_argument("--restarts", type=int, default=100)
    sys.setswitchinterval(0.005)
    train(parser.parse_args())
