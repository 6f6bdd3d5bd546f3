"""`tiny` with one bug of the user's, at a place that the test chose."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import tiny
import torch
import torch.distributed as dist

import stepfast

BUG_STEP = 12


def bug(args: argparse.Namespace, run: stepfast.Run) -> None:
    if run.rank == args.rank and args.kind == "memory":
        raise MemoryError("no memory for the bug's list")
    if run.rank == args.rank and args.kind == "exit":
        os._exit(3)
    if run.rank == args.rank:
        raise ValueError("the user's own bug")


def build(run: stepfast.Run) -> Any:
    return tiny.build(run)


def steps_with_a_bug(run: stepfast.Run, args: argparse.Namespace) -> None:
    if args.at == "build":
        bug(args, run)
    state = run.once(build)
    for step in run.steps(30):
        if args.at == "step" and step == BUG_STEP:
            bug(args, run)
        if args.at == "first step" and step == 0:
            bug(args, run)
        tiny.turn(run, state, step)


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    try:
        steps_with_a_bug(run, args)
        if args.at == "behind the loop" and run.rank == 1 and tiny.once_ever(args.marks, "behind"):
            raise RuntimeError("after the last step, before the end")
        if args.at == "behind the loop" and run.rank == 0:
            time.sleep(args.slow_s)  # an export that only rank 0 makes
    finally:
        if args.tear_down:
            dist.destroy_process_group()  # as so many scripts do


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", default="step")
    parser.add_argument("--kind", default="value")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--marks", default="/")
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--tear-down", action="store_true")
    given = parser.parse_args()
    if given.at == "import":
        import there_is_no_such_module  # noqa: F401 - the bug itself
    if given.at == "exit":
        sys.exit("the script does not want to")
    train(given)
