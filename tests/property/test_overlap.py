"""The arithmetic between layouts against a slow, obvious twin: numbering all elements."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stepfast.checkpoint.layout import TensorSpec
from stepfast.checkpoint.overlap import Overlap, overlaps, split

Shape = tuple[int, ...]
SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def part_of(draw: st.DrawFn, whole: Shape) -> TensorSpec:
    """A box of a tensor, or a slice of it flattened; either may be empty."""
    original = whole if draw(st.booleans()) else None
    if original is not None:
        whole = (math.prod(whole),)
    offsets = tuple(draw(st.integers(0, size)) for size in whole)
    shape = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(whole, offsets, strict=True)
    )
    return TensorSpec("t", "F32", shape, whole, offsets, original_shape=original)


def memory_of(part: TensorSpec, whole: Shape) -> np.ndarray:
    """What lies in a part's memory: the number of each element in the whole tensor."""
    numbers = np.arange(math.prod(whole)).reshape(part.global_shape)
    box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
    return np.ascontiguousarray(numbers[box]).reshape(-1)


def places(overlap: Overlap) -> tuple[list[int], list[int]]:
    """The places of an overlap's elements in both memories, in one order."""
    found: tuple[list[int], list[int]] = ([], [])
    for index in np.ndindex(*overlap.shape):
        for side, (start, strides) in enumerate(
            [
                (overlap.source_start, overlap.source_strides),
                (overlap.target_start, overlap.target_strides),
            ]
        ):
            found[side].append(start + sum(i * s for i, s in zip(index, strides, strict=True)))
    return found


@given(st.data())
def test_two_parts_share_what_counting_says(data: st.DataObject) -> None:
    whole = data.draw(SHAPES)
    source, target = data.draw(part_of(whole)), data.draw(part_of(whole))
    from_memory, to_memory = memory_of(source, whole), memory_of(target, whole)
    copied: list[int] = []
    for overlap in overlaps(source, target):
        here, there = places(overlap)
        assert from_memory[here].tolist() == to_memory[there].tolist()
        assert max(here) + 1 == overlap.source_end
        copied += to_memory[there].tolist()
    assert sorted(copied) == sorted(set(from_memory.tolist()) & set(to_memory.tolist()))


@given(st.data(), st.integers(1, 40))
def test_pieces_are_the_whole_and_small(data: st.DataObject, most: int) -> None:
    whole = data.draw(SHAPES)
    source, target = data.draw(part_of(whole)), data.draw(part_of(whole))
    for overlap in overlaps(source, target):
        pieces = list(split(overlap, most))
        found = [pair for piece in pieces for pair in zip(*places(piece), strict=True)]
        assert sorted(found) == sorted(zip(*places(overlap), strict=True))
        for piece in pieces:
            assert piece.source_end - piece.source_start <= most
