"""What the staging tests run in processes of their own: `staging_workloads.py NAME DIRECTORY`.

A model large enough that a copy takes a while, trained so that its state says which step it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Generation, SnapshotId, Step

SIDE = 1024
LAYERS = 8


class Counter(torch.optim.Optimizer):
    """After step n every parameter, and every number of its state, is n."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["twin"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss here
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1)
            self.state[parameter]["twin"].add_(1)


class Trained:
    def __init__(self, directory: Path) -> None:
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(LAYERS)))
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.optimizer = Counter(self.model.parameters())
        self.optimizer.register_step_pre_hook(self._fence)
        tree = StateTree({"model": self.model, "optimizer": self.optimizer})
        self.capture = Capture(Arena(directory, SLOTS_WITH_OVERLAP), tree)

    def _fence(self, *_: object) -> None:
        self.capture.fence()

    def boundary(self, step: int) -> None:
        self.capture.fence()
        self.capture.stage(SnapshotId(Generation(1), Step(step)))


def train_until_killed(directory: Path) -> None:
    """The parent kills it at any instant, and then looks at what the slots hold."""
    trained = Trained(directory)
    for step in range(1_000_000):
        trained.boundary(step)
        print(step, flush=True)
        trained.optimizer.step()


def fork_while_copying(directory: Path) -> None:
    """Loader workers are forked while a copy is under way; they and the copy come to their ends."""
    trained = Trained(directory)
    torch.set_num_threads(2)
    forked_beside = 0
    for step in range(12):
        trained.boundary(step)
        loader = DataLoader(range(64), batch_size=8, num_workers=2)
        batches = iter(loader)
        forked_beside += trained.capture.is_copying and not trained.capture.has_copied
        total = sum(int(batch.sum()) for batch in batches)
        assert total == sum(range(64)), total
        trained.optimizer.step()
    trained.capture.fence()
    assert forked_beside > 0, "no copy was under way at any fork"
    print("done", flush=True)


def exit_while_copying(directory: Path) -> None:
    """The copy keeps nobody waiting."""
    trained = Trained(directory)
    for step in range(3):
        trained.boundary(step)
    print(f"copying {trained.capture.is_copying}", flush=True)


if __name__ == "__main__":
    for workload in (train_until_killed, fork_while_copying, exit_while_copying):
        if workload.__name__ == sys.argv[1]:
            workload(Path(sys.argv[2]))
