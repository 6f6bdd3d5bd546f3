"""Reading a committed checkpoint: whole shards or the bytes that are needed, never unverified ones.

Owns: the reads of a store and the checksums of what comes; the index of who saved which part of a
tensor, and that no part is missing. Does not own: manifests (`manifest`), where checkpoints are
(`catalog`), what is needed (`tensors.reshard`, `shard`), the choice of another checkpoint where
this one is damaged.

Invariants:
- No call returns before the checksum of each block that it read was compared with the manifest's.
  The plain values, read by themselves, have one of their own; a header is what its layout's digest
  says.
- A file that is missing, damaged or another checkpoint's is CheckpointDamaged, which names file
  and cause; so is a tensor that the files together have not all of. A store that cannot be reached
  is an OperatingError: the checkpoint may be fine.
- Nothing is remembered beyond the object: the same name may hold another checkpoint tomorrow.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeVar

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.blocks import is_right
from stepfast.checkpoint.catalog import load_manifest
from stepfast.checkpoint.coverage import Coverage, listed
from stepfast.checkpoint.layout import Entry, Layout
from stepfast.checkpoint.manifest import MANIFEST_FILE, Manifest, ShardFile, snapshot_words
from stepfast.checkpoint.parallel import SMALL_REQUESTS, in_parallel
from stepfast.checkpoint.store import CheckpointStore
from stepfast.core.terms import SnapshotId
from stepfast.errors import StateError

_Result = TypeVar("_Result")
OnRead = Callable[[int], None]  # is told how many bytes came; what it raises ends the reading

_FIRST_READ_BYTES = 64 << 10  # most headers, in one read


class _Read(Protocol):
    def __call__(self, name: str, start: int, /, *parts: memoryview) -> None: ...


class CheckpointDamaged(StateError):
    """A checkpoint that cannot be loaded, whatever the store does; an older one may be whole."""

    def __init__(self, snapshot: SnapshotId, message: str) -> None:
        """`message` names file and cause."""
        super().__init__(message)
        self.snapshot = snapshot


class Chunk(NamedTuple):
    """One saved part of a tensor: in whose file, and where."""

    rank: int
    entry: Entry


class StoredCheckpoint:
    """A checkpoint in a store. For one thread; its reads run in threads of their own."""

    def __init__(self, store: CheckpointStore, manifest: Manifest) -> None:
        """`manifest`: as `open` reads it."""
        self.snapshot = manifest.snapshot
        self.name = manifest.name
        self.manifest = manifest
        self._store = store
        self._layouts: dict[int, Layout] = {}
        self._files = {file.rank: file for file in manifest.files}

    @classmethod
    def open(cls, store: CheckpointStore, snapshot: SnapshotId) -> StoredCheckpoint:
        """The committed checkpoint of `snapshot`; only its manifest is read."""
        try:
            return cls(store, load_manifest(store, snapshot))
        except StateError as error:  # which names the file
            raise CheckpointDamaged(snapshot, str(error)) from error

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return f"{self._store.url}/{self.name}"

    def layout(self, rank: int) -> Layout:
        """What `rank`'s file holds and where; its header is read once."""
        if rank not in self._layouts:
            self._layouts[rank] = self._read_layout(rank)
        return self._layouts[rank]

    @cached_property
    def index(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Every saved part of every tensor by name, in the order of ranks; reads all headers.

        CheckpointDamaged where they are not all there is of each tensor.
        """
        missing = [rank for rank in self._files if rank not in self._layouts]
        read = in_parallel(self._read_layout, missing, SMALL_REQUESTS)
        self._layouts.update(zip(missing, read, strict=True))
        in_order = [self._layouts[rank] for rank in range(self.world_size)]
        self._check_whole(in_order)
        found: dict[str, list[Chunk]] = {}
        for layout in in_order:
            for entry in layout.entries:
                found.setdefault(entry.name, []).append(Chunk(layout.rank, entry))
        return {name: tuple(chunks) for name, chunks in found.items()}

    def check_whole(self) -> None:
        """CheckpointDamaged unless the files together have every element of every tensor.

        For who needs no index: reads all headers, and keeps none.
        """
        self._check_whole(in_parallel(self._read_layout, range(self.world_size), SMALL_REQUESTS))

    def _check_whole(self, all_layouts: Iterable[Layout]) -> None:
        coverage = Coverage()
        for layout in all_layouts:
            coverage.add(layout)
        if problems := coverage.problems(self.manifest.tensors):
            raise self._damaged(MANIFEST_FILE, f"the checkpoint is not whole: {listed(problems)}")

    def plain(self, rank: int) -> bytes:
        """The plain values that `rank` saved."""
        layout, name = self.layout(rank), self._files[rank].name
        memory = memoryview(bytearray(layout.plain.size_bytes))
        self._fill(rank, layout.data_start + layout.plain.start, memory)
        try:
            return layouts.unframe_plain(memory)
        except ValueError as error:
            raise self._damaged(name, str(error)) from error

    def read_blocks(
        self, rank: int, blocks: Mapping[int, list[memoryview]], on_read: OnRead | None = None
    ) -> None:
        """Read blocks of a rank's file, by number, each into memory of just its size in all.

        Where one is damaged, any of that memory may hold what is wrong.
        """
        read = self._store.read_once  # another rank has a file of its own
        reads = (partial(self._read_block, rank, n, into, read) for n, into in blocks.items())
        for size_bytes in in_parallel(_call, reads, self._store.read_threads):
            if on_read is not None:
                on_read(size_bytes)

    def read_ranges(
        self, ranges: Iterable[tuple[int, int, int]], on_read: OnRead | None = None
    ) -> Iterator[memoryview]:
        """The bytes `start` to `end` of each (rank, start, end), verified, in that order.

        Counted in the data part of the rank's file, as entries are. The blocks that the ranges lie
        in are read whole; a few ranges are read ahead.
        """
        reads = (partial(self._read_range, *r) for r in ranges)
        for read_bytes, memory in in_parallel(_call, reads, self._store.read_threads):
            if on_read is not None:
                on_read(read_bytes)
            yield memory

    # --- one file ---------------------------------------------------------------------------------

    def _read_range(self, rank: int, start: int, end: int) -> tuple[int, memoryview]:
        data_start = self.layout(rank).data_start
        start, end = data_start + start, data_start + end
        blocks = self.blocks(rank, start, end)
        if not blocks:
            return 0, memoryview(b"")
        first, last = self.block_range(rank, blocks[0])[0], self.block_range(rank, blocks[-1])[1]
        memory = claim(last - first)
        read = self._store.read_into  # ranks of other layouts need parts of the same blocks
        for number in blocks:
            at, behind = self.block_range(rank, number)
            self._read_block(rank, number, [memory[at - first : behind - first]], read)
        return last - first, memory[start - first : end - first]

    def blocks(self, rank: int, start: int, end: int) -> range:
        """The numbers of the blocks in which the bytes `start` to `end` of a rank's file lie."""
        size_bytes = self._files[rank].block_bytes
        return range(start // size_bytes, -(-end // size_bytes) if end > start else 0)

    def block_range(self, rank: int, number: int) -> tuple[int, int]:
        """Where a block of a rank's file begins and ends."""
        file = self._files[rank]
        start = number * file.block_bytes
        return start, min(file.size_bytes, start + file.block_bytes)

    def _read_block(self, rank: int, number: int, parts: list[memoryview], read: _Read) -> int:
        file, (start, end) = self._files[rank], self.block_range(rank, number)
        self._fill(rank, start, *parts, read=read)
        if not is_right(parts, number, file.blocks):
            raise self._damaged(
                file.name,
                f"bytes {start} to {end} do not have the checksum that the manifest states",
            )
        return end - start

    def _fill(self, rank: int, start: int, *parts: memoryview, read: _Read | None = None) -> None:
        file = self._files[rank]
        read = read or self._store.read_into
        try:
            read(f"{self.name}/{file.name}", start, *parts)
        except StateError as error:  # which names the file
            raise CheckpointDamaged(self.snapshot, str(error)) from error

    def _read_layout(self, rank: int) -> Layout:
        file = self._files[rank]
        first = memoryview(bytearray(min(_FIRST_READ_BYTES, file.size_bytes)))
        self._fill(rank, 0, first)
        size_bytes = self._header_bytes(file, first)
        raw = bytes(first[:size_bytes])
        if size_bytes > len(first):
            rest = memoryview(bytearray(size_bytes - len(first)))
            self._fill(rank, len(first), rest)
            raw += bytes(rest)
        return self._checked_layout(file, raw)

    def _header_bytes(self, file: ShardFile, first: memoryview) -> int:
        try:
            size_bytes = layouts.header_bytes(bytes(first[:8]))
        except ValueError as error:
            raise self._damaged(file.name, str(error)) from error
        if size_bytes > file.size_bytes:
            raise self._damaged(file.name, "its header is longer than the file")
        return size_bytes

    def _checked_layout(self, file: ShardFile, raw: bytes) -> Layout:
        """The layout in a header, if it is that of this rank in this checkpoint."""
        try:
            layout = layouts.parse_header(raw)
        except ValueError as error:
            raise self._damaged(file.name, str(error)) from error
        seal = layouts.parse_seal(raw[layouts.SEAL_START : layouts.SEAL_END], layout.digest)
        if seal != self.snapshot:
            raise self._damaged(
                file.name, f"it holds {snapshot_words(seal)}, not {snapshot_words(self.snapshot)}"
            )
        if layout.rank != file.rank:
            raise self._damaged(
                file.name, f"it is rank {layout.rank}'s file, in the place of rank {file.rank}'s"
            )
        if (layout.digest, layout.file_bytes) != (file.layout_digest, file.size_bytes):
            raise self._damaged(file.name, "its layout is not the one that the manifest states")
        return layout

    def _damaged(self, name: str, cause: str) -> CheckpointDamaged:
        return CheckpointDamaged(self.snapshot, f"{self.place}/{name}: {cause}")


def claim(size_bytes: int) -> memoryview:
    """Zeroed memory of nobody else, given back when the last view of it is gone."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:size_bytes]


def _call(read: Callable[[], _Result]) -> _Result:
    return read()
