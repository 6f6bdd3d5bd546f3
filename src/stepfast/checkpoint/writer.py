"""Copies a sealed slot into the store, hashed on the way.

Owns: reading a slot that another process may take back at any time; the pace.
Does not own: making it durable (the store), saying that a checkpoint exists (`commit`).

Invariants:
- What is in the store under a rank's name was, byte for byte, a slot sealed for this snapshot, from
  before the first byte was read until after the last one was.
- The slot is read, never mapped: its owner may cut it meanwhile, and a mapping would kill us.
- A checkpoint that is committed is never written to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.blocks import BlockHasher
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardFile,
    checkpoint_name,
    decode_manifest,
    shard_name,
    snapshot_words,
)
from stepfast.checkpoint.restore import read_open_state
from stepfast.checkpoint.store import CheckpointStore, ObjectWriter
from stepfast.core.terms import SnapshotId
from stepfast.errors import OperatingError, StateError
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.ports import Buffer, Clock

# Bigger pieces leave the processor's cache between read and hash, smaller ones cost calls.
PIECE_BYTES = 1 << 20
_BUFFERS = 3  # one is read into and hashed, one is written, and one waits

Progress = Callable[[int, int], None]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Nobody watches."""


class Pace:
    """Holds a stream of bytes to a rate, by sleeping where it is ahead."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_s` None: as fast as it goes."""
        assert bytes_per_s is None or bytes_per_s > 0, "a rate is positive"
        self._bytes_per_s = bytes_per_s
        self._clock: Clock = SystemClock() if clock is None else clock
        self._sleep = sleep
        self._began_s = self._clock.monotonic()

    def wait_after(self, done_bytes: int) -> None:
        """Return when so many bytes, counted from the beginning, may have been moved."""
        if self._bytes_per_s is None:
            return
        due_s = self._began_s + done_bytes / self._bytes_per_s
        ahead_s = due_s - self._clock.monotonic()
        if ahead_s > 0:
            self._sleep(ahead_s)


def write_slot(
    store: CheckpointStore,
    slot_path: Path,
    snapshot: SnapshotId,
    *,
    rank: int,
    world_size: int,
    bytes_per_s: float | None = None,
    pace: Pace | None = None,
    progress: Progress = no_progress,
) -> ShardFile:
    """Put the slot's bytes into the store as this rank's file of the checkpoint of `snapshot`.

    StateError where the slot does not hold it, or was taken away meanwhile: nothing is visible
    then. OperatingError where the store fails. A checkpoint that is committed with these bytes is
    left as it is; with others it is another one's, and a StateError.

    `progress(done, total)` is told the bytes after each piece, and may raise to stop. `pace` is in
    the place of `bytes_per_s`, for who has a clock.
    """
    pace = pace or Pace(bytes_per_s)
    directory = checkpoint_name(snapshot.step, snapshot.generation)
    name = shard_name(rank, world_size)
    manifest_name = f"{directory}/{MANIFEST_FILE}"
    is_committed = store.size_bytes(manifest_name) is not None
    with _OpenSlot(slot_path, snapshot) as slot:
        size_bytes = slot.layout.file_bytes
        with contextlib.ExitStack() as stack:
            hasher = ShardHasher()
            writer = None
            if not is_committed:
                writer = stack.enter_context(store.writer(f"{directory}/{name}", size_bytes))
            behind = stack.enter_context(_WriteBehind(writer))
            done = 0
            while done < size_bytes:
                piece = behind.free()[: size_bytes - done]
                slot.fill(done, piece)
                hasher.update(piece)
                behind.write(piece)
                done += len(piece)
                progress(done, size_bytes)
                pace.wait_after(done)
            behind.finish()
            slot.check_untouched()
    file = hasher.file(rank, name, slot.layout.digest)
    if is_committed and file not in decode_manifest(store.read(manifest_name)).files:
        raise StateError(
            f"{store.url}/{directory} is committed already, with other bytes; if it is another"
            " job's, give this job a place of its own for its checkpoints"
        )
    return file


class ShardHasher:
    """The checksums of a rank's file whose bytes come in order."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._blocks = BlockHasher()

    def update(self, data: Buffer) -> None:
        """The next bytes."""
        self._blocks.update(data)
        self.size_bytes += len(data)

    def file(self, rank: int, name: str, layout_digest: str) -> ShardFile:
        """Behind the last byte: what the manifest says of the file."""
        return ShardFile(
            rank=rank,
            name=name,
            size_bytes=self.size_bytes,
            layout_digest=layout_digest,
            block_bytes=self._blocks.block_bytes,
            blocks=self._blocks.digests(),
        )


class _WriteBehind:
    """Writes pieces in a thread of its own, while the next one is read and hashed.

    A device takes longer to write one than a processor to hash it; one behind the other they would
    take the sum.
    """

    def __init__(self, writer: ObjectWriter | None) -> None:
        """Without a `writer` all is as if it were written."""
        self._writer = writer
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stepfast-write", daemon=True)

    def __enter__(self) -> Self:
        for _ in range(_BUFFERS):
            # Whole pages, as a store may want them that writes past the page cache.
            self._free.put(memoryview(mmap.mmap(-1, PIECE_BYTES)))
        self._thread.start()
        return self

    def free(self) -> memoryview:
        """A buffer to fill; waits until one is. Raises what stopped the writing."""
        buffer = self._free.get()
        if self._error is not None:
            raise self._error
        return buffer

    def write(self, piece: memoryview) -> None:
        """Have the beginning of a buffer written, and then free again."""
        self._full.put(piece)

    def finish(self) -> None:
        """All that was given is written when this returns. Raises what stopped it."""
        self._full.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._full.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (piece := self._full.get()) is not None:
            try:
                if self._writer is not None and self._error is None:
                    self._writer.write(piece)
            except BaseException as error:  # noqa: BLE001 - whoever reads raises it
                self._error = error
            self._free.put(memoryview(piece.obj))


class _OpenSlot:
    """A slot that is read while its owner may take it back."""

    def __init__(self, path: Path, snapshot: SnapshotId) -> None:
        self._path = path
        self._snapshot = snapshot

    def __enter__(self) -> Self:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = os.open(self._path, flags)
        except OSError as error:
            raise StateError(f"{self._path}: {error.strerror}") from error
        try:
            self.layout = self._checked_layout()
        except StateError:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def check_untouched(self) -> None:
        """The seal is what its owner takes away first and gives last."""
        path, layout = self._path, self.layout
        seal = bytearray(layouts.SEAL_END - layouts.SEAL_START)
        self.fill(layouts.SEAL_START, memoryview(seal))
        if layouts.parse_seal(bytes(seal), layout.digest) != self._snapshot:
            raise StateError(f"{path}: the slot was taken back while it was copied")
        plain = memoryview(bytearray(layout.plain.size_bytes))
        self.fill(layout.data_start + layout.plain.start, plain)
        try:
            layouts.unframe_plain(plain)
        except ValueError as error:
            raise StateError(f"{path}: {error}") from error

    def _checked_layout(self) -> Layout:
        try:
            layout, held = read_open_state(self._descriptor)
        except (OSError, ValueError) as error:
            raise StateError(f"{self._path}: {error}") from error
        if held != self._snapshot:
            raise StateError(
                f"{self._path}: the slot holds {snapshot_words(held)},"
                f" not {snapshot_words(self._snapshot)}"
            )
        return layout

    def fill(self, start: int, piece: memoryview) -> None:
        """Read the file's bytes from `start`."""
        done = 0
        try:
            while done < len(piece):
                count = os.preadv(self._descriptor, [piece[done:]], start + done)
                if count == 0:
                    raise StateError(f"{self._path}: the slot was cut while it was copied")
                done += count
        except OSError as error:
            raise OperatingError(f"{self._path}: {error.strerror}") from error
