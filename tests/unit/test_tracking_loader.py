"""A tracked loader comes back at any batch of any epoch, with the numbers its transforms drew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepfast.train.data import TrackedLoader
from stepfast.train.whereabouts import Whereabout
from unit.tracked import restore, take

stateful = pytest.importorskip("torchdata.stateful_dataloader")
EPOCHS, LENGTH, BATCH_SIZE = 3, 11, 3
BATCHES = -(-LENGTH // BATCH_SIZE) * EPOCHS


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples that carry draws from all three generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.random(), float(np.random.rand()), torch.rand(()).item()]


def make_loader(**options: Any) -> TrackedLoader:
    loaded = stateful.StatefulDataLoader(
        Augmented(), batch_size=BATCH_SIZE, shuffle=True, collate_fn=list, **options
    )
    return TrackedLoader("batches", loaded, Whereabout())


def seed() -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)


@pytest.mark.parametrize("has_generator", [False, True])
def test_each_sample_once_and_the_same_numbers_from_every_position(
    tmp_path: Path, has_generator: bool
) -> None:
    """Also before the first batch, at the last one of an epoch, and where one is not full."""

    def loader() -> TrackedLoader:
        return make_loader(generator=torch.Generator() if has_generator else None)

    seed()
    batches = loader()
    taken, wanted = [], []
    for position in range(BATCHES):
        taken.append(take(tmp_path / str(position), {"batches": batches}, position))
        wanted.append(next(batches))
    per_epoch = BATCHES // EPOCHS
    for epoch in range(EPOCHS):
        ids = [sample[0] for batch in wanted[epoch * per_epoch :][:per_epoch] for sample in batch]
        assert sorted(ids) == list(range(LENGTH))
    orders = {tuple(s[0] for b in wanted[e * per_epoch :][:per_epoch] for s in b) for e in range(3)}
    assert len(orders) == EPOCHS
    for position, snapshot in enumerate(taken):
        for again in (batches, loader()):
            restore(snapshot, {"batches": again})
            assert [next(again) for _ in wanted[position:]] == wanted[position:], position


def test_what_is_done_after_restoring_comes_after_the_restored_numbers(tmp_path: Path) -> None:
    """Making the loader's iterator draws a number; the generators are set behind it."""
    seed()
    batches = make_loader()
    next(batches)
    snapshot = take(tmp_path, {"batches": batches})
    wanted = random.random(), float(np.random.rand()), torch.rand(2).tolist()
    restore(snapshot, {"batches": make_loader()})
    assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == wanted
