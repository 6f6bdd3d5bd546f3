"""`tiny` with a tracked object whose restoring kills rank 3 once, where the test asked for it."""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch

import stepfast


class Saboteur:
    """State without content; where `restore-kills-rank-3` lies, restoring it is deadly, once."""

    def __init__(self, rank: int, marks: str) -> None:
        self._rank, self._marks = rank, marks

    def state_dict(self) -> dict[str, Any]:
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        asked = self._rank == 3 and Path(self._marks, "restore-kills-rank-3").exists()
        if asked and tiny.once_ever(self._marks, "restore-killed"):
            os.kill(os.getpid(), signal.SIGKILL)


@stepfast.resilient
def train(run: stepfast.Run, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    state = run.once(partial(tiny.build, saboteur=Saboteur(run.rank, args.marks)))
    for step in run.steps(args.steps):
        tiny.turn(run, state, step)
        time.sleep(args.pace_ms / 1000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pace-ms", type=float)
    parser.add_argument("--marks")
    train(parser.parse_args())
