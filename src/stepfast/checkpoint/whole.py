"""Tensors of a checkpoint as wholes, put together from all ranks' files; without torch.

Owns: which parts a tensor has, putting them together, comparing two checkpoints.
Does not own: tensors in a job (`tensors`), whether the bytes are those that were written
(`catalog.verify` says that).

Invariants: a whole has every element from exactly one part, or it is a StateError; one tensor at a
time is in memory, and two where checkpoints of different layouts are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import msgspec
import xxhash

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.commit import read_layout
from stepfast.checkpoint.layout import DTYPE_BYTES, Entry
from stepfast.checkpoint.manifest import Manifest, TensorInfo
from stepfast.checkpoint.parallel import SMALL_REQUESTS, in_parallel
from stepfast.checkpoint.store import CheckpointStore
from stepfast.errors import StateError

_PIECE_BYTES = 16 << 20
_Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and shape


class Part(msgspec.Struct, frozen=True):
    """What one rank's file has of a tensor; `start` counts from the beginning of the file."""

    name: str
    entry: Entry
    start: int

    @property
    def box(self) -> _Box:
        """Where in the whole it lies."""
        return self.entry.offsets, self.entry.shape


class Difference(msgspec.Struct, frozen=True):
    """One thing in which two checkpoints differ; `before` or `after` is None where it is absent.

    Plain values have the name of their rank, and no shape.
    """

    name: str
    before: TensorInfo | None
    after: TensorInfo | None


class WholeCheckpoint:
    """A committed checkpoint, by tensor."""

    def __init__(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Reads the header of every file."""
        self.manifest = manifest
        self._store = store
        self.parts: dict[str, list[Part]] = {}
        self._plain: list[Part] = []
        names = [f"{manifest.name}/{file.name}" for file in manifest.files]
        found = in_parallel(partial(read_layout, store), names, SMALL_REQUESTS)
        for name, (layout, _) in zip(names, found, strict=True):
            start = layout.data_start
            self._plain.append(Part(name, layout.plain, start + layout.plain.start))
            for entry in layout.entries:
                part = Part(name, entry, start + entry.start)
                self.parts.setdefault(entry.name, []).append(part)

    def info(self, name: str) -> TensorInfo:
        """What the tensor is as a whole, by the first rank that has it."""
        entry = self.parts[name][0].entry
        return TensorInfo(entry.dtype, entry.global_shape)

    def plain(self, rank: int) -> bytes:
        """One rank's plain values."""
        part = self._plain[rank]
        area = self._store.read(part.name, part.start, part.entry.size_bytes)
        try:
            return layouts.unframe_plain(memoryview(area))
        except ValueError as error:
            raise StateError(f"{self._store.url}/{part.name}: {error}") from error

    def pieces(self, part: Part) -> Iterator[memoryview]:
        """The bytes of one part; each piece is good until the next is asked for."""
        done, size_bytes = 0, part.entry.size_bytes
        buffer = memoryview(bytearray(min(_PIECE_BYTES, size_bytes)))
        while done < size_bytes:
            piece = buffer[: min(_PIECE_BYTES, size_bytes - done)]
            self._store.read_into(part.name, part.start + done, piece)
            done += len(piece)
            yield piece

    def distinct_parts(self, name: str) -> list[Part]:
        """The parts that make up the whole, one for each place; StateError where some are missing
        or ranks hold different things under the name.
        """
        info = self.info(name)
        by_box: dict[_Box, Part] = {}
        for part in self.parts[name]:
            if (part.entry.dtype, part.entry.global_shape) != (info.dtype, info.shape):
                raise StateError(f"{name}: ranks have different tensors of that name")
            if part.entry.size_bytes or not by_box:
                by_box.setdefault(part.box, part)
        elements = sum(math.prod(shape) for _, shape in by_box)
        if elements != math.prod(info.shape):
            raise StateError(
                f"{name}: the files have {elements} of its {math.prod(info.shape)} elements"
            )
        return [part for _, part in sorted(by_box.items())]

    def whole(self, name: str) -> bytearray:
        """The tensor's bytes, row by row."""
        info, parts = self.info(name), self.distinct_parts(name)
        item_bytes = DTYPE_BYTES[info.dtype]
        data = bytearray(math.prod(info.shape) * item_bytes)
        for part in parts:
            source = memoryview(b"".join(self.pieces(part)))
            position = 0
            for start, size in _runs(part.box, info.shape):
                end = position + size * item_bytes
                data[start * item_bytes : (start + size) * item_bytes] = source[position:end]
                position = end
        return data

    def digest(self, part: Part) -> str:
        """The digest of one part's bytes."""
        hasher = xxhash.xxh3_128()
        for piece in self.pieces(part):
            hasher.update(piece)
        return hasher.hexdigest()


def compare(before: WholeCheckpoint, after: WholeCheckpoint) -> list[Difference]:
    """In what two checkpoints differ, by name. Plain values are compared where both have as many
    ranks; the step itself is no difference.
    """
    found = []
    for name in sorted(before.parts.keys() | after.parts.keys()):
        old = before.info(name) if name in before.parts else None
        new = after.info(name) if name in after.parts else None
        if old != new or not _has_same_bytes(before, after, name):
            found.append(Difference(name, old, new))
    ranks = before.manifest.world_size
    if ranks == after.manifest.world_size:
        changed = [rank for rank in range(ranks) if before.plain(rank) != after.plain(rank)]
        found += [Difference(f"plain values of rank {rank}", None, None) for rank in changed]
    return found


def _has_same_bytes(before: WholeCheckpoint, after: WholeCheckpoint, name: str) -> bool:
    old, new = before.parts[name], after.parts[name]
    if [part.box for part in old] == [part.box for part in new]:
        # The same layout: part by part, replicas too.
        return all(before.digest(a) == after.digest(b) for a, b in zip(old, new, strict=True))
    return before.whole(name) == after.whole(name)


def _runs(box: _Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The runs of elements, (start, size) in the whole, that a part consists of, in order."""
    offsets, sizes = box
    if not math.prod(sizes):
        return
    # From this dimension on, a run is without gaps.
    first = len(shape)
    while first > 0 and sizes[first - 1] == shape[first - 1]:
        first -= 1
    first = max(0, first - 1)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    size = math.prod(sizes[first:])
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for index in itertools.product(*(range(count) for count in sizes[:first])):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), size
