"""There and back: what a test of tracking does with objects of any kind.

Owns: the round trip and what is compared. Does not own: the objects (the tests make them).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.capture import Capture, Captured
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Generation, SnapshotId, Step

Objects = dict[str, Any]
TURNS = 2


class Net(nn.Module):
    """A tied weight, a buffer that moves, one that is in no state_dict, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.arange(6.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens) * self.rope))
        return logits


def train(objects: Objects, turns: int = TURNS) -> list[float]:
    """The losses of `turns` steps with whatever of model, optimizer and schedule there is."""
    model, optimizer = objects["model"], objects["optimizer"]
    losses = []
    for _ in range(turns):
        tokens = torch.randint(0, 10, (8,))

        def loss_of(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), tokens)
            loss.backward()
            return loss

        losses.append(optimizer.step(loss_of).item())
        optimizer.zero_grad()
        if "schedule" in objects:
            schedule = objects["schedule"]
            on_loss = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(losses[-1]) if on_loss else schedule.step()
    return losses


def take(directory: Path, objects: Objects, step: int = 0) -> Captured:
    """A snapshot in slots of its own."""
    snapshot = SnapshotId(Generation(1), Step(step))
    return Capture(Arena(directory), StateTree(objects)).take(snapshot)


def restore(taken: Captured, objects: Objects) -> None:
    """The snapshot into `objects`."""
    StateTree(objects).restore_from(open_sealed(taken.slot_path, taken.snapshot))


def state_of(objects: Objects) -> tuple[Any, bytes]:
    """All that a snapshot would hold: digests of the tensors, and the plain values as bytes."""
    tree = StateTree(objects)
    return tree.local_digests(), tree.collect().plain


def check_round_trip(
    directory: Path,
    make: Callable[[], Objects],
    work: Callable[[Objects], Any] = train,
) -> None:
    """Work, a snapshot, work; the same work again in place and in fresh objects: all alike.

    `work(objects)` changes the objects and returns what can be compared.
    """
    torch.manual_seed(1)
    objects = make()
    work(objects)
    taken, at_snapshot = take(directory, objects), state_of(objects)
    wanted = work(objects), state_of(objects), random.random(), torch.rand(2).tolist()
    assert wanted[1] != at_snapshot
    for again in (objects, make()):
        restore(taken, again)
        assert state_of(again) == at_snapshot
        found = work(again), state_of(again), random.random(), torch.rand(2).tolist()
        assert found == wanted
