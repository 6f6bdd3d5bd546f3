"""One file of a directory store, read: through the page cache, or past it.

Owns: how bytes of a file come into given memory. Does not own: which file (`directory`), the words
for what went wrong (`file_errors`), whether the bytes are right (`loading`), the calls
(`runtime.disk`).

Invariants:
- A call returns when all the memory is filled; a file that is shorter is a StateError.
- Reading past the cache is never needed: where it cannot be had, or the bytes are in the cache
  already, they are read as ever.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from types import TracebackType
from typing import Self

from stepfast.checkpoint.file_errors import reading_failure, short
from stepfast.runtime.ports import Disk

PAST_CACHE_BYTES_MIN = 1 << 20  # below, a request is all it costs
# Long enough for a disk's full rate, short enough to lie in a core's own cache until it is copied.
_PIECE_BYTES = 4 << 20


class FileReading:
    """A file that is open for reading."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Nothing is opened before it is entered."""
        self._disk = disk
        self._path = path
        self._descriptor = -1
        self.size_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._descriptor = opened(self._disk, self._path)
            self.size_bytes = self._disk.size_bytes(self._descriptor)
        except OSError as error:
            raise reading_failure(self._path, error) from error
        return self

    def fill(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers, one behind the other, from `start` of the file."""
        try:
            for buffer in buffers:
                done = 0
                while done < len(buffer):
                    count = self._disk.read_into(self._descriptor, start + done, buffer[done:])
                    if count == 0:
                        raise short(self._path, start, len(buffer), start + done)
                    done += count
                start += done
        except OSError as error:
            raise reading_failure(self._path, error) from error

    def fill_past_cache(self, start: int, *buffers: memoryview) -> None:
        """As `fill`; what is not in the page cache does not get there.

        The kernel's copy of a page and its search for room cost more than our copy of a piece that
        lies in the core's cache: a cold file of 340 MB, two ranks on two cores, took 0.7 to 0.8 of
        the time that plain reads took.
        """
        size_bytes = sum(map(len, buffers))
        try:
            is_direct = (
                size_bytes >= PAST_CACHE_BYTES_MIN
                and not self._disk.is_cached(self._descriptor, start, size_bytes)
                and self._disk.bypass_cache(self._descriptor, True)
            )
            if is_direct and self._fill_by_pieces(start, start + size_bytes, buffers):
                return
            if is_direct:
                self._disk.bypass_cache(self._descriptor, False)
        except OSError as error:
            raise reading_failure(self._path, error) from error
        self.fill(start, *buffers)

    def _fill_by_pieces(self, start: int, end: int, buffers: tuple[memoryview, ...]) -> bool:
        """Whole pages into memory of whole pages, and from there to where they belong.

        False: the file system has rules of its own for that.
        """
        piece = memoryview(mmap.mmap(-1, _PIECE_BYTES))
        targets = _Targets(buffers)
        done = start
        while done < end:
            at = done - done % mmap.PAGESIZE
            wanted = min(_PIECE_BYTES, end - at + -(end - at) % mmap.PAGESIZE)
            try:
                count = self._disk.read_into(self._descriptor, at, piece[:wanted])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return False
            came = piece[done - at : min(count, end - at)]
            if not len(came):
                raise short(self._path, start, end - start, at + count)
            targets.take(came)
            done += len(came)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disk.close(self._descriptor)


class _Targets:
    """Memory that is filled from its first byte on, by whatever comes."""

    def __init__(self, buffers: tuple[memoryview, ...]) -> None:
        self._rest = [buffer for buffer in reversed(buffers) if len(buffer)]

    def take(self, came: memoryview) -> None:
        """The next bytes. The copies let other threads run meanwhile, as slices' would not."""
        while len(came):
            target = self._rest.pop()
            size_bytes = min(len(target), len(came))
            ctypes.memmove(_address(target), _address(came), size_bytes)
            came = came[size_bytes:]
            if size_bytes < len(target):
                self._rest.append(target[size_bytes:])


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def opened(disk: Disk, path: str) -> int:
    """For reading. A name that was just given anew may lead NFS to a file that is no more: once."""
    try:
        return disk.open(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return disk.open(path)
