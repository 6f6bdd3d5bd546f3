"""Whether parts make up their tensors, against a slow, obvious twin: marking all elements."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from property.layouts import Layout as Ranks
from property.layouts import Recipe, build, on_rank
from property.test_overlap import SHAPES, part_of
from property.test_reshard import LAYOUTS
from stepfast.checkpoint.coverage import Coverage, first_gap
from stepfast.checkpoint.layout import Layout, TensorSpec, private_rank
from stepfast.checkpoint.tensors.tree import StateTree

pytest.importorskip("torch.testing._internal.distributed.fake_pg")


def holes(parts: list[TensorSpec], whole: tuple[int, ...]) -> np.ndarray:
    """Which elements no part has."""
    missing = np.ones(whole, dtype=bool)
    for part in parts:
        box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
        if part.original_shape is None:
            missing[box] = False
        else:
            missing.reshape(-1)[box] = False
    return missing


def problems_of(parts: list[TensorSpec]) -> dict[str, str]:
    """Each part is a rank's."""
    coverage = Coverage()
    for rank, part in enumerate(parts):
        coverage.add(Layout.build([part], 10, rank=rank))
    return coverage.problems()


@st.composite
def cut_up(draw: st.DrawFn, whole: tuple[int, ...]) -> list[TensorSpec]:
    """A grid of parts that make up the whole, some of them twice, in any order."""
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in whole]
    boxes = itertools.product(*(itertools.pairwise(found) for found in cuts))
    parts = [
        TensorSpec("t", "F32", tuple(b - a for a, b in box), whole, tuple(a for a, _ in box))
        for box in boxes
    ]
    doubled = draw(st.lists(st.sampled_from(parts), max_size=3)) if parts else []
    return draw(st.permutations([*parts, *doubled]))


@settings(max_examples=300)
@given(st.data())
def test_any_parts_are_whole_if_marking_says_so(data: st.DataObject) -> None:
    whole = data.draw(SHAPES)
    parts = data.draw(cut_up(whole))
    for _ in range(data.draw(st.integers(0, min(2, len(parts) - 1)))):
        del parts[data.draw(st.integers(0, len(parts) - 1))]
    parts += [data.draw(part_of(whole)) for _ in range(data.draw(st.integers(0, 3)))]
    missing = holes(parts, whole)
    found = problems_of(parts)
    assert found.keys() == ({"t"} if missing.any() else set()), found


@settings(max_examples=300)
@given(st.data())
def test_the_gap_that_is_named_is_one(data: st.DataObject) -> None:
    whole = data.draw(SHAPES)
    parts = [data.draw(part_of(whole)) for _ in range(data.draw(st.integers(1, 5)))]
    parts = [p for p in parts if p.original_shape is None and math.prod(p.shape)]
    missing = holes(parts, whole)
    gap = first_gap([(p.offsets, p.shape) for p in parts], whole)
    assert (gap is not None) == missing.any()
    if gap is not None:
        box = tuple(slice(o, o + n) for o, n in zip(*gap, strict=True))
        assert missing[box].all() and missing[box].size > 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(LAYOUTS, st.sampled_from([Recipe(), Recipe(width=9)]), st.data())
def test_every_layout_is_whole_and_misses_what_is_taken_out(
    ranks: Ranks, recipe: Recipe, data: st.DataObject
) -> None:
    layouts = []
    for rank in range(ranks.world_size):
        with on_rank(rank, ranks.world_size):
            layouts.append(StateTree(build(ranks, recipe), rank=rank).collect().layout)
    coverage = Coverage()
    for layout in layouts:
        coverage.add(layout)
    assert coverage.problems(coverage.tensors) == {}
    rank = data.draw(st.integers(0, len(layouts) - 1))
    shared = [spec for n, spec in layouts[rank].specs.items() if private_rank(n) is None]
    taken = data.draw(st.sampled_from(shared))
    if data.draw(st.booleans()) and taken.shape and taken.shape[0] > 1:  # all but its last row
        rest = [msgspec.structs.replace(taken, shape=(taken.shape[0] - 1, *taken.shape[1:]))]
    else:
        rest = []
    specs = [spec for spec in layouts[rank].specs.values() if spec.name != taken.name]
    layouts[rank] = Layout.build([*specs, *rest], 100, rank=rank)
    hurt = Coverage()
    for layout in layouts:
        hurt.add(layout)
    parts = [layout.specs[taken.name] for layout in layouts if taken.name in layout.specs]
    is_whole = bool(parts) and not holes(parts, taken.global_shape).any()
    found = hurt.problems(coverage.tensors)
    assert found.keys() == (set() if is_whole else {taken.name}), found
