"""The machine's file systems, behind the port.

Owns: one system call a method, with the flags that durable state needs. Does not own: order and
atomicity (`checkpoint.directory`).

Invariants: nothing here retries and nothing is swallowed, but for what a file system does not know
(claiming space, syncing a directory, advice): there its absence is no error.

Files get 0666 and directories 0777, less the umask: a checkpoint lies where its owner pointed to,
often on storage that a group shares, and belongs to whom any other output of theirs would.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

from stepfast.runtime.ports import Buffer

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RESIDENT = bytes(range(1, 256, 2))  # of a page's byte, the lowest bit means it
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def occupy_standard_descriptors() -> None:
    """Fill 0, 1 and 2 where a script closed them.

    Else a file of ours would get such a number, and whatever the script prints be written to it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def open_own(path: Path, flags: int, mode: int = 0o644) -> int:
    """A descriptor of a file that stepfast itself keeps at `path`, made where it is missing. Never
    of what a link there leads to: others may be able to write into the directory.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_own(path: Path, data: bytes) -> None:
    """Write such a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    with open(open_own(temporary, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(data)
    temporary.replace(path)


class SystemDisk:
    """The kernel's own calls."""

    def create(self, path: str) -> int:
        """A descriptor for writing a new file; FileExistsError where there is one."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def open(self, path: str) -> int:
        """A descriptor for reading a regular file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return descriptor

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Claim the space of a file that will be written; does nothing where that is not known.

        Not by posix_fallocate, which writes into every block where the file system cannot.
        """
        if size_bytes and hasattr(_libc, "fallocate"):
            length = ctypes.c_int64(size_bytes)
            if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), length) != 0:
                _raise_unless_unsupported(ctypes.get_errno())

    def write(self, descriptor: int, data: Buffer) -> int:
        """Append; returns how many bytes were taken, which may be fewer than given."""
        return os.write(descriptor, data)

    def bypass_cache(self, descriptor: int, wanted: bool) -> bool:
        """From now on write to and read from the device itself, or no more; False: that cannot be
        had here.

        A write into the page cache costs its copy, and later the kernel's search for what is dirty:
        together thrice the processor's time, which is the training's.
        """
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        flags = flags | _O_DIRECT if wanted else flags & ~_O_DIRECT
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        except OSError as error:
            _raise_unless_unsupported(error.errno or 0)
            return False
        return _O_DIRECT != 0

    def start_writeback(self, descriptor: int, start: int, size_bytes: int) -> None:
        """Have these bytes on their way to the device; waits for nothing and promises nothing.

        The same advice lets go of those that are there already, so that a checkpoint does not push
        the training data out of the page cache.
        """
        os.posix_fadvise(descriptor, start, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, descriptor: int) -> None:
        """Make the file's bytes durable. After an error they are lost: write them again."""
        os.fsync(descriptor)

    def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
        """Fill the buffer from `start`; returns how many bytes there were, 0 at the end."""
        return os.preadv(descriptor, [buffer], start)

    def is_cached(self, descriptor: int, start: int, size_bytes: int) -> bool:
        """Whether all these bytes lie in the page cache; said of files of others too, without a
        look: the kernel shows theirs to nobody.
        """
        before = start % mmap.PAGESIZE
        length = ctypes.c_size_t(size_bytes + before)
        offset = ctypes.c_int64(start - before)
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
        if address == _MAP_FAILED:
            return True
        try:
            pages = ctypes.create_string_buffer(-(-length.value // mmap.PAGESIZE))
            if _libc.mincore(ctypes.c_void_p(address), length, pages) != 0:
                return True
            return not pages.raw.translate(None, _RESIDENT)
        finally:
            _libc.munmap(ctypes.c_void_p(address), length)

    def size_bytes(self, descriptor: int) -> int:
        """The file's size."""
        return os.fstat(descriptor).st_size

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in the place of what had it."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError where the name is taken."""
        os.link(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """As `rename`, but FileExistsError where the name is taken. For what has no links."""
        if not hasattr(_libc, "renameat2"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
        names = os.fsencode(source), os.fsencode(target)
        if _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)

    def is_same_file(self, one: str, other: str) -> bool:
        """Whether two names are of one file."""
        return os.path.samestat(os.lstat(one), os.lstat(other))

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        """A new directory; FileExistsError where there is anything of that name."""
        os.mkdir(path, 0o777)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            _raise_unless_unsupported(error.errno or 0)
        finally:
            os.close(descriptor)

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """The names in a directory, sorted, each with whether it is a directory (links are not)."""
        with os.scandir(path) as found:
            return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)


def _raise_unless_unsupported(number: int) -> None:
    if number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number))
