"""What a rank says it would keep: each tracked object by its share of a slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.train.checking import objects_of
from stepfast.train.kept import Tracked


def tracked_of(**objects: Any) -> Tracked:
    return Tracked(
        tree=StateTree(objects),
        namespace=SimpleNamespace(**objects),
        loaders=(),
        modules=(),
        optimizers=(),
    )


def test_each_object_has_its_tensors_and_bytes_and_nothing_is_counted_twice():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = tracked_of(model=model, optimizer=optimizer)
    before = {o.name: o for o in objects_of(tracked, tracked.tree.collect())}
    assert before["optimizer"].tensors == 0
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    collected = tracked.tree.collect()
    *own, rest = objects_of(tracked, collected)
    found = {o.name: (o.type, o.tensors, o.size_bytes) for o in own}
    assert found["model"] == ("Linear", 2, (8 * 4 + 4) * 4)
    assert found["optimizer"] == ("AdamW", 6, 2 * (8 * 4 + 4) * 4 + 2 * 4)  # two moments, a step
    assert rest.size_bytes > 0
    tensors = sum(o.tensors for o in (*own, rest))
    assert tensors == len(collected.layout.entries)
    total = collected.layout.file_bytes - collected.layout.data_start
    assert sum(o.size_bytes for o in (*own, rest)) == total


def test_of_very_many_objects_the_last_are_summed_up():
    many = {f"t{n:03}": torch.zeros(2) for n in range(300)}
    tracked = tracked_of(**many)
    *own, rest = objects_of(tracked, tracked.tree.collect())
    assert [o.name for o in own] == list(many)[:256]
    assert rest.tensors >= 300 - 256
