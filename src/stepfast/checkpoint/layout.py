"""The bytes of a slot file: which tensor lies where, and what the file says about itself.

Owns: the header of a slot, its seal, and the frame of the plain values.
Does not own: files and mappings (`arena`), tensors (`tensors`), the plain values' codec (`plain`).

Names: what is a rank's alone (its plain values, its generators, its loaders' positions) is named
`stepfast.rank-NNNNN.*`; every other name means the same tensor in the files of all ranks.

Invariants:
- A slot is, byte for byte, a valid `.safetensors` file: 8 bytes of little-endian header length, a
  JSON header, data without holes. `__metadata__` carries the sharding metadata of PyTorch's DCP.
- The seal has a fixed place and width; sealing changes no other byte. A torn one reads as unsealed.
- Two layouts with one digest agree in every name, dtype, shape, global shape, offset and original
  shape. How much room the plain values have is no part of it: processes with the same tensors share
  their slots.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache

import msgspec

from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import ScriptError

RANKS_MAX = 100_000
HEADER_BYTES_MAX = 100_000_000  # the format's own limit
DATA_ALIGNMENT_BYTES = 64  # a cache line; vectorised copies start on one
PLAIN_ROUND_BYTES = 4096

# Names of the safetensors format. Sub-byte types have no whole size and are left out.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

_PRIVATE = re.compile(r"stepfast\.rank-(\d{5})\.")

_LENGTH_BYTES = 8
_SEAL_PREFIX = b'{"__metadata__":{"stepfast_seal":"'
_SEAL_BYTES = 64
SEAL_START = _LENGTH_BYTES + len(_SEAL_PREFIX)
SEAL_END = SEAL_START + _SEAL_BYTES
UNSEALED = b"unsealed".ljust(_SEAL_BYTES, b".")

_PLAIN_CHECK_BYTES = 16
_PLAIN_FRAME_BYTES = 8 + _PLAIN_CHECK_BYTES


class _Flattened(msgspec.Struct, frozen=True, kw_only=True):
    """Of a tensor that is known in flattened form only, as FSDP1 has them: its own shape."""

    original_shape: tuple[int, ...] | None = None  # `global_shape` is then one number, its product


class TensorSpec(_Flattened, frozen=True):
    """One local tensor: the part at `offsets`, of size `shape`, of a tensor of `global_shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Entry(TensorSpec, frozen=True):
    """A tensor with its place: bytes `start` to `end` of the file's data part."""

    start: int
    end: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(
            self.name, self.dtype, self.shape, self.global_shape, self.offsets,
            original_shape=self.original_shape,
        )  # fmt: skip


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor in the header, as the safetensors format has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Sharding(msgspec.Struct, frozen=True):
    """The rest of it, as PyTorch's DCP has it."""

    saved_offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


_TENSOR_DECODER = msgspec.json.Decoder(_Tensor)
_SHAPES_DECODER = msgspec.json.Decoder(dict[str, tuple[int, ...]])


class Layout(msgspec.Struct, frozen=True, dict=True):
    """The places of all tensors of one rank, and of its plain values behind them."""

    entries: tuple[Entry, ...]
    plain: Entry
    digest: str

    @classmethod
    def build(cls, specs: Iterable[TensorSpec], plain_bytes: int, *, rank: int = 0) -> Layout:
        """Place `specs`, widest dtype first so that each is aligned, and room for `plain_bytes`.

        `rank` is whose the plain values are. Raises ScriptError where two tensors have one name.
        """
        plain_name = private_name(rank, "plain")
        ordered = sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
        entries, end, seen = [], 0, {plain_name, "__metadata__"}
        for spec in ordered:
            if spec.name in seen:
                raise ScriptError(
                    f"two tracked tensors are named {spec.name!r}; rename one tracked object"
                )
            seen.add(spec.name)
            start, end = end, end + spec.size_bytes
            entries.append(_place(spec, start, end))
        capacity = _plain_capacity_bytes(plain_bytes)
        plain = TensorSpec(plain_name, "U8", (capacity,), (capacity,), (0,))
        return cls(tuple(entries), _place(plain, end, end + capacity), _digest(entries))

    @cached_property
    def header(self) -> bytes:
        """The file's first bytes, length included, unsealed."""
        everything = (*self.entries, self.plain)
        sharding = {
            e.name: {"saved_offsets": e.offsets, "global_shape": e.global_shape} for e in everything
        }
        metadata = {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": _dump(sharding).decode(),
            "stepfast_layout": self.digest,
        }
        original = {e.name: e.original_shape for e in everything if e.original_shape is not None}
        if original:
            metadata["stepfast_shapes"] = _dump(original).decode()
        tensors = {
            e.name: {"dtype": e.dtype, "shape": e.shape, "data_offsets": (e.start, e.end)}
            for e in everything
        }
        text = _SEAL_PREFIX + UNSEALED + b'",' + _dump(metadata)[1:] + b"," + _dump(tensors)[1:]
        text += b" " * (-(len(text) + _LENGTH_BYTES) % DATA_ALIGNMENT_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @cached_property
    def by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """What the tensors are, without their places, by name."""
        return {entry.name: entry.spec for entry in self.entries}

    @property
    def data_start(self) -> int:
        return len(self.header)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.plain.end

    @property
    def rank(self) -> int:
        """The rank whose state this is, by the name of its plain values."""
        rank = private_rank(self.plain.name)
        assert rank is not None, f"{self.plain.name} names no rank"
        return rank

    def serves(self, wanted: Layout) -> bool:
        """Whether a slot of this layout can take a snapshot of the `wanted` one."""
        fits = self.digest == wanted.digest and self.plain.end >= wanted.plain.end
        return fits and self.plain.name == wanted.plain.name

    def has_room_for(self, plain_bytes: int) -> bool:
        return plain_bytes + _PLAIN_FRAME_BYTES <= self.plain.size_bytes


def private_name(rank: int, name: str) -> str:
    """What `name` is called in the files of a checkpoint, where it is `rank`'s alone.

    The files of all ranks may be read as one, and there a name is one tensor.
    """
    assert 0 <= rank < RANKS_MAX, f"rank {rank} has no five digits"
    return f"stepfast.rank-{rank:05d}.{name}"


def private_rank(name: str) -> int | None:
    """The rank whose own `name` is; None where all ranks share it."""
    found = _PRIVATE.match(name)
    return None if found is None else int(found[1])


def header_bytes(first: bytes) -> int:
    """The header's bytes, length included, by a file's `first` eight. ValueError if absurd."""
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or not _SEAL_BYTES < length <= HEADER_BYTES_MAX:
        raise ValueError("the header's length makes no sense")
    return length + _LENGTH_BYTES


def parse_header(raw: bytes) -> Layout:
    """The layout that a slot's header describes, its digest checked; ValueError: what is wrong."""
    if not raw[_LENGTH_BYTES:].startswith(_SEAL_PREFIX):
        raise ValueError("the header is not that of a slot")
    # Whatever a torn seal left there is no concern of the layout; it need not even be text.
    return _parse_unsealed(raw[_LENGTH_BYTES:SEAL_START] + UNSEALED + raw[SEAL_END:])


@lru_cache(maxsize=8)  # a rank's slots have one header, and a recovery reads it five times
def _parse_unsealed(text: bytes) -> Layout:
    try:
        document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
        sharding = msgspec.json.decode(metadata["DCP_SHARDING_INFO"], type=dict[str, _Sharding])
        shapes = _SHAPES_DECODER.decode(metadata.get("stepfast_shapes", "{}"))
        entries = [
            _parse_entry(name, raw, sharding[name], shapes.pop(name, None))
            for name, raw in document.items()
        ]
        stated = metadata["stepfast_layout"]
    except (KeyError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the header is damaged: {error!r}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end, _is_plain(entry.name)))
    if not entries or not _is_plain(entries[-1].name):
        raise ValueError("the header has no plain values")
    layout = Layout(tuple(entries[:-1]), entries[-1], _digest(entries[:-1]))
    if layout.digest != stated or shapes:
        raise ValueError("the header's digest does not match its entries")
    position = 0
    for entry in entries:
        if entry.start != position or entry.end - entry.start != entry.size_bytes:
            raise ValueError(f"the bytes of {entry.name!r} are not where they must be")
        original = entry.original_shape
        if original is not None and (math.prod(original),) != entry.global_shape:
            raise ValueError(f"the original shape of {entry.name!r} is not that of its elements")
        position = entry.end
    return layout


def seal_bytes(snapshot: SnapshotId, digest: str) -> bytes:
    """The seal that says: this file holds `snapshot`, in the layout of `digest`."""
    body = f"sealed {snapshot.generation:016x} {snapshot.step:016x} ".encode()
    return (body + _seal_check(body, digest)).ljust(_SEAL_BYTES, b".")


@lru_cache(maxsize=64)  # those of a rank's slots are read several times at each step
def parse_seal(seal: bytes, digest: str) -> SnapshotId | None:
    """What a seal says; None where it is torn, foreign or absent."""
    words = seal.split(b" ")
    if len(words) != 4 or words[0] != b"sealed":
        return None
    try:
        snapshot = SnapshotId(Generation(int(words[1], 16)), Step(int(words[2], 16)))
    except ValueError:
        return None
    # Written again rather than taken apart: only the one spelling counts.
    return snapshot if seal == seal_bytes(snapshot, digest) else None


def frame_plain(blob: bytes) -> bytes:
    """`blob` behind its length and checksum, as it lies in the plain entry."""
    return len(blob).to_bytes(8, "little") + _plain_check(blob) + blob


def unframe_plain(area: memoryview) -> bytes:
    """The plain values in their entry's bytes. ValueError where length or checksum is wrong."""
    length = int.from_bytes(area[:8], "little")
    if length > len(area) - _PLAIN_FRAME_BYTES:
        raise ValueError("the plain values' length is damaged")
    blob = bytes(area[_PLAIN_FRAME_BYTES : _PLAIN_FRAME_BYTES + length])
    if bytes(area[8:_PLAIN_FRAME_BYTES]) != _plain_check(blob):
        raise ValueError("the plain values' checksum is wrong")
    return blob


def _is_plain(name: str) -> bool:
    rank = private_rank(name)
    return rank is not None and name == private_name(rank, "plain")


def _place(spec: TensorSpec, start: int, end: int) -> Entry:
    return Entry(
        spec.name, spec.dtype, spec.shape, spec.global_shape, spec.offsets, start, end,
        original_shape=spec.original_shape,
    )  # fmt: skip


def _parse_entry(
    name: str, raw: msgspec.Raw, sharding: _Sharding, original_shape: tuple[int, ...] | None
) -> Entry:
    tensor = _TENSOR_DECODER.decode(raw)
    start, end = tensor.data_offsets
    return Entry(
        name, tensor.dtype, tensor.shape, sharding.global_shape, sharding.saved_offsets, start, end,
        original_shape=original_shape,
    )  # fmt: skip


def _plain_capacity_bytes(plain_bytes: int) -> int:
    # Half as much again, or a loader's slowly growing state would mean a new layout at every step.
    wanted = _PLAIN_FRAME_BYTES + plain_bytes + plain_bytes // 2
    return -(-wanted // PLAIN_ROUND_BYTES) * PLAIN_ROUND_BYTES


def _digest(entries: Iterable[Entry]) -> str:
    rows = sorted(
        # What has no original shape of its own adds nothing, and so keeps its digest.
        (e.name, e.dtype, e.shape, e.global_shape, e.offsets, *_if_given(e.original_shape))
        for e in entries
    )
    return hashlib.blake2b(msgspec.msgpack.encode(rows), digest_size=16).hexdigest()


def _if_given(shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], ...]:
    return () if shape is None else (shape,)


def _seal_check(body: bytes, digest: str) -> bytes:
    return hashlib.blake2b(body + digest.encode(), digest_size=7).hexdigest().encode()


def _plain_check(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=_PLAIN_CHECK_BYTES).digest()


def _dump(value: object) -> bytes:
    return msgspec.json.encode(value)
