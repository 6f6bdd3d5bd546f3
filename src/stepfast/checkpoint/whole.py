"""Tensors of a checkpoint as wholes, put together from all ranks' files; without torch.

Owns: putting tensors together, comparing two checkpoints. Does not own: reading parts, that they
are what was written, and that none is missing (`loading`); tensors in a job (`tensors`).

Invariants: a whole has every element from a part; one tensor at a time is in memory, and two where
checkpoints of different layouts are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from stepfast.checkpoint.layout import DTYPE_BYTES, Entry, private_rank
from stepfast.checkpoint.loading import Chunk, StoredCheckpoint
from stepfast.checkpoint.manifest import TensorInfo
from stepfast.checkpoint.overlap import strides_of, true_shape

_PIECE_BYTES = 64 << 20
_Place = tuple[bool, tuple[int, ...], tuple[int, ...]]  # whether flattened, offsets, shape


class Difference(msgspec.Struct, frozen=True):
    """One thing in which two checkpoints differ; `before` or `after` is None where it is absent.

    Plain values have the name of their rank, and no shape.
    """

    name: str
    before: TensorInfo | None
    after: TensorInfo | None


class WholeCheckpoint:
    """A committed checkpoint, by tensor; for one thread."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        """Reads the header of every file; StateError where they are not all of each tensor."""
        self.stored = stored
        self.parts = stored.index

    @property
    def shared_names(self) -> list[str]:
        """The names of the tensors that are no single rank's own, sorted."""
        return sorted(name for name in self.parts if private_rank(name) is None)

    def info(self, name: str) -> TensorInfo:
        """What the tensor is as a whole."""
        entry = self.parts[name][0].entry
        return TensorInfo(entry.dtype, true_shape(entry))

    def size_bytes(self, name: str) -> int:
        """What the whole tensor takes."""
        info = self.info(name)
        return math.prod(info.shape) * DTYPE_BYTES[info.dtype]

    def whole(self, name: str) -> bytearray:
        """The tensor's bytes, row by row."""
        shape, data = self.info(name).shape, bytearray(self.size_bytes(name))
        for chunk in self._distinct_parts(name):
            source = memoryview(b"".join(self.pieces(chunk)))
            item_bytes = DTYPE_BYTES[chunk.entry.dtype]
            position = 0
            for start, size in _runs(chunk.entry, shape):
                end = position + size * item_bytes
                data[start * item_bytes : (start + size) * item_bytes] = source[position:end]
                position = end
        return data

    def pieces(self, chunk: Chunk) -> Iterator[memoryview]:
        """The verified bytes of one part, in order."""
        rank, entry = chunk
        starts = range(entry.start, entry.end, _PIECE_BYTES)
        ranges = ((rank, start, min(start + _PIECE_BYTES, entry.end)) for start in starts)
        return self.stored.read_ranges(ranges)

    def _distinct_parts(self, name: str) -> list[Chunk]:
        """The parts that make up the whole, one for each place."""
        by_place: dict[_Place, Chunk] = {}
        for chunk in self.parts[name]:
            if chunk.entry.size_bytes:
                by_place.setdefault(_place_of(chunk.entry), chunk)
        return list(by_place.values())


def compare(before: WholeCheckpoint, after: WholeCheckpoint) -> list[Difference]:
    """In what two checkpoints differ, by name.

    What is a rank's alone (plain values, generators) is compared where both have as many ranks. The
    step itself is no difference.
    """
    ranks = before.stored.world_size
    is_same_world = ranks == after.stored.world_size
    names = before.parts.keys() | after.parts.keys()
    found = []
    for name in sorted(names):
        if private_rank(name) is not None and not is_same_world:
            continue
        old = before.info(name) if name in before.parts else None
        new = after.info(name) if name in after.parts else None
        if old != new or not _has_same_bytes(before, after, name):
            found.append(Difference(name, old, new))
    found.extend(
        Difference(f"plain values of rank {rank}", None, None)
        for rank in (range(ranks) if is_same_world else ())
        if before.stored.plain(rank) != after.stored.plain(rank)
    )
    return found


def _has_same_bytes(before: WholeCheckpoint, after: WholeCheckpoint, name: str) -> bool:
    old, new = before.parts[name], after.parts[name]
    if [_place_of(c.entry) for c in old] == [_place_of(c.entry) for c in new]:
        # The same layout: part by part, replicas too.
        pairs = zip(old, new, strict=True)
        return all(
            one == other
            for a, b in pairs
            for one, other in zip(before.pieces(a), after.pieces(b), strict=True)
        )
    return before.whole(name) == after.whole(name)


def _place_of(entry: Entry) -> _Place:
    return entry.original_shape is not None, entry.offsets, entry.shape


def _runs(entry: Entry, whole: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The runs of elements, (start, size) in the whole, that a part that is not empty has."""
    if entry.original_shape is not None:
        yield entry.offsets[0], entry.shape[0]
        return
    # From this dimension on, a run is without gaps.
    first = len(whole)
    while first > 0 and entry.shape[first - 1] == whole[first - 1]:
        first -= 1
    first = max(0, first - 1)
    strides = strides_of(whole)
    base = sum(o * s for o, s in zip(entry.offsets, strides, strict=True))
    size = math.prod(entry.shape[first:])
    for index in itertools.product(*(range(count) for count in entry.shape[:first])):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), size
