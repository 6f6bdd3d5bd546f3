"""Over `nccl_like`: at one step rank 0 has garbage, while rank 1 has the results and goes on.

    aborted   rank 1 fails behind that step; the abort ends what rank 0 still waits for
    broken    rank 0's communicator breaks: what it waited for ends, and the error shows late

`--without RULE` takes a rule of the product away (`flag`: it stands before the abort; `error`: the
groups are asked before a seal), so that a test can see what the rule is for.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import tiny
import torch
import torch.distributed as dist

import stepfast
from stepfast.train.groups import Groups
from stepfast.train.monitor import Monitor

GARBLED_AT = 6  # the snapshot behind this turn is the eighth, and whole: sealed at the boundary
LATE_S = 0.5


def take_away(rule: str | None) -> None:
    if rule == "flag":
        truth = Monitor.must_leave.fget
        assert truth is not None
        asked: dict[str, float] = {}

        def late(monitor: Monitor) -> bool:
            if not truth(monitor):
                asked.clear()
                return False
            now_s = time.monotonic()
            return now_s - asked.setdefault("first", now_s) > LATE_S

        Monitor.must_leave = property(late)
    elif rule == "error":
        Groups.error = lambda groups: None


def garble(how: str, group: Any, marks: str) -> None:
    """Rank 0, once: the results of what is launched next reach the peer, and not this rank."""
    if not tiny.once_ever(marks, "garbled"):
        return
    group.is_holding = True
    if how == "broken":
        threading.Timer(0.3, group.fail).start()


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    average = {"value": torch.zeros(4)}
    state = run.once(lambda run: tiny.build(run, average=average))
    for step in run.steps(args.steps):
        fails = run.rank == 1 and step == GARBLED_AT + 1 and args.how == "aborted"
        if fails and tiny.once_ever(args.marks, "failed"):
            raise RuntimeError("rank 1 fails behind the step")
        tiny.turn(run, state, step)
        if run.rank == 0 and step == GARBLED_AT and args.how != "never":
            garble(args.how, dist.group.WORLD, args.marks)
        share = torch.full((4,), float(step + run.rank))
        dist.all_reduce(share)
        state.average["value"].add_(share)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--how", choices=["aborted", "broken", "never"], default="never")
    parser.add_argument("--without", choices=["flag", "error"])
    parser.add_argument("--marks")
    given = parser.parse_args()
    take_away(given.without)
    train(given)
