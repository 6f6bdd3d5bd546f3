"""Open a sealed slot and check it before a single byte of it is used.

Owns: reading a slot file's header and seal; the checks between a file that claims to hold a
snapshot and the views that tensors are restored from.
Does not own: the choice of the file (`core.recovery`); the copying (`tensors`).

Invariants: who holds a ReadSlot holds the snapshot that was asked for, whole, in the layout that
its header describes; every refusal is a StateError that names the file and the cause. Nothing is
ever written through it.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.layout import Entry, Layout
from stepfast.core.terms import SnapshotId
from stepfast.errors import StateError


class ReadSlot:
    """The verified content of a sealed slot."""

    def __init__(self, path: Path, layout: Layout, snapshot: SnapshotId, mapped: mmap.mmap) -> None:
        self.path = path
        self.layout = layout
        self.snapshot = snapshot
        self.plain = self._checked_plain(mapped)
        self._mapped = mapped

    def view(self, entry: Entry) -> memoryview:
        """The bytes of one entry. Writing to them changes a private copy, never the slot."""
        start = self.layout.data_start
        return memoryview(self._mapped)[start + entry.start : start + entry.end]

    def check_still_sealed(self) -> None:
        """Call after the last byte was copied: StateError if the slot was taken away meanwhile."""
        seal = self._mapped[layouts.SEAL_START : layouts.SEAL_END]
        if layouts.parse_seal(seal, self.layout.digest) != self.snapshot:
            raise StateError(f"{self.path}: the slot was unsealed while it was read")

    def _checked_plain(self, mapped: mmap.mmap) -> bytes:
        start = self.layout.data_start
        area = memoryview(mapped)[start + self.layout.plain.start : start + self.layout.plain.end]
        try:
            return layouts.unframe_plain(area)
        except ValueError as error:
            raise StateError(f"{self.path}: {error}") from error


def open_sealed(path: Path, expected: SnapshotId) -> ReadSlot:
    """The slot at `path`, which must hold `expected`; StateError names the file and the cause."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error
    try:
        layout, snapshot = read_open_state(descriptor)
        if snapshot is None:
            raise StateError(f"{path}: the slot is not sealed")
        if snapshot != expected:
            raise StateError(f"{path}: holds {_words(snapshot)}, not {_words(expected)}")
        # Private: writable, as torch wants its buffers, and yet the file can never be changed.
        mapped = mmap.mmap(descriptor, layout.file_bytes, flags=mmap.MAP_PRIVATE)
        return ReadSlot(path, layout, snapshot, mapped)
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: {error}") from error
    finally:
        os.close(descriptor)


def read_state(path: Path) -> tuple[Layout, SnapshotId | None]:
    """The layout and seal of a slot file; ValueError says why it is no whole slot."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return read_open_state(descriptor)
    finally:
        os.close(descriptor)


def read_open_state(descriptor: int) -> tuple[Layout, SnapshotId | None]:
    """As `read_state`, of an open file."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    raw = os.pread(descriptor, layouts.header_bytes(os.pread(descriptor, 8, 0)), 0)
    layout = layouts.parse_header(raw)
    if status.st_size != layout.file_bytes or len(raw) != layout.data_start:
        raise ValueError(
            f"it has {status.st_size} bytes, not the {layout.file_bytes} that its header says"
        )
    return layout, layouts.parse_seal(raw[layouts.SEAL_START : layouts.SEAL_END], layout.digest)


def _words(snapshot: SnapshotId) -> str:
    return f"step {snapshot.step} of generation {snapshot.generation}"
