"""A store in a directory: a disk, NFS, Lustre. Each object is a file.

Owns: the order of calls that makes a file whole and durable before it has its name.
Does not own: the calls (`runtime.disk`); what the files are.

Invariants:
- Bytes are written to a hidden temporary beside the object, synced, and only then given the name;
  then the directory is synced, and each one above it that was made on the way.
- A sync that failed is never asked again: the kernel forgets what it could not write. The
  temporary is thrown away, and whoever wrote starts anew.
- Temporaries have names of their own; writers never meet in one, and readers never see one.
- Nothing is made before the first write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from stepfast.checkpoint.file_errors import NOT_HERE, failure, reading_failure, short
from stepfast.checkpoint.file_reading import FileReading, opened
from stepfast.checkpoint.store import check_name
from stepfast.runtime.disk import SystemDisk
from stepfast.runtime.ports import Buffer, Disk

TEMPORARY_PREFIX = ".stepfast-"
DIRECT_BYTES_MIN = 1 << 20
"""Larger objects go past the page cache, where training data lies and would have to make room."""
_WRITEBACK_BYTES = 8 << 20  # so much may be dirty before the device is asked to begin
_READ_THREADS_MAX = 8
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DirectoryStore:
    """Objects as files below `root`, which is made at the first write."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        """`disk`: the file system; a test's own may fail and crash."""
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        # The kernel reads ahead of each of them, and copying out of the page cache is a core's
        # work: with more threads than cores, two ranks on two read a sixth slower.
        self.read_threads = min(_READ_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._disk: Disk = SystemDisk() if disk is None else disk
        self._is_anchored = False

    def writer(self, name: str, size_bytes: int = 0) -> DirectoryWriter:
        """Write the object `name`, in the place of what has the name."""
        return DirectoryWriter(self, self._disk, self._path(name), size_bytes, is_first=False)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Make the object at once and durably; False: there was one of that name already."""
        path = self._path(name)
        with DirectoryWriter(self, self._disk, path, len(data), is_first=True) as writer:
            writer.write(data)
        return writer.is_named

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Its bytes from `start`, all there are or `size_bytes`; StateError if fewer, or absent."""
        path = self._path(name)
        with FileReading(self._disk, path) as reading:
            wanted = reading.size_bytes - start if size_bytes is None else size_bytes
            # Asked first: a damaged length must not claim memory.
            if wanted < 0 or start + wanted > reading.size_bytes:
                raise short(path, start, wanted, reading.size_bytes)
            data = bytearray(wanted)
            reading.fill(start, memoryview(data))
            return bytes(data)

    def read_into(self, name: str, start: int, *buffers: memoryview) -> None:
        """Fill the buffers from `start`; StateError where the object has fewer bytes, or is not."""
        with FileReading(self._disk, self._path(name)) as reading:
            reading.fill(start, *buffers)

    def read_once(self, name: str, start: int, *buffers: memoryview) -> None:
        """As `read_into`, of bytes that nobody else on this machine reads soon: unless they are in
        the page cache already, they do not get there.
        """
        with FileReading(self._disk, self._path(name)) as reading:
            reading.fill_past_cache(start, *buffers)

    def size_bytes(self, name: str) -> int | None:
        """The object's size; None: there is none."""
        path = self._path(name)
        try:
            descriptor = opened(self._disk, path)
        except OSError as error:
            if error.errno in NOT_HERE:
                return None
            raise reading_failure(path, error) from error
        try:
            return self._disk.size_bytes(descriptor)
        finally:
            self._disk.close(descriptor)

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below `prefix`, sorted."""
        found = self._walk(prefix)
        return sorted(name for name, is_directory in found if not is_directory and _is_object(name))

    def sizes_bytes(self, prefix: str) -> dict[str, int]:
        """The sizes of all objects below `prefix`, by name."""
        sizes = ((name, self.size_bytes(name)) for name in self.names(prefix))
        return {name: size for name, size in sizes if size is not None}

    def directories(self) -> list[str]:
        """The directories in the root, sorted, empty ones too."""
        return [name for name, is_directory in self._entries("") if is_directory]

    def delete(self, name: str) -> None:
        """Remove the object, durably; fine where there is none."""
        path = self._path(name)
        try:
            self._unlink(path)
            self._disk.sync_directory(os.path.dirname(path))
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise failure(path, error) from error

    def delete_below(self, prefix: str) -> None:
        """Remove all below `prefix`, the directory too, and what writers that are gone left."""
        top = self._path(prefix.rstrip("/"))
        try:
            for name, is_directory in reversed(self._walk(prefix)):
                path = os.path.join(self.root, name)
                if is_directory:
                    self._disk.remove_directory(path)
                else:
                    self._unlink(path)
            self._disk.remove_directory(top)
            self._disk.sync_directory(os.path.dirname(top))
        except OSError as error:
            # NFS keeps a file that someone still reads, under a hidden name: the next sweep's.
            if error.errno not in (*NOT_HERE, errno.ENOTEMPTY):
                raise failure(top, error) from error

    def delete_remains(self, prefix: str) -> None:
        """Remove only what writers that are gone left below `prefix`; objects stay."""
        for name, is_directory in self._walk(prefix):
            if not is_directory and name.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
                path = os.path.join(self.root, name)
                try:
                    self._unlink(path)
                except OSError as error:
                    raise failure(path, error) from error

    def make_directory(self, path: str) -> None:
        """Make a directory of the store and what is missing above, durably; for its writers."""
        self._make_directory(path)
        if not self._is_anchored:
            # Whoever made the root may have died before it was durable: once, all the way up.
            above = self.url
            while above != os.path.dirname(above):
                above = os.path.dirname(above)
                self._sync_foreign(above)
            self._is_anchored = True

    def _make_directory(self, path: str, *, is_again: bool = False) -> None:
        try:
            self._disk.make_directory(path)
        except FileExistsError:
            # Perhaps by another process, a moment ago: then nothing says that it is durable.
            self._check_is_ours(path)
        except FileNotFoundError:
            if is_again:
                raise  # what is above is there now: nothing can be made here, as below /proc
            self._make_directory(os.path.dirname(path))
            self._make_directory(path, is_again=True)
            return
        if path.startswith(f"{self.url}{os.sep}"):
            self._disk.sync_directory(os.path.dirname(path))
        else:
            self._sync_foreign(os.path.dirname(path))

    def _check_is_ours(self, path: str) -> None:
        """Links lead out of the store, and are never listed: nothing is written through one."""
        above, name = os.path.split(path)
        if path.startswith(f"{self.url}{os.sep}") and (name, True) not in self._disk.entries(above):
            raise NotADirectoryError(errno.ENOTDIR, "a link, or no directory", path)

    def _sync_foreign(self, path: str) -> None:
        try:
            self._disk.sync_directory(path)
        except PermissionError:
            pass  # it can be passed through and not be opened: its owner made what is in it

    def _walk(self, prefix: str) -> list[tuple[str, bool]]:
        """Everything below `prefix`, a directory before what is in it; each with whether it is
        one. What vanishes meanwhile is passed over.
        """
        found: list[tuple[str, bool]] = []
        waiting = [prefix.strip("/")]
        while waiting:
            above = waiting.pop()
            for entry, is_directory in self._entries(above):
                name = f"{above}/{entry}" if above else entry
                found.append((name, is_directory))
                if is_directory:
                    waiting.append(name)
        return found

    def _entries(self, name: str) -> list[tuple[str, bool]]:
        path = os.path.join(self.root, name)
        try:
            return self._disk.entries(path)
        except OSError as error:
            if error.errno in NOT_HERE:
                return []
            raise failure(path, error) from error

    def _unlink(self, path: str) -> None:
        try:
            self._disk.unlink(path)
        except FileNotFoundError:
            pass  # another one was quicker; what was wanted is so

    def _path(self, name: str) -> str:
        return os.path.join(self.root, check_name(name))


class DirectoryWriter:
    """One object in the making: a hidden file beside `target`, until it is whole and durable."""

    def __init__(
        self, store: DirectoryStore, disk: Disk, target: str, size_bytes: int, *, is_first: bool
    ) -> None:
        """`is_first`: it gives way to what has the name already. Nothing is made before it is
        entered.
        """
        hidden = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}.part"
        self._path = os.path.join(os.path.dirname(target), hidden)
        self._target = target
        self._store = store
        self._disk = disk
        self._size_bytes = size_bytes
        self._is_first = is_first
        self._descriptor = -1
        self._written = self._on_its_way = 0
        self._is_direct = False
        self.is_named = False  # whether the object is this one

    def __enter__(self) -> Self:
        try:
            self._store.make_directory(os.path.dirname(self._target))
            self._descriptor = self._disk.create(self._path)
            self._disk.reserve(self._descriptor, self._size_bytes)
            if self._size_bytes >= DIRECT_BYTES_MIN:
                self._is_direct = self._disk.bypass_cache(self._descriptor, True)
        except OSError as error:
            self._throw_away()
            raise failure(self._target, error) from error
        return self

    def write(self, data: Buffer) -> None:
        """The next bytes."""
        rest = memoryview(data).cast("B")
        try:
            while len(rest):
                count = self._write(rest)
                assert count > 0, "a write that takes nothing and reports no error"
                self._written += count
                rest = rest[count:]
            if not self._is_direct and self._written - self._on_its_way >= _WRITEBACK_BYTES:
                self._disk.start_writeback(self._descriptor, 0, self._written)
                self._on_its_way = self._written
        except OSError as error:
            raise failure(self._target, error) from error

    def _write(self, rest: memoryview) -> int:
        if self._is_direct and self._is_whole_pages(rest):
            try:
                return self._disk.write(self._descriptor, rest)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that has rules of its own
                    raise
        if self._is_direct:  # the end of the file, mostly
            self._disk.bypass_cache(self._descriptor, False)
            self._is_direct = False
        return self._disk.write(self._descriptor, rest)

    def _is_whole_pages(self, data: memoryview) -> bool:
        if data.readonly or (self._written | len(data)) % mmap.PAGESIZE:
            return False
        return ctypes.addressof(ctypes.c_char.from_buffer(data)) % mmap.PAGESIZE == 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as problem:
            if self.is_named:
                self._take_back()
            raise failure(self._target, problem) from problem
        finally:
            self._throw_away()

    def _publish(self) -> None:
        self._disk.sync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        self._disk.close(descriptor)  # NFS may report here what it could not store
        if self._is_first:
            self.is_named = self._give_new_name()
        else:
            self._disk.rename(self._path, self._target)
            self.is_named = True
        # Also of what another one made: it counts now, so it has to stay.
        self._disk.sync_directory(os.path.dirname(self._target))

    def _give_new_name(self) -> bool:
        try:
            self._disk.link(self._path, self._target)
        except FileExistsError:
            # NFS may carry out a link, lose the answer, and answer the second try with this.
            return self._disk.is_same_file(self._path, self._target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            try:
                self._disk.rename_new(self._path, self._target)
            except FileExistsError:
                return False
        return True

    def _take_back(self) -> None:
        try:
            self._disk.unlink(self._target)
        except OSError:
            pass  # it is whole, but nobody may rely on it: whoever asks for it again gets an error

    def _throw_away(self) -> None:
        try:
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                self._disk.close(descriptor)
        except OSError:
            pass  # it is not wanted any more
        try:
            self._disk.unlink(self._path)
        except OSError:
            pass  # renamed; or it stays, hidden, and whoever sweeps takes it away


def _is_object(name: str) -> bool:
    return not name.rpartition("/")[2].startswith(".")  # NFS has hidden files of its own
