"""`tiny`, left long before its loop's end."""

from __future__ import annotations

import argparse

import tiny
import torch

import stepfast


@stepfast.resilient
def train(run: stepfast.Run, steps: int) -> None:
    torch.set_num_threads(1)
    state = run.once(tiny.build)
    for step in run.steps(1_000):
        if step == steps:
            break
        tiny.turn(run, state, step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    train(parser.parse_args().steps)
