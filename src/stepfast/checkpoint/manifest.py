"""What a checkpoint says about itself: its names, its files and their digests, its tensors.

Owns: the manifest's fields and its bytes; the names of checkpoints and of what is in them.
Does not own: when a manifest is written (`commit`), what is read by it (`catalog`, `loading`).

Invariants:
- A checkpoint is a directory of the store, and exists when the manifest in it does.
- A manifest is JSON that carries a checksum of itself: it is whole, or no manifest.
- Every file that it names is in the checkpoint's own directory.
- `decode_manifest(encode_manifest(m)) == m`.
"""

from __future__ import annotations

import re

import msgspec
import xxhash

from stepfast.checkpoint.blocks import is_whole
from stepfast.core.durable import ShardFile as ShardFile
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import StateError

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 1 << 30

_CHECK_START = b'{"manifest_digest":"xxh3-128:'
_CHECK_END = b'",'
_NAME = re.compile(r"step-(\d+)-gen-(\d+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor as a whole, over all ranks; `dtype` as the safetensors format has it."""

    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint.

    `created_at_s` is for people, in seconds since the epoch. `tensors` is gathered when the
    checkpoint is committed. `user` is what the job wants to be kept with it.
    """

    format_version: int = FORMAT_VERSION
    job_id: str
    step: int
    generation: int
    world_size: int
    nproc_per_node: int
    stepfast_version: str
    torch_version: str
    created_at_s: float
    files: tuple[ShardFile, ...]
    tensors: dict[str, TensorInfo] = {}
    user: dict[str, str] = {}

    @property
    def snapshot(self) -> SnapshotId:
        """Which state the checkpoint holds."""
        return SnapshotId(Generation(self.generation), Step(self.step))

    @property
    def name(self) -> str:
        """The directory that it belongs into."""
        return checkpoint_name(self.step, self.generation)

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return sum(file.size_bytes for file in self.files)


class _Version(msgspec.Struct):
    format_version: int


def checkpoint_name(step: int, generation: int) -> str:
    """The directory of a checkpoint."""
    return f"step-{step:09d}-gen-{generation:04d}"


def parse_checkpoint_name(name: str) -> SnapshotId | None:
    """Which checkpoint a directory of that name is for; None: it is none of ours."""
    if (match := _NAME.fullmatch(name)) is None or not name.isascii():
        return None
    step, generation = int(match[1]), int(match[2])
    # Written again rather than taken apart: only the one spelling counts.
    if checkpoint_name(step, generation) != name:
        return None
    return SnapshotId(Generation(generation), Step(step))


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank, in the checkpoint's directory."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def snapshot_words(snapshot: SnapshotId | None) -> str:
    """A snapshot, or that there is none, as people read it."""
    if snapshot is None:
        return "no whole snapshot"
    return f"step {snapshot.step} of generation {snapshot.generation}"


def digest_of(file: ShardFile) -> str:
    """One digest for a whole file: the xxh3-128 of its blocks' checksums, as they are written."""
    return xxhash.xxh3_128_hexdigest(file.blocks.encode())


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`: readable, and with a checksum of themselves in front."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)[1:]
    check = xxhash.xxh3_128_hexdigest(body).encode()
    return _CHECK_START + check + _CHECK_END + body + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """The manifest of these bytes; StateError says what is wrong with them."""
    start = len(_CHECK_START)
    check, end, body = data[start : start + 32], data[start + 32 : start + 34], data[start + 34 :]
    if not data.startswith(_CHECK_START) or end != _CHECK_END:
        raise StateError("the manifest is torn, or none of stepfast's")
    if body[-1:] != b"\n" or check != xxhash.xxh3_128_hexdigest(body[:-1]).encode():
        raise StateError("the manifest's bytes do not match its checksum")
    try:
        version = msgspec.json.decode(b"{" + body, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise StateError(
                f"the manifest has format {version}, this stepfast reads up to {FORMAT_VERSION};"
                " install a newer one"
            )
        manifest = msgspec.json.decode(b"{" + body, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StateError(f"the manifest cannot be read: {error}") from error
    _check(manifest)
    return manifest


def check_files(files: tuple[ShardFile, ...], world_size: int) -> None:
    """StateError unless there is exactly one file for each rank, in order, under its own name."""
    if [file.rank for file in files] != list(range(world_size)):
        raise StateError(f"there is not exactly one file, in order, for each of {world_size} ranks")
    for file in files:
        if _FILE_NAME.fullmatch(file.name) is None or file.name == MANIFEST_FILE:
            raise StateError(f"{file.name!r} cannot be the name of a rank's file")
        if file.size_bytes < 0:
            raise StateError(f"the size of {file.name} makes no sense")
        if not is_whole(file.blocks, file.size_bytes, file.block_bytes):
            raise StateError(f"the blocks' checksums of {file.name} make no sense")
    if len({file.name for file in files}) != world_size:
        raise StateError("two ranks have one file")


def _check(manifest: Manifest) -> None:
    if manifest.world_size < 1 or manifest.step < 0 or manifest.generation < 0:
        raise StateError("the manifest's step, generation or world size make no sense")
    check_files(manifest.files, manifest.world_size)
