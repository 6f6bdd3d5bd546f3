"""Which elements two parts of one tensor share, and where these lie in each part's memory.

Owns: the arithmetic between any saved layout and any layout wanted: boxes of an n-dimensional
tensor, and slices of it flattened, as FSDP1 holds parameters. Does not own: bytes and files
(`loading`), which parts there are (`tensors.reshard`).

Invariant: the overlaps of one wanted part with all saved parts cover each of its elements, if the
saved parts cover the tensor; an element may come twice where saved parts overlap (replicas).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from stepfast.checkpoint.layout import TensorSpec

Shape = tuple[int, ...]


class Overlap(NamedTuple):
    """A box of elements in two memories; starts and strides are counted in elements."""

    shape: Shape
    source_start: int
    source_strides: Shape
    target_start: int
    target_strides: Shape

    @property
    def source_end(self) -> int:
        """Behind the last element that is read."""
        reach = zip(self.shape, self.source_strides, strict=True)
        return self.source_start + sum((size - 1) * stride for size, stride in reach) + 1


class _Region(NamedTuple):
    """A box of the whole tensor that lies in one part's memory from `start` on, by `strides`."""

    offsets: Shape
    shape: Shape
    start: int
    strides: Shape


def true_shape(part: TensorSpec) -> Shape:
    """The shape of the tensor that this is a part of, flattened or not."""
    return part.global_shape if part.original_shape is None else part.original_shape


def overlaps(source: TensorSpec, target: TensorSpec) -> list[Overlap]:
    """What `target` gets from `source`: two parts of one tensor, of whatever layouts."""
    whole = true_shape(source)
    assert whole == true_shape(target), f"{whole} and {true_shape(target)} are different tensors"
    if 0 in source.shape or 0 in target.shape:
        return []
    found = []
    targets = list(_regions(target, whole))
    for from_region in _regions(source, whole):
        for to_region in targets:
            overlap = _meet(from_region, to_region)
            if overlap is not None:
                found.append(overlap)
    return found


def split(overlap: Overlap, source_elements_max: int) -> Iterator[Overlap]:
    """`overlap` in pieces, none of which spans more than so many elements of its source, if that
    can be had by cutting along dimensions.
    """
    span = overlap.source_end - overlap.source_start
    cuttable = [d for d, size in enumerate(overlap.shape) if size > 1]
    if span <= source_elements_max or not cuttable:
        yield overlap
        return
    dim = cuttable[0]  # the slowest one that is left
    stride, size = overlap.source_strides[dim], overlap.shape[dim]
    inner = span - (size - 1) * stride
    rows = (
        max(1, (source_elements_max - inner) // stride + 1) if inner <= source_elements_max else 1
    )
    for first in range(0, size, rows):
        shape = list(overlap.shape)
        shape[dim] = min(rows, size - first)
        piece = overlap._replace(
            shape=tuple(shape),
            source_start=overlap.source_start + first * stride,
            target_start=overlap.target_start + first * overlap.target_strides[dim],
        )
        if rows == 1:
            yield from split(piece, source_elements_max)
        else:
            yield piece


def strides_of(shape: Shape) -> Shape:
    """Of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _regions(part: TensorSpec, whole: Shape) -> Iterator[_Region]:
    """The boxes of a tensor of shape `whole` that `part` has in its memory."""
    if part.original_shape is None:
        yield _Region(part.offsets, part.shape, 0, strides_of(part.shape))
        return
    first, size = part.offsets[0], part.shape[0]
    for offsets, shape in boxes_of_run(first, first + size, whole):
        flat = sum(o * s for o, s in zip(offsets, strides_of(whole), strict=True))
        yield _Region(offsets, shape, flat - first, strides_of(shape))


def boxes_of_run(first: int, end: int, whole: Shape) -> Iterator[tuple[Shape, Shape]]:
    """The elements `first` to `end` of a flattened tensor as boxes (offsets, shape), in order."""
    if first >= end:
        return
    if not whole:
        yield (), ()
        return
    row = math.prod(whole[1:])
    top, bottom = -(-first // row), end // row  # whole rows from top to bottom
    if top > bottom:  # within one row
        yield from _in_row(bottom, first - bottom * row, end - bottom * row, whole)
        return
    if first < top * row:
        yield from _in_row(top - 1, first - (top - 1) * row, row, whole)
    if top < bottom:
        yield (top, *(0 for _ in whole[1:])), (bottom - top, *whole[1:])
    yield from _in_row(bottom, 0, end - bottom * row, whole)


def _in_row(row: int, first: int, end: int, whole: Shape) -> Iterator[tuple[Shape, Shape]]:
    for offsets, shape in boxes_of_run(first, end, whole[1:]):
        yield (row, *offsets), (1, *shape)


def _meet(source: _Region, target: _Region) -> Overlap | None:
    shape, source_start, target_start = [], source.start, target.start
    for dim, (a, b) in enumerate(zip(source.offsets, target.offsets, strict=True)):
        first = max(a, b)
        size = min(a + source.shape[dim], b + target.shape[dim]) - first
        if size <= 0:
            return None
        shape.append(size)
        source_start += (first - a) * source.strides[dim]
        target_start += (first - b) * target.strides[dim]
    return Overlap(tuple(shape), source_start, source.strides, target_start, target.strides)
