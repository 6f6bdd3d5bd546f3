"""Saved in one layout, loaded in another: each rank holds what it would have without the detour."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from property.layouts import (
    OPTIMIZERS,
    SNAPSHOT,
    Layout,
    Recipe,
    build,
    digests,
    on_rank,
    save,
    train,
)
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.tensors.reshard import restore
from stepfast.checkpoint.tensors.tree import StateTree

pytest.importorskip("torch.testing._internal.distributed.fake_pg")

LAYOUTS = st.one_of(
    st.just(Layout("plain")),
    st.builds(lambda n: Layout("ddp", (n,)), st.integers(1, 3)),
    st.builds(lambda n: Layout("fsdp", (n,)), st.integers(1, 5)),
    st.builds(lambda n: Layout("last", (n,)), st.integers(2, 3)),
    st.builds(lambda a, b: Layout("hsdp", (a, b)), st.integers(1, 2), st.integers(1, 3)),
    st.builds(lambda a, b: Layout("tp", (a, b)), st.integers(1, 3), st.integers(1, 2)),
)
RECIPES = st.builds(
    Recipe,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    width=st.integers(1, 9),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    seed=st.just(1),
)


# Without shrinking: an example is a few small jobs, and says itself which.
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@example(Layout("fsdp", (2,)), Layout("fsdp", (3,)), Recipe(), 3)
@example(Layout("tp", (2, 2)), Layout("plain"), Recipe(), 3)
@example(Layout("hsdp", (2, 2)), Layout("last", (3,)), Recipe(dtype=torch.bfloat16), 0)
@example(Layout("tp", (3, 2)), Layout("fsdp", (2,)), Recipe(width=9), 3)  # uneven in uneven
@example(Layout("last", (2,)), Layout("tp", (3, 2)), Recipe(width=9), 0)
@given(LAYOUTS, LAYOUTS, RECIPES, st.sampled_from([0, 3]))
def test_any_layout_loads_into_any_other(
    saved: Layout, wanted: Layout, recipe: Recipe, turns: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        store = save(Path(root), saved, recipe, turns=turns)
        for rank in range(wanted.world_size):
            with on_rank(rank, wanted.world_size):
                native = build(wanted, recipe)
                train(native, rank, turns)
                other = recipe._replace(seed=2)
                loaded = build(wanted, other)
                done = restore(
                    StateTree(loaded, rank=rank),
                    StoredCheckpoint.open(store, SNAPSHOT),
                    world_size=wanted.world_size,
                )
                assert digests(loaded, rank) == digests(native, rank)
                assert loaded["scheduler"].state_dict() == native["scheduler"].state_dict()
                groups = [
                    {**g, "params": None, "lr": float(g["lr"])}
                    for o in (loaded, native)
                    for g in o["optimizer"].param_groups
                ]
                assert groups[0] == groups[1]
                assert done.is_resharded or saved.world_size == wanted.world_size
                train(loaded, rank, 1)  # what was made is what the optimizer can go on with
