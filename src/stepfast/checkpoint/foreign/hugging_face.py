"""Safetensors files: one by itself, or a directory as Hugging Face's libraries and torch's
`HuggingFaceStorageWriter` write models.

Owns: the header of a foreign file, the index, which files of a directory count. Does not own: a
slot's own header (`checkpoint.layout`).

Invariants: a file is taken only where its header and its size agree; a name has one meaning; what
the index says is in a file is there, and nothing else.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepfast.checkpoint.foreign.source import (
    OpenFile,
    Part,
    Shape,
    Source,
    Stored,
    checked_tensor,
    file_bytes,
    inside,
)
from stepfast.checkpoint.layout import DTYPE_BYTES, HEADER_BYTES_MAX
from stepfast.checkpoint.overlap import strides_of
from stepfast.errors import ConfigError, StateError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_INDEX_BYTES_MAX = 1 << 30
_LENGTH_BYTES = 8
_SHARDING_KEY = "DCP_SHARDING_INFO"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Sharding(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


class _File(NamedTuple):
    path: Path
    data_start: int
    entries: dict[str, _Entry]
    sharding: dict[str, _Sharding] | None  # None: every tensor in it is whole


def read_safetensors(path: Path) -> Source:
    """The tensors of one file."""
    return _gathered(str(path), "safetensors", [_read_header(path)])


def read_hugging_face(directory: Path) -> Source:
    """The tensors of a model's directory: those of its index, or of its one file.

    StateError where files and index do not agree or a file is cut, ConfigError where the directory
    has none.
    """
    if (directory / "manifest.json").is_file():
        raise ConfigError(f"{directory} is a checkpoint of stepfast's own; it needs no import")
    index = _read_index(directory / INDEX_FILE) if (directory / INDEX_FILE).exists() else None
    names = sorted(set(index.values())) if index is not None else _unindexed(directory)
    files = {name: _read_header(inside(directory, name)) for name in names}
    if any(file.sharding is not None for file in files.values()):
        # An index names one file for each tensor; its parts may lie in any.
        rest = {path.name for path in directory.glob("*.safetensors")} - files.keys()
        files |= {name: _read_header(inside(directory, name)) for name in sorted(rest)}
    elif index is not None:
        _check_index(directory, index, files)
    return _gathered(str(directory), "safetensors", list(files.values()))


def _unindexed(directory: Path) -> list[str]:
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if SINGLE_FILE in found:
        return [SINGLE_FILE]
    if len(found) > 1 and any(not name.startswith("shard-") for name in found):
        raise ConfigError(
            f"{directory} has {len(found)} safetensors files and no {INDEX_FILE}; give one of them,"
            " or get the index too"
        )
    if not found:
        for path in sorted(directory.glob("*.bin"))[:1]:
            raise ConfigError(f"{directory} has no safetensors files; give {path.name} itself")
        raise ConfigError(
            f"{directory} has neither {INDEX_FILE}, {SINGLE_FILE} nor .metadata: it is no model's"
            " directory and no distributed checkpoint"
        )
    return found


def _read_index(path: Path) -> dict[str, str]:
    if file_bytes(path) > _INDEX_BYTES_MAX:
        raise StateError(f"{path}: so many bytes are no index")
    document = _json(path.read_bytes(), str(path))
    found = document.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise StateError(f"{path}: it has no weight_map of names and files")
    return found


def _check_index(directory: Path, index: dict[str, str], files: dict[str, _File]) -> None:
    for name, file in index.items():
        if name not in files[file].entries:
            raise StateError(f"{directory}: the index has {name} in {file}, which does not have it")
    for file_name, file_read in files.items():
        for name in file_read.entries:
            if index.get(name) != file_name:
                there = index.get(name, "in no file")
                raise StateError(f"{directory}: {file_name} has {name}, the index has it {there}")


def _read_header(path: Path) -> _File:
    size_bytes = file_bytes(path)
    with OpenFile(path) as file:
        first = file.read(0, min(_LENGTH_BYTES, size_bytes), str(path))
        length = int.from_bytes(first, "little")
        data_start = _LENGTH_BYTES + length
        if len(first) < _LENGTH_BYTES or length > HEADER_BYTES_MAX or data_start > size_bytes:
            raise StateError(f"{path}: it is no whole safetensors file: its header is cut")
        raw = file.read(_LENGTH_BYTES, length, str(path))
    document = _json(raw, str(path))
    try:
        metadata = msgspec.convert(document.pop("__metadata__", {}), dict[str, str])
        entries = msgspec.convert(document, dict[str, _Entry])
        sharding = None
        if _SHARDING_KEY in metadata:
            sharding = msgspec.json.decode(metadata[_SHARDING_KEY], type=dict[str, _Sharding])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"{path}: its header is damaged: {error}") from error
    _check_places(path, entries, size_bytes - data_start)
    if sharding is not None and (lost := entries.keys() - sharding.keys()):
        raise StateError(f"{path}: it does not say which part it has of {min(lost)}")
    return _File(path, data_start, entries, sharding)


def _check_places(path: Path, entries: dict[str, _Entry], data_bytes: int) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        item_bytes = DTYPE_BYTES.get(entry.dtype)
        elements = 1
        for size in entry.shape:
            elements *= size
        wrong = item_bytes is not None and end - start != elements * item_bytes
        if start != position or end < start or wrong or min(entry.shape, default=0) < 0:
            raise StateError(f"{path}: the bytes of {name} are not where they must be")
        position = end
    if position != data_bytes:
        raise StateError(
            f"{path} is cut or longer than it was: it has {data_bytes} bytes of data, and its"
            f" header says {position}"
        )


def _gathered(place: str, kind: str, files: list[_File]) -> Source:
    parts: dict[str, list[tuple[_File, _Entry, Shape]]] = {}
    for file in files:
        for name, entry in file.entries.items():
            offsets = (0,) * len(entry.shape)
            if file.sharding is not None:
                offsets = file.sharding[name].saved_offsets
            parts.setdefault(name, []).append((file, entry, offsets))
    tensors = {}
    for name, found in parts.items():
        (first, entry, _), *rest = found
        if rest and any(file.sharding is None for file, _, _ in found):
            names = " and ".join(sorted({file.path.name for file, _, _ in found}))
            raise StateError(f"{place}: {name} is in {names}")
        if any(e.dtype != entry.dtype or len(e.shape) != len(o) for _, e, o in found):
            raise StateError(f"{place}: the parts of {name} do not belong together")
        ends = [tuple(map(sum, zip(o, e.shape, strict=True))) for _, e, o in found]
        shape = tuple(map(max, zip(*ends, strict=False))) if first.sharding else entry.shape
        if any(len(end) != len(shape) for end in ends):
            raise StateError(f"{place}: the parts of {name} do not belong together")
        tensors[name] = checked_tensor(
            place, name, entry.dtype, shape, [_part(f, e, o) for f, e, o in found]
        )
    return Source(place=place, kind=kind, tensors=tensors)


def _part(file: _File, entry: _Entry, offsets: Shape) -> Part:
    start, end = entry.data_offsets
    stored = Stored(file.path, file.data_start + start, end - start, strides_of(entry.shape))
    return Part(offsets, entry.shape, partial(_given, stored))


def _given(stored: Stored) -> Stored:
    return stored


def _json(raw: bytes, place: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise StateError(f"{place}: it has two entries {twice!r}")
        return found

    try:
        document = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise StateError(f"{place}: it is no readable JSON: {error}") from error
    if not isinstance(document, dict):
        raise StateError(f"{place}: it is no JSON of names and values")
    return document
