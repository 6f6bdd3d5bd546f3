"""`tiny` with things of the user's own that stepfast has no business with.

A TCP connection to a server, and a Gloo group with a store of its own that torch.distributed does
not know.
"""

from __future__ import annotations

import argparse
import os
import socket
from datetime import timedelta

import tiny
import torch
import torch.distributed as dist

import stepfast


def own_group(marks: str, rank: int, ranks: int) -> dist.ProcessGroupGloo:
    store = dist.FileStore(f"{marks}/own-store", ranks)
    return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))


@stepfast.resilient
def train(run: stepfast.Run, marks: str, friend: socket.socket) -> None:
    torch.set_num_threads(1)
    group = run.once(lambda run: own_group(marks, run.rank, run.world_size))
    state = run.once(tiny.build)
    for step in run.steps(40):
        tiny.turn(run, state, step)
        friend.sendall(b"%d %d %d\n" % (run.rank, step, os.getpid()))
        assert friend.recv(3) == b"ok\n"
        count = torch.ones(1)
        group.allreduce([count]).wait()
        assert count.item() == run.world_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("marks")
    parser.add_argument("port", type=int)
    args = parser.parse_args()
    train(args.marks, socket.create_connection(("127.0.0.1", args.port)))
