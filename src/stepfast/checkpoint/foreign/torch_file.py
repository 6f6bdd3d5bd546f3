"""What `torch.save` wrote: a zip of raw storages and a pickle that says how tensors lie in them.

Owns: which names such a pickle may have, and what they mean. Does not own: reading a pickle
(`inert`). torch is not needed and not loaded.

Invariants: only dicts of tensors are understood; everything else is refused by name. Bytes of
storages are found, and not read here.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from stepfast.checkpoint.foreign.inert import Made, Name, Pairs, Persistent, read_inert
from stepfast.checkpoint.foreign.source import (
    OpenFile,
    Part,
    Shape,
    Source,
    Stored,
    checked_tensor,
    file_bytes,
)
from stepfast.checkpoint.layout import DTYPE_BYTES
from stepfast.errors import StateError

PICKLE_BYTES_MAX = 1 << 30
_LOCAL_HEADER_BYTES = 30  # of a zip's entry, without name and extra field
_DEPTH_MAX = 100
# What zipfile raises for bytes that are no zip, or a foolish one.
_ZIP_ERRORS = (
    zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error, zlib.error,
)  # fmt: skip

# torch's names of types; None: a type that stepfast does not keep.
DTYPES: Final[dict[str, str | None]] = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8",
    "torch.float8_e5m2": "F8_E5M2", "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int16": "I16", "torch.uint16": "U16", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int32": "I32", "torch.uint32": "U32", "torch.float32": "F32",
    "torch.int64": "I64", "torch.uint64": "U64", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.complex128": None, "torch.complex32": None, "torch.float8_e4m3fnuz": None,
    "torch.float8_e5m2fnuz": None, "torch.float8_e8m0fnu": None, "torch.float4_e2m1fn_x2": None,
}  # fmt: skip
_STORAGES: Final[dict[str, str | None]] = {
    "torch.BoolStorage": "BOOL", "torch.ByteStorage": "U8", "torch.CharStorage": "I8",
    "torch.ShortStorage": "I16", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.IntStorage": "I32", "torch.FloatStorage": "F32", "torch.LongStorage": "I64",
    "torch.DoubleStorage": "F64", "torch.ComplexFloatStorage": "C64",
    "torch.ComplexDoubleStorage": None, "torch.storage.UntypedStorage": "U8",
}  # fmt: skip
_REBUILD = "torch._utils._rebuild_tensor_v2"
_REBUILD_TYPED = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"
ADMITTED: Final = frozenset(
    {*DTYPES, *_STORAGES, _REBUILD, _REBUILD_TYPED, _PARAMETER, _ORDERED, "torch.Size"}
)


class Found(NamedTuple):
    """A tensor in a file: its type, None where stepfast keeps no such ones, and its elements."""

    dtype: str | None
    shape: Shape
    stored: Stored


def read_torch_file(path: Path) -> Source:
    """The tensors of a file that `torch.save` wrote: of a dict, or of dicts in it, by their keys
    with dots between.
    """
    place = str(path)
    archive = _Archive(path, 0, file_bytes(path), place)
    found: dict[str, Found] = {}
    plain_values: list[str] = []
    owners: dict[str, str] = {}

    def look(value: Any, keys: tuple[str, ...]) -> None:
        name, pairs = ".".join(keys), _pairs(value)
        if pairs is not None and len(keys) < _DEPTH_MAX:
            for key, item in pairs:
                look(item, (*keys, str(key) if isinstance(key, str | int) else "?"))
        elif (tensor := archive.tensor(value, name)) is None:
            plain_values.append(name)
        elif not name or name in found:
            raise StateError(f"{place}: it has two tensors {name!r}, or one without a name")
        else:
            found[name] = tensor
            if len(keys) > 1:
                owners[name] = keys[0]

    look(archive.read_pickle(), ())
    tensors = {
        name: checked_tensor(
            place, name, one.dtype, one.shape,
            [Part((0,) * len(one.shape), one.shape, partial(_given, one.stored))],
        )
        for name, one in found.items()
    }  # fmt: skip
    return Source(
        place=place,
        kind="torch file",
        tensors=tensors,
        owners=owners,
        plain_values=tuple(plain_values),
    )


def find_tensor(path: Path, start: int, size_bytes: int, place: str) -> Found:
    """The one tensor that `torch.save` wrote into so many bytes of a file from `start` on."""
    archive = _Archive(path, start, size_bytes, place)
    found = archive.tensor(archive.read_pickle(), place)
    if found is None:
        raise StateError(f"{place}: {path} has no tensor at {start}")
    return found


def sizes_of(value: Any, place: str) -> Shape:
    """A size, as a tuple or a torch.Size of plain numbers."""
    if isinstance(value, Made) and value.name == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or not all(type(n) is int and n >= 0 for n in value):
        raise StateError(f"{place}: a size in its pickle makes no sense")
    return tuple(value)


def _given(stored: Stored) -> Stored:
    return stored


def _pairs(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a dict; None for everything else."""
    if isinstance(value, Pairs):
        return value.items
    if isinstance(value, Made) and value.name == _ORDERED:
        return value.items.items
    return None


class _Archive:
    """One zip of torch's, in a part of a file."""

    def __init__(self, path: Path, start: int, size_bytes: int, place: str) -> None:
        self._path, self._start = path, start
        self._place = place if place == str(path) else f"{place}: {path}"
        with OpenFile(path) as file:
            region = io.BufferedReader(_Region(file.descriptor, start, size_bytes))
            try:
                self._read_directory(region)
            except _ZIP_ERRORS as error:
                text = f"{self._place}: it is cut, or nothing that torch.save wrote"
                raise StateError(text) from error

    def _read_directory(self, region: IO[bytes]) -> None:
        with zipfile.ZipFile(region) as archive:
            self._entries = {info.filename: info for info in archive.infolist()}
            names = [name for name in self._entries if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise StateError(f"{self._place}: it is no file of torch's")
            self._root = names[0].removesuffix("data.pkl")
            pickled = self._entries[names[0]]
            is_plain = pickled.compress_type == zipfile.ZIP_STORED
            if not is_plain or pickled.file_size > PICKLE_BYTES_MAX:
                raise StateError(f"{self._place}: its pickle is none of torch's")
            self._pickle = archive.read(names[0])
            order = self._root + "byteorder"
            if order in self._entries and archive.read(order) != b"little":
                raise StateError(f"{self._place}: it is of a big-endian machine")

    def read_pickle(self) -> Any:
        return read_inert(self._pickle, ADMITTED, self._place)

    def tensor(self, value: Any, name: str) -> Found | None:
        """What a rebuild of a tensor describes; None for any other plain value."""
        if isinstance(value, Made) and value.name == _PARAMETER and value.arguments:
            value = value.arguments[0]
        if not isinstance(value, Made) or value.name not in (_REBUILD, _REBUILD_TYPED):
            return None
        is_typed = value.name == _REBUILD_TYPED
        try:
            storage, first, shape, strides = value.arguments[:4]
            stated = value.arguments[6] if is_typed else None
            kind, key = storage.id[1], storage.id[2]
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise StateError(f"{self._place}: the tensor {name} makes no sense") from error
        if any(_pairs(bits) != [] for bits in value.arguments[7 if is_typed else 6 :]):
            raise StateError(f"{self._place}: {name} is conjugated or negated; save its values")
        dtype, shape = self._dtype(kind, stated), sizes_of(shape, self._place)
        if type(first) is not int or first < 0 or not isinstance(storage, Persistent):
            raise StateError(f"{self._place}: the tensor {name} makes no sense")
        start, size_bytes = self._storage(str(key))
        skipped = first * DTYPE_BYTES.get(dtype or "", 1)
        strides = sizes_of(strides, self._place)
        if len(strides) != len(shape):
            raise StateError(f"{self._place}: the tensor {name} makes no sense")
        stored = Stored(self._path, start + skipped, max(0, size_bytes - skipped), strides)
        return Found(dtype, shape, stored)

    def _dtype(self, kind: Any, stated: Any) -> str | None:
        name = kind if stated is None else stated
        types = _STORAGES if stated is None else DTYPES
        if not isinstance(name, Name) or name.text not in types:
            raise StateError(f"{self._place}: a tensor in it has no type")
        return types[name.text]

    def _storage(self, key: str) -> tuple[int, int]:
        """Where a storage's bytes begin in the file, and how many there are."""
        info = self._entries.get(f"{self._root}data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise StateError(f"{self._place}: it lacks the bytes of a tensor")
        with OpenFile(self._path) as file:
            at = self._start + info.header_offset
            head = file.read(at, _LOCAL_HEADER_BYTES, self._place)
        name_bytes, extra_bytes = (int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
        return at + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes, info.file_size


class _Region(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, descriptor: int, start: int, size_bytes: int) -> None:
        self._descriptor, self._start, self._size_bytes = descriptor, start, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size_bytes - self._at))
        done = os.preadv(self._descriptor, [target[:count]], self._start + self._at)
        self._at += done
        return done
