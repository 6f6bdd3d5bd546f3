"""A file system in memory that keeps the promises of the port `Disk` and not one more.

What was not synced may be gone after a crash, torn, or there; so may names. Any call can be made to
fail, or to be the last one. `test_checkpoint_store.py` runs one contract over it and the real one.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from dataclasses import dataclass, field

from stepfast.runtime.ports import Buffer

BEFORE, AFTER = "before", "after"
KINDS_OF_FAILURE = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EROFS": errno.EROFS,
    "EACCES": errno.EACCES,
}


class Crashed(BaseException):
    """The machine is gone; nothing that this process does counts any more."""


@dataclass
class File:
    """Bytes as a reader sees them, and as they are on the device."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Directory:
    """Names as a reader sees them, and as they are on the device."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)


@dataclass
class Plan:
    """What becomes of the call of this number, counted from 0: an error or a crash."""

    at: int = -1
    kind: str = "crash"  # or a key of KINDS_OF_FAILURE, or "short"
    when: str = BEFORE  # of a crash: before the call had its effect, or after


class TornDisk:
    """The port's calls in memory; `calls` counts those that change something or sync it."""

    def __init__(self, root: Directory | None = None) -> None:
        self.root = root or Directory()
        self.calls: list[tuple[str, str]] = []
        self.plan = Plan()
        self.bytes_max: int | None = None
        self.has_links = True
        self.is_dead = False
        self._open: dict[int, File] = {}
        self._direct: set[int] = set()
        self._next = 3

    # ------------------------------------------------------------------ what a test does to it

    def after_crash(self, mode: str, seed: int = 0) -> TornDisk:
        """The disk as it is found again: "kept" as a process's end leaves it, "lost" without all
        that was not synced, "torn" with some of it.
        """
        chance = random.Random(seed)
        seen: dict[int, File] = {}

        def file_of(file: File) -> File:
            if id(file) not in seen:
                seen[id(file)] = File(bytearray(kept := survivor(file)), kept)
            return seen[id(file)]

        def survivor(file: File) -> bytes:
            if mode == "kept":
                return bytes(file.data)
            if mode == "lost" or file.durable == file.data:
                return file.durable
            cut = chance.randint(0, len(file.data))
            return bytes(file.data[:cut]) + bytes(chance.choice((0, len(file.data) - cut)))

        def directory_of(directory: Directory) -> Directory:
            names = dict(directory.names if mode == "kept" else directory.durable)
            if mode == "torn":
                for name in sorted({*directory.names, *directory.durable}):
                    if chance.random() < 0.5:
                        names.pop(name, None)
                        if name in directory.names:
                            names[name] = directory.names[name]
            found = {
                name: file_of(item) if isinstance(item, File) else directory_of(item)
                for name, item in names.items()
            }
            return Directory(dict(found), dict(found))

        disk = TornDisk(directory_of(self.root))
        disk.has_links = self.has_links
        return disk

    def file(self, path: str) -> File:
        item = self._at(path)
        assert isinstance(item, File)
        return item

    # ------------------------------------------------------------------ the port

    def create(self, path: str) -> int:
        self._reach("create", path)
        directory, name = self._parent(path)
        if name in directory.names:
            raise _error(errno.EEXIST)
        directory.names[name] = file = File()
        return self._descriptor(file)

    def open(self, path: str) -> int:
        self._check_alive()
        item = self._at(path)
        if isinstance(item, Directory):
            raise _error(errno.EINVAL)
        return self._descriptor(item)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        self._reach("reserve")
        if self.bytes_max is not None and self._used_bytes() + size_bytes > self.bytes_max:
            raise _error(errno.ENOSPC)

    def write(self, descriptor: int, data: Buffer) -> int:
        is_short = self._reach("write")
        if descriptor in self._direct and len(data) % mmap.PAGESIZE:
            raise _error(errno.EINVAL)
        count = max(1, len(data) // 2) if is_short else len(data)
        if self.bytes_max is not None:
            count = min(count, self.bytes_max - self._used_bytes())
            if count <= 0:
                raise _error(errno.ENOSPC)
        self._open[descriptor].data += bytes(data[:count])
        self._reached()
        return count

    def bypass_cache(self, descriptor: int, wanted: bool) -> bool:
        self._reach("bypass_cache")
        (self._direct.add if wanted else self._direct.discard)(descriptor)
        return True

    def start_writeback(self, descriptor: int, start: int, size_bytes: int) -> None:
        self._reach("start_writeback")

    def sync(self, descriptor: int) -> None:
        self._reach("sync")
        file = self._open[descriptor]
        file.durable = bytes(file.data)
        self._reached()

    def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
        self._check_alive()
        data = self._open[descriptor].data[start : start + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def is_cached(self, descriptor: int, start: int, size_bytes: int) -> bool:
        return False

    def size_bytes(self, descriptor: int) -> int:
        return len(self._open[descriptor].data)

    def close(self, descriptor: int) -> None:
        self._check_alive()
        self._direct.discard(descriptor)
        self._open.pop(descriptor)

    def rename(self, source: str, target: str) -> None:
        self._reach("rename", source)
        (old, old_name), (new, new_name) = self._parent(source), self._parent(target)
        if old_name not in old.names:
            raise _error(errno.ENOENT)
        new.names[new_name] = old.names.pop(old_name)
        self._reached()

    def link(self, source: str, target: str) -> None:
        self._reach("link", target)
        if not self.has_links:
            raise _error(errno.EPERM)
        directory, name = self._parent(target)
        if name in directory.names:
            raise _error(errno.EEXIST)
        directory.names[name] = self._at(source)
        self._reached()

    def rename_new(self, source: str, target: str) -> None:
        directory, name = self._parent(target)
        if name in directory.names:
            raise _error(errno.EEXIST)
        self.rename(source, target)

    def is_same_file(self, one: str, other: str) -> bool:
        return self._at(one) is self._at(other)

    def unlink(self, path: str) -> None:
        self._reach("unlink", path)
        directory, name = self._parent(path)
        item = directory.names.get(name)
        if not isinstance(item, File):
            raise _error(errno.ENOENT if item is None else errno.EISDIR)
        del directory.names[name]
        self._reached()

    def make_directory(self, path: str) -> None:
        self._reach("make_directory", path)
        directory, name = self._parent(path)
        if name in directory.names:
            raise _error(errno.EEXIST)
        directory.names[name] = Directory()
        self._reached()

    def remove_directory(self, path: str) -> None:
        self._reach("remove_directory", path)
        directory, name = self._parent(path)
        item = directory.names.get(name)
        if not isinstance(item, Directory):
            raise _error(errno.ENOENT)
        if item.names:
            raise _error(errno.ENOTEMPTY)
        del directory.names[name]
        self._reached()

    def sync_directory(self, path: str) -> None:
        self._reach("sync_directory", path)
        directory = self._at(path)
        assert isinstance(directory, Directory)
        directory.durable = dict(directory.names)
        self._reached()

    def entries(self, path: str) -> list[tuple[str, bool]]:
        self._check_alive()
        directory = self._at(path)
        if isinstance(directory, File):
            raise _error(errno.ENOTDIR)
        return sorted((name, isinstance(i, Directory)) for name, i in directory.names.items())

    # ------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self.is_dead:
            raise Crashed

    def _reach(self, call: str, path: str = "") -> bool:
        """Count a call; True where it is to be cut short."""
        self._check_alive()
        number, plan = len(self.calls), self.plan
        self.calls.append((call, path))
        if number != plan.at:
            return False
        if plan.kind in KINDS_OF_FAILURE:
            raise _error(KINDS_OF_FAILURE[plan.kind])
        if plan.kind == "crash" and plan.when == BEFORE:
            self._die()
        return plan.kind == "short"

    def _reached(self) -> None:
        """The call had its effect."""
        if len(self.calls) - 1 == self.plan.at and self.plan.kind == "crash":
            self._die()

    def _die(self) -> None:
        self.is_dead = True
        raise Crashed

    def _descriptor(self, file: File) -> int:
        self._next += 1
        self._open[self._next] = file
        return self._next

    def _parent(self, path: str) -> tuple[Directory, str]:
        directory = self._at(os.path.dirname(path))
        if isinstance(directory, File):
            raise _error(errno.ENOTDIR)
        return directory, os.path.basename(path)

    def _at(self, path: str) -> File | Directory:
        item: File | Directory = self.root
        for part in [part for part in path.split("/") if part]:
            if isinstance(item, File):
                raise _error(errno.ENOTDIR)
            if part not in item.names:
                raise _error(errno.ENOENT)
            item = item.names[part]
        return item

    def _used_bytes(self) -> int:
        files: dict[int, int] = {}
        waiting = [self.root]
        while waiting:
            for item in waiting.pop().names.values():
                if isinstance(item, File):
                    files[id(item)] = len(item.data)
                else:
                    waiting.append(item)
        return sum(files.values())


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
