"""Slot files in the node's memory: claimed before use, sealed after the last byte, self-describing.

Owns: the files `slot-K.safetensors` of one rank, their space and seals, which may be overwritten.
Does not own: what lies in a slot (`layout`, `tensors`); when snapshots are due; who else reads one.

Invariants:
- The newest sealed slot is never overwritten, moved or re-laid, nor is a protected one.
- A file being laid out begins with a header length of zero: it reads as no slot at all until its
  header is whole.
- A seal is read from the file whenever it is asked for; another process may have taken it away.
- It may be left at any line (a signal that raises, a kill): what is on disk then is what counts.
- A slot whose file another process removed is no slot: it is noticed, and laid anew.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path

import msgspec

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.layout import Entry, Layout
from stepfast.checkpoint.restore import ReadSlot, open_sealed, read_open_state, read_state
from stepfast.core.terms import Generation, JobId, SnapshotId, Step
from stepfast.errors import NoRoomError, OperatingError, StateError
from stepfast.runtime.disk import occupy_standard_descriptors

SLOT_COUNT_MAX = 16
SLOTS_WITH_OVERLAP = 3
"""While one is being filled beside the training, the newest sealed one and the newest that all
ranks hold stay: with two, ranks that are a step apart would have none in common.
"""
WHO_REMOVES = "systemd's RemoveIPC at a logout, or a cleaner of temporary files"
"""The usual ones that take slot files away under a job that runs."""
SLOTS_TO_WRITE = 1
"""One more where there is a checkpoint store: what is being written to it is kept meanwhile."""
_SEAL = slice(layouts.SEAL_START, layouts.SEAL_END)
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class SealedSlot(msgspec.Struct, frozen=True):
    """A slot file that says which snapshot it holds."""

    path: Path
    snapshot: SnapshotId
    layout_digest: str


class Slot:
    """One laid-out slot file, mapped for writing."""

    def __init__(
        self, path: Path, layout: Layout, mapped: mmap.mmap, status: os.stat_result
    ) -> None:
        """`status` is the mapped file's."""
        self.path = path
        self.layout = layout
        self.mapped = mapped
        self._file = (status.st_dev, status.st_ino)

    @property
    def is_removed(self) -> bool:
        """Whether its name leads to this file no more: then nobody else will ever see it."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return True
        return (status.st_dev, status.st_ino) != self._file

    @property
    def snapshot(self) -> SnapshotId | None:
        """What the seal says now; None while there is none."""
        return layouts.parse_seal(self.mapped[_SEAL], self.layout.digest)

    @property
    def memory(self) -> memoryview:
        """The whole file's bytes; they keep the mapping alive."""
        return memoryview(self.mapped)

    def unseal(self) -> None:
        self.mapped[_SEAL] = layouts.UNSEALED

    def seal(self, snapshot: SnapshotId) -> None:
        """Say that the slot holds `snapshot`; every byte of it must be in place."""
        assert self.snapshot is None, f"{self.path} is sealed already"
        self.mapped[_SEAL] = layouts.seal_bytes(snapshot, self.layout.digest)

    def view(self, entry: Entry) -> memoryview:
        """The writable bytes of one entry; they keep the mapping alive."""
        start = self.layout.data_start
        return memoryview(self.mapped)[start + entry.start : start + entry.end]

    def write_plain(self, blob: bytes) -> None:
        """Put the plain values into their entry, with length and checksum."""
        assert self.layout.has_room_for(len(blob)), (
            f"{len(blob)} plain bytes do not fit into {self.path}"
        )
        framed = layouts.frame_plain(blob)
        self.view(self.layout.plain)[: len(framed)] = framed


class Arena:
    """The slots of one rank in `directory`, made with mode 0700; slots left there are adopted."""

    def __init__(self, directory: Path, slot_count: int = 2) -> None:
        assert 2 <= slot_count <= SLOT_COUNT_MAX, (
            f"{slot_count} slots: at least 2, at most {SLOT_COUNT_MAX}"
        )
        self.directory = directory
        self.laid_count = 0
        self._layout: Layout | None = None
        self._paths = [directory / f"slot-{index}.safetensors" for index in range(slot_count)]
        make_private(directory)
        occupy_standard_descriptors()
        self._slots: list[Slot | None] = [_try_adopt(path) for path in self._paths]

    @property
    def slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot is not None]

    def drop_removed(self) -> list[Path]:
        """Forget slots whose files are gone; what they were called. `claim` lays them anew."""
        gone = []
        for index, slot in enumerate(self._slots):
            if slot is not None and slot.is_removed:
                self._slots[index] = None
                gone.append(slot.path)
        return gone

    def newest(self) -> Slot | None:
        """The sealed slot of the newest snapshot."""
        sealed = [
            (snapshot, slot.path, slot)
            for slot in self.slots
            if (snapshot := slot.snapshot) is not None
        ]
        return max(sealed)[2] if sealed else None

    def read(self, snapshot: SnapshotId) -> ReadSlot:
        """The slot that is sealed as `snapshot`; StateError: there is none.

        Through this process's own mapping, which costs nothing: another one would have to be made.
        """
        for slot in self.slots:
            if slot.snapshot == snapshot:
                return ReadSlot(slot.path, slot.layout, snapshot, slot.mapped)
        return open_sealed(slot_of(self.directory, snapshot), snapshot)

    def claim(self, layout: Layout) -> None:
        """From now on hand out slots of `layout`; space of slots not there yet is claimed at once.

        Existing slots are re-laid when `free_slot` hands them out, so that sealed ones stay until
        then. Raises OperatingError where the memory is too small for all of them; no slot has
        changed by then.
        """
        if None in self._slots:
            make_private(self.directory)  # gone with its slots, perhaps
        if self._layout is None or not self._layout.serves(layout):
            self._check_room(layout)
        self._layout = layout
        for index, slot in enumerate(self._slots):
            if slot is None:
                self._slots[index] = self._lay(index, layout)

    def free_slot(self, protected: frozenset[SnapshotId] = frozenset()) -> Slot | None:
        """A slot of the claimed layout to overwrite, oldest first; None where all are needed."""
        assert self._layout is not None, "claim a layout first"
        held = [None if slot is None else slot.snapshot for slot in self._slots]
        if None in held:
            index = held.index(None)
        else:
            sealed = sorted((snapshot, index) for index, snapshot in enumerate(held) if snapshot)
            free = [index for snapshot, index in sealed[:-1] if snapshot not in protected]
            if not free:
                return None
            index = free[0]
        chosen = self._slots[index]
        if chosen is None or not chosen.layout.serves(self._layout):
            # Forgotten before it is touched: an interrupt in between must leave no stale mapping.
            self._slots[index] = chosen = None
            chosen = self._slots[index] = self._lay(index, self._layout)
        return chosen

    def close(self) -> None:
        """Let go of all mappings. The files stay: they outlive the process on purpose."""
        self._slots = [None] * len(self._slots)

    def _lay(self, index: int, layout: Layout) -> Slot:
        path = self._paths[index]
        occupy_standard_descriptors()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o600)
        except OSError as error:
            raise OperatingError(f"{path}: {error.strerror}") from error
        try:
            os.pwrite(descriptor, bytes(8), 0)
            os.posix_fallocate(descriptor, 0, layout.file_bytes)
            os.ftruncate(descriptor, layout.file_bytes)
            os.pwrite(descriptor, layout.header[8:], 8)
            os.pwrite(descriptor, layout.header[:8], 0)
            self.laid_count += 1
            # Populated now, so that the first snapshot does not pay a page fault for every 4 KiB.
            populate = getattr(mmap, "MAP_POPULATE", 0)
            mapped = _map(descriptor, layout.file_bytes, populate)
            return Slot(path, layout, mapped, os.fstat(descriptor))
        except OSError as error:
            if error.errno == errno.EFBIG:
                text = f"a slot has {layout.file_bytes} bytes; raise the limit, ulimit -f"
                raise NoRoomError(f"{path}: {error.strerror}: {text}") from error
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise OperatingError(f"{path}: {error.strerror}") from error
            os.ftruncate(descriptor, 0)
            raise self._no_room(layout) from error
        finally:
            os.close(descriptor)

    def _check_room(self, layout: Layout) -> None:
        """All slots will be laid out so, one by one: what they will need must be there now."""
        sizes = [_claimed_bytes(path) for path in self._paths]
        wanted = needed_bytes(layout, 1)
        if sum(max(0, wanted - size) for size in sizes) > free_bytes(self.directory):
            raise self._no_room(layout)

    def _no_room(self, layout: Layout) -> NoRoomError:
        total, count = needed_bytes(layout, len(self._paths)), len(self._paths)
        overlap = " (the third one lets training go on while a snapshot is copied)"
        return NoRoomError(
            f"no room for snapshots: {layout.file_bytes} bytes needed for one slot and {total} for"
            f" the {count} of this rank{overlap if count == SLOTS_WITH_OVERLAP else ''},"
            f" {free_bytes(self.directory)} bytes free in {self.directory}; enlarge that memory"
            " (docker --shm-size, an emptyDir's sizeLimit), or run fewer ranks per node"
        )


def needed_bytes(layout: Layout, slot_count: int) -> int:
    """The memory that the slots of one rank take."""
    return -(-layout.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE * slot_count


def free_bytes(directory: Path) -> int:
    """What the file system of `directory` has left for us."""
    return (room := os.statvfs(directory)).f_bavail * room.f_frsize


def _claimed_bytes(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:  # not there yet
        return 0


def sealed_slots(directory: Path) -> list[SealedSlot]:
    """The sealed slots in `directory`, oldest first; torn, cut and foreign files are passed over.

    For other processes. A listed slot may be overwritten unless its rank is dead or protects it.
    """
    found = []
    for path in sorted(directory.glob("slot-*.safetensors")):
        try:
            layout, snapshot = read_state(path)
        except (OSError, ValueError):
            continue
        if snapshot is not None:
            found.append(SealedSlot(path, snapshot, layout.digest))
    return sorted(found, key=lambda slot: (slot.snapshot, slot.path))


def job_slots(memory_dir: str, job_id: JobId) -> Path:
    """Where the slots of a job's nodes lie on this machine, this user's alone."""
    return Path(memory_dir) / f"stepfast-{os.getuid()}-{job_id}"


def slot_of(directory: Path, snapshot: SnapshotId) -> Path:
    """The file of the slot in `directory` that is sealed as `snapshot`; StateError: there is none
    any more.
    """
    for slot in sealed_slots(directory):
        if slot.snapshot == snapshot:
            return slot.path
    why = "" if directory.exists() else f": it was removed while the job ran ({WHO_REMOVES})"
    raise StateError(f"{directory}: no slot holds step {snapshot.step} any more{why}")


def invalidate(
    directory: Path, *, newer_than_step: Step, before_generation: Generation
) -> list[SnapshotId]:
    """Unseal what is newer than the step that `before_generation` opens at, and older than it.

    Doing it again changes nothing. Who missed several generations calls it for each of them, in
    order. Returns what was unsealed.
    """
    gone = []
    for slot in sealed_slots(directory):
        if slot.snapshot.step > newer_than_step and slot.snapshot.generation < before_generation:
            descriptor = os.open(slot.path, os.O_WRONLY | _OPEN_FLAGS)
            try:
                os.pwrite(descriptor, layouts.UNSEALED, layouts.SEAL_START)
            finally:
                os.close(descriptor)
            gone.append(slot.snapshot)
    return gone


def _map(descriptor: int, size_bytes: int, flags: int = 0) -> mmap.mmap:
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | flags)


def _try_adopt(path: Path) -> Slot | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | _OPEN_FLAGS)
    except OSError:  # absent, or no file to write to: laying the slot out will say so
        return None
    try:
        layout, _ = read_open_state(descriptor)
        mapped = _map(descriptor, layout.file_bytes)
        return Slot(path, layout, mapped, os.fstat(descriptor))
    except ValueError:
        return None
    finally:
        os.close(descriptor)


def make_private(directory: Path) -> None:
    """Make the directory, or take one that is this user's alone; OperatingError for any other.

    Where everybody may write (/dev/shm), somebody may have been there before with the same name.
    """
    try:
        for above in reversed((directory, *directory.parents)):
            if not above.exists():
                above.mkdir(mode=0o700, exist_ok=True)  # by another rank, perhaps
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode):
            raise OperatingError(f"{directory} is a link; remove it, or choose another directory")
        if status.st_uid != os.geteuid():
            raise OperatingError(f"{directory} belongs to another user; choose another directory")
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.chmod(directory, 0o700)
    except OSError as error:
        raise OperatingError(f"{directory}: {error.strerror}") from error
