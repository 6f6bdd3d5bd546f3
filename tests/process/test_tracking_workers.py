"""A tracked loader with worker processes comes back at any batch of any epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepfast.train.data import TrackedLoader
from stepfast.train.whereabouts import Whereabout
from unit.tracked import restore, take

stateful = pytest.importorskip("torchdata.stateful_dataloader")


def loader(worker_count: int) -> TrackedLoader:
    loaded = stateful.StatefulDataLoader(
        list(range(11)), batch_size=3, shuffle=True, num_workers=worker_count
    )
    return TrackedLoader("batches", loaded, Whereabout())


def test_the_order_goes_on_from_every_position(tmp_path: Path):
    """Before the first batch, in an epoch, at the last of one and at the first of the next."""
    torch.manual_seed(1)
    batches = loader(2)
    taken, wanted = [], []
    for position in range(8):
        taken.append(take(tmp_path / str(position), {"batches": batches}, position))
        wanted.append(next(batches).tolist())
    batches.drop()
    assert sorted(number for batch in wanted[4:] for number in batch) == list(range(11))
    for position in (0, 1, 3, 4, 5):
        again = loader(2)
        restore(taken[position], {"batches": again})
        assert [next(again).tolist() for _ in wanted[position:]] == wanted[position:], position
        again.drop()
