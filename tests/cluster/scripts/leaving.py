"""`tiny`, left long before its loop's end."""

from __future__ import annotations

import argparse

import tiny
import torch

import stepfast


@stepfast.resilient
def train(run: stepfast.Run, steps: int, is_behind: bool) -> None:
    torch.set_num_threads(1)
    state = run.once(tiny.build)
    for step in run.steps(1_000):
        if step == steps and not is_behind:
            break
        tiny.turn(run, state, step)
        if step == steps - 1 and is_behind:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--behind", action="store_true", help="leave behind the optimizer's step")
    given = parser.parse_args()
    train(given.steps, given.behind)
