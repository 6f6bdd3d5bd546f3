"""`tiny` that wants to live: it ignores SIGTERM, and its clean-up never ends."""

from __future__ import annotations

import signal
import time

import tiny
import torch

import stepfast


@stepfast.resilient
def train(run: stepfast.Run) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state = run.once(tiny.build)
    try:
        for step in run.steps(1_000_000):
            tiny.turn(run, state, step)
    finally:
        time.sleep(600)


if __name__ == "__main__":
    train()
