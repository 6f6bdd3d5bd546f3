"""A checkpoint of somebody else's: its tensors by name, and their bytes, read a tensor at a time.

Owns: what any kind of source gives; whole tensors out of parts and strides; names of files that
may not lead elsewhere. Does not own: the kinds (`hugging_face`, `dcp`, `torch_file`).

Invariants:
- What a tensor's parts do not cover, each element once, is a StateError, never a zero.
- At most two whole tensors are in memory, and of one that lies in its file as it is only a piece.
- Files are read, never mapped: one that is cut meanwhile is an error and no crash.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from stepfast.checkpoint.layout import DTYPE_BYTES
from stepfast.checkpoint.overlap import strides_of
from stepfast.errors import OperatingError, StateError

PIECE_BYTES = 4 << 20
# Numbers of that size; what they mean does not matter.
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """Where the elements of a part lie: from byte `start` of a file on, by `strides` in elements.

    `size_bytes` is what may be read from there.
    """

    path: Path
    start: int
    size_bytes: int
    strides: Shape


class Part(NamedTuple):
    """A box of a tensor; `find` says where its elements lie, and may have to read for that."""

    offsets: Shape
    shape: Shape
    find: Callable[[], Stored]


class ForeignTensor(NamedTuple):
    """A tensor as a whole; `dtype` as the safetensors format has it."""

    dtype: str
    shape: Shape
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Source:
    """What was found in a directory or a file.

    `owners` has, for names that lie in a dict of the state that was saved, the key of that dict.
    `plain_values` are named and not read.
    """

    place: str
    kind: str
    tensors: Mapping[str, ForeignTensor]
    owners: Mapping[str, str] = field(default_factory=dict)
    plain_values: tuple[str, ...] = ()


def checked_tensor(
    place: str, name: str, dtype: str | None, shape: Shape, parts: Collection[Part]
) -> ForeignTensor:
    """The tensor, if stepfast keeps such ones and its parts make it up; else StateError."""
    if dtype not in DTYPE_BYTES:
        raise StateError(f"{place}: {name} has a type that stepfast does not keep ({dtype})")
    if any(size < 0 for size in shape):
        raise StateError(f"{place}: the shape {list(shape)} of {name} makes no sense")
    boxes = {(part.offsets, part.shape): part for part in parts if 0 not in part.shape}
    for offsets, size in boxes:
        fits = len(offsets) == len(size) == len(shape) and all(
            o >= 0 and s > 0 and o + s <= whole
            for o, s, whole in zip(offsets, size, shape, strict=True)
        )
        if not fits:
            raise StateError(f"{place}: a part of {name} lies outside of its {list(shape)}")
    covered = sum(math.prod(size) for _, size in boxes)
    if covered != math.prod(shape) or not _is_tiled(list(boxes), shape):
        raise StateError(f"{place}: the parts of {name} do not make up its {list(shape)}")
    return ForeignTensor(dtype, shape, tuple(boxes.values()))


def pieces(place: str, name: str, tensor: ForeignTensor) -> Iterator[memoryview]:
    """The tensor's bytes in order, row by row; a piece is good until the next is asked for."""
    if tensor.size_bytes == 0:
        return
    if len(tensor.parts) == 1:
        stored = tensor.parts[0].find()
        if _is_row_major(stored.strides, tensor.shape):
            yield from _file_pieces(stored, tensor.size_bytes, f"{place}: {name}")
            return
    whole = memoryview(bytearray(tensor.size_bytes))
    for part in tensor.parts:
        _place(part, part.find(), tensor, whole, f"{place}: {name}")
    yield from (whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES))


def inside(directory: Path, name: str) -> Path:
    """The file of that name in `directory`; StateError where the name or a link leads elsewhere.

    Beside a directory below `snapshots`, as in the cache of Hugging Face, `blobs` is no elsewhere.
    """
    root = directory.resolve()
    if not name or "\\" in name or "\0" in name or name.startswith("/"):
        raise StateError(f"{directory}: it names the file {name!r}, which cannot be in it")
    path = (root / name).resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if ".." in name.split("/") or not any(path.is_relative_to(one) for one in allowed):
        raise StateError(f"{directory}: it names the file {name!r}, which leads out of it")
    return path


def file_bytes(path: Path) -> int:
    """The size of a regular file; StateError where there is none."""
    try:
        status = path.stat()
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise StateError(f"{path} is no regular file")
    return status.st_size


class OpenFile:
    """A file that is read at places."""

    def __init__(self, path: Path) -> None:
        """StateError where it cannot be opened."""
        self._path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from error

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)

    def read_into(self, start: int, target: memoryview, what: str) -> None:
        """Fill `target` from byte `start` on; StateError where the file ends before."""
        done = 0
        try:
            while done < len(target):
                count = os.preadv(self.descriptor, [target[done:]], start + done)
                if count == 0:
                    raise StateError(f"{what}: {self._path} is cut: it ends at {start + done}")
                done += count
        except OSError as error:
            raise OperatingError(f"{self._path}: {error.strerror}") from error

    def read(self, start: int, size_bytes: int, what: str) -> bytes:
        """So many bytes from `start` on."""
        data = bytearray(size_bytes)
        self.read_into(start, memoryview(data), what)
        return bytes(data)


def _file_pieces(stored: Stored, size_bytes: int, what: str) -> Iterator[memoryview]:
    _check_room(stored, size_bytes, what)
    buffer = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
    with OpenFile(stored.path) as file:
        for at in range(0, size_bytes, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size_bytes - at)]
            file.read_into(stored.start + at, piece, what)
            yield piece


def _check_room(stored: Stored, size_bytes: int, what: str) -> None:
    if size_bytes > stored.size_bytes:
        raise StateError(f"{what}: {stored.path} has only {stored.size_bytes} bytes of it")


def _place(part: Part, stored: Stored, tensor: ForeignTensor, whole: memoryview, what: str) -> None:
    """Copy a part from its file to its place."""
    item_bytes = DTYPE_BYTES[tensor.dtype]
    target_strides = strides_of(tensor.shape)
    first = sum(o * s for o, s in zip(part.offsets, target_strides, strict=True))
    shape, sources, targets = _merged(part.shape, stored.strides, target_strides)
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, sources, strict=True))
    _check_room(stored, reach * item_bytes, what)
    with OpenFile(stored.path) as file:
        if (sources, targets) in (((), ()), ((1,), (1,))):
            start, end = first * item_bytes, (first + math.prod(shape)) * item_bytes
            file.read_into(stored.start, whole[start:end], what)
            return
        source = memoryview(bytearray(reach * item_bytes))
        file.read_into(stored.start, source, what)
    kind = _FORMATS[item_bytes]
    _copy(source.cast(kind), whole.cast(kind), first, shape, sources, targets)


def _copy(
    source: memoryview, target: memoryview, first: int, shape: Shape, sources: Shape, targets: Shape
) -> None:
    """A box between two memories, a run of the last dimension at a time."""
    count, step_from, step_to = shape[-1], sources[-1], targets[-1]
    for index in itertools.product(*(range(size) for size in shape[:-1])):
        read = sum(i * s for i, s in zip(index, sources, strict=False))
        write = first + sum(i * s for i, s in zip(index, targets, strict=False))
        run = target[write : write + (count - 1) * step_to + 1 : step_to]
        if step_from == 0:  # as `expand` makes them
            for position in range(count):
                run[position] = source[read]
        else:
            run[:] = source[read : read + (count - 1) * step_from + 1 : step_from]


def _merged(shape: Shape, sources: Shape, targets: Shape) -> tuple[Shape, Shape, Shape]:
    """The same box in as few dimensions as both memories allow."""
    dims: list[tuple[int, int, int]] = []
    for size, source, target in zip(shape, sources, targets, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (source * size, target * size):
            dims[-1] = (dims[-1][0] * size, source, target)
        else:
            dims.append((size, source, target))
    return tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims)


def _is_row_major(strides: Shape, shape: Shape) -> bool:
    pairs = zip(strides, strides_of(shape), shape, strict=True)
    return all(size == 1 or given == wanted for given, wanted, size in pairs)


def _is_tiled(boxes: list[tuple[Shape, Shape]], shape: Shape, dim: int = 0) -> bool:
    """Whether boxes that lie inside make up `shape`, each element once, from `dim` on."""
    if 0 in shape:
        return True
    if dim == len(shape):
        return len(boxes) == 1
    cuts = sorted({0, shape[dim]}.union(*((o[dim], o[dim] + s[dim]) for o, s in boxes)))
    number = {cut: index for index, cut in enumerate(cuts)}
    slabs: list[list[tuple[Shape, Shape]]] = [[] for _ in cuts[1:]]
    for box in boxes:
        start, size = box[0][dim], box[1][dim]
        for index in range(number[start], number[start + size]):
            slabs[index].append(box)
    return all(_is_tiled(slab, shape, dim + 1) for slab in slabs)
