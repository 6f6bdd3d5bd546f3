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

import os
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.blocks import BlockHasher
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.manifest import (
    MANIFEST_FILE,
    ShardFile,
    checkpoint_name,
    digest_text,
    shard_name,
    snapshot_words,
)
from stepfast.checkpoint.restore import read_open_state
from stepfast.checkpoint.store import CheckpointStore
from stepfast.core.terms import SnapshotId
from stepfast.errors import OperatingError, StateError
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.ports import Clock

# Bigger pieces leave the processor's cache between the hash and the write, smaller ones cost calls.
PIECE_BYTES = 4 << 20

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
    then. OperatingError where the store fails. `progress(done, total)` is told the bytes after each
    piece, and may raise to stop. `pace` is in the place of `bytes_per_s`, for who has a clock.
    """
    directory = checkpoint_name(snapshot.step, snapshot.generation)
    if store.size_bytes(f"{directory}/{MANIFEST_FILE}") is not None:
        raise StateError(
            f"{store.url}/{directory} is committed already; if it is another job's, give this job"
            " a place of its own for its checkpoints"
        )
    pace = pace or Pace(bytes_per_s)
    try:
        descriptor = os.open(slot_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StateError(f"{slot_path}: {error.strerror}") from error
    try:
        layout = _checked_layout(descriptor, slot_path, snapshot)
        name = shard_name(rank, world_size)
        with store.writer(f"{directory}/{name}", layout.file_bytes) as writer:
            hasher, blocks, done = xxhash.xxh3_128(), BlockHasher(), 0
            buffer = memoryview(bytearray(min(PIECE_BYTES, layout.file_bytes)))
            while done < layout.file_bytes:
                piece = buffer[: min(PIECE_BYTES, layout.file_bytes - done)]
                _fill(descriptor, slot_path, done, piece)
                hasher.update(piece)
                blocks.update(piece)
                writer.write(piece)
                done += len(piece)
                progress(done, layout.file_bytes)
                pace.wait_after(done)
            _check_untouched(descriptor, slot_path, layout, snapshot)
        return ShardFile(
            rank=rank,
            name=name,
            size_bytes=layout.file_bytes,
            digest=digest_text(hasher.hexdigest()),
            layout_digest=layout.digest,
            block_bytes=blocks.block_bytes,
            blocks=blocks.digests(),
        )
    finally:
        os.close(descriptor)


def _checked_layout(descriptor: int, path: Path, snapshot: SnapshotId) -> Layout:
    try:
        layout, held = read_open_state(descriptor)
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: {error}") from error
    if held != snapshot:
        raise StateError(
            f"{path}: the slot holds {snapshot_words(held)}, not {snapshot_words(snapshot)}"
        )
    return layout


def _fill(descriptor: int, path: Path, start: int, piece: memoryview) -> None:
    done = 0
    try:
        while done < len(piece):
            count = os.preadv(descriptor, [piece[done:]], start + done)
            if count == 0:
                raise StateError(f"{path}: the slot was cut while it was copied")
            done += count
    except OSError as error:
        raise OperatingError(f"{path}: {error.strerror}") from error


def _check_untouched(descriptor: int, path: Path, layout: Layout, snapshot: SnapshotId) -> None:
    """The seal is what its owner takes away first and gives last."""
    seal_bytes = layouts.SEAL_END - layouts.SEAL_START
    seal = os.pread(descriptor, seal_bytes, layouts.SEAL_START)
    if layouts.parse_seal(seal, layout.digest) != snapshot:
        raise StateError(f"{path}: the slot was taken back while it was copied")
    start = layout.data_start + layout.plain.start
    try:
        layouts.unframe_plain(memoryview(os.pread(descriptor, layout.plain.size_bytes, start)))
    except ValueError as error:
        raise StateError(f"{path}: {error}") from error
