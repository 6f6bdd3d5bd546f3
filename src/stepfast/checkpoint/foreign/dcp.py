"""A directory of `torch.distributed.checkpoint`, as its FileSystemWriter writes them.

Owns: what `.metadata` says: which tensors there are, and which part of each lies where. Does not
own: reading pickles (`inert`), the tensors inside of data files (`torch_file`).

Invariants: `.metadata` may name DCP's own classes and types of tensors, nothing else. Plain values
(what is no tensor) are named and never opened.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from stepfast.checkpoint.foreign.inert import Made, Name, Pairs, read_inert
from stepfast.checkpoint.foreign.source import (
    Part,
    Shape,
    Source,
    Stored,
    checked_tensor,
    file_bytes,
    inside,
)
from stepfast.checkpoint.foreign.torch_file import DTYPES, find_tensor, sizes_of
from stepfast.errors import ConfigError, StateError

METADATA_FILE = ".metadata"
_METADATA_BYTES_MAX = 4 << 30

_DCP = "torch.distributed.checkpoint.metadata."
_OLD = "torch.distributed._shard.sharded_tensor.metadata."  # before torch 2.3
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_TENSOR = _DCP + "TensorStorageMetadata"
_BYTES = _DCP + "BytesStorageMetadata"
_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
# Where it was saved to is in it as a path: a name here, and no path is ever made.
_PATHS = ("pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.WindowsPath")
ADMITTED: Final = frozenset(
    {
        *(_DCP + name for name in _CLASSES), *DTYPES, *_PATHS, _STORAGE_INFO,
        _OLD + "TensorProperties", _OLD + "MEM_FORMAT_ENCODING",
        "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    }
)  # fmt: skip


class _Chunk(NamedTuple):
    path: Path
    start: int
    size_bytes: int
    name: str
    dtype: str | None
    shape: Shape


def read_dcp(directory: Path) -> Source:
    """The tensors of a distributed checkpoint; StateError says what in it cannot be."""
    path = inside(directory, METADATA_FILE)
    if not path.exists() and list(directory.glob("__*.metadata")):
        raise ConfigError(
            f"{directory} has metadata for each rank and no {METADATA_FILE}: save it with"
            " use_collectives=True"
        )
    if file_bytes(path) > _METADATA_BYTES_MAX:
        raise StateError(f"{path}: so many bytes are no metadata")
    place = f"{directory}/{METADATA_FILE}"
    try:
        metadata = _fields(read_inert(path.read_bytes(), ADMITTED, place), _DCP + "Metadata")
        reader = _Reader(directory, place, metadata)
        return reader.source()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{place}: it is not as torch writes it ({error!r})") from error


class _Reader:
    def __init__(self, directory: Path, place: str, metadata: dict[str, Any]) -> None:
        self._directory, self._place = directory, place
        self._wanted = _text_keys(metadata["state_dict_metadata"])
        self._where = self._storage(metadata["storage_data"])
        self._paths = _paths(metadata.get("planner_data"))
        self._files: dict[str, tuple[Path, int]] = {}

    def source(self) -> Source:
        tensors, plain_values = {}, []
        for name, value in self._wanted.items():
            if value.name == _BYTES:
                plain_values.append(name)
                continue
            state = _fields(value, _TENSOR)
            dtype = _dtype(state["properties"])
            shape = sizes_of(state["size"], self._place)
            chunks = [self._part(name, dtype, chunk) for chunk in state["chunks"]]
            tensors[name] = checked_tensor(self._place, name, dtype, shape, chunks)
        return Source(
            place=str(self._directory),
            kind="distributed checkpoint",
            tensors=tensors,
            owners={n: p[0] for n, p in self._paths.items() if len(p) > 1 and n in tensors},
            plain_values=tuple(plain_values),
        )

    def _storage(self, value: Any) -> dict[tuple[str, Shape], dict[str, Any]]:
        found = {}
        for key, info in value.items:
            index = _fields(key, _DCP + "MetadataIndex")
            if index.get("offset") is not None:
                offsets = sizes_of(index["offset"], self._place)
                found[index["fqn"], offsets] = _fields(info, _STORAGE_INFO)
        return found

    def _part(self, name: str, dtype: str | None, value: Any) -> Part:
        chunk = _fields(value, _DCP + "ChunkStorageMetadata")
        offsets = sizes_of(chunk["offsets"], self._place)
        shape = sizes_of(chunk["sizes"], self._place)
        info = self._where.get((name, offsets))
        if info is None:
            raise StateError(f"{self._place}: it does not say where {name} at {offsets} lies")
        if info.get("transform_descriptors"):
            raise StateError(f"{self._place}: {name} is compressed or encrypted: save it plainly")
        path, file_size = self._file(str(info["relative_path"]))
        start, size_bytes = int(info["offset"]), int(info["length"])
        if start < 0 or size_bytes < 0 or start + size_bytes > file_size:
            raise StateError(f"{path} is cut: {name} ends at {start + size_bytes}")
        chunk_here = _Chunk(path, start, size_bytes, name, dtype, shape)
        return Part(offsets, shape, partial(_find, str(self._directory), chunk_here))

    def _file(self, name: str) -> tuple[Path, int]:
        """A data file and its size; a thousand parts lie in each."""
        if name not in self._files:
            path = inside(self._directory, name)
            self._files[name] = path, file_bytes(path)
        return self._files[name]


def _find(place: str, chunk: _Chunk) -> Stored:
    found = find_tensor(chunk.path, chunk.start, chunk.size_bytes, f"{place}: {chunk.name}")
    if (found.dtype, found.shape) != (chunk.dtype, chunk.shape):
        raise StateError(
            f"{place}: {chunk.name} is {found.dtype} {list(found.shape)} in {chunk.path.name}, and"
            f" {chunk.dtype} {list(chunk.shape)} in {METADATA_FILE}"
        )
    return found.stored


def _fields(value: Any, name: str) -> dict[str, Any]:
    """The fields of an object that must be of the class `name`."""
    if not isinstance(value, Made) or value.name != name:
        raise TypeError(f"no {name.rpartition('.')[2]}")
    return _text_keys(value.state)


def _text_keys(value: Any) -> dict[str, Any]:
    if not isinstance(value, Pairs) or not all(isinstance(key, str) for key, _ in value.items):
        raise TypeError("names that are no text")
    return dict(value.items)


def _dtype(properties: Any) -> str | None:
    """Of a TensorProperties: the first of a tuple, or a field."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else _text_keys(state)["dtype"]
    if not isinstance(dtype, Name):
        raise TypeError("a type that is no name")
    return DTYPES[dtype.text]


def _paths(planner_data: Any) -> dict[str, tuple[str, ...]]:
    """Of each name the keys that led to it in the state that was saved, where that is known."""
    if not isinstance(planner_data, Pairs):
        return {}
    return {
        name: tuple(map(str, path))
        for name, path in planner_data.items
        if isinstance(name, str) and isinstance(path, tuple)
    }
