"""Bytes of a file are the same through the page cache and past it, whatever the disk does."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepfast.checkpoint.file_reading import FileReading
from stepfast.errors import OperatingError, StateError
from stepfast.runtime.disk import SystemDisk

SIZE_BYTES = (9 << 20) + 1234
DATA = random.Random(1).randbytes(SIZE_BYTES)


class Direct(SystemDisk):
    """The machine's disk, of which nothing is ever said to be cached; it counts what was asked."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.is_direct = False

    def is_cached(self, descriptor: int, start: int, size_bytes: int) -> bool:
        return False

    def bypass_cache(self, descriptor: int, wanted: bool) -> bool:
        self.is_direct = wanted
        return True  # a tmpfs may have no such thing; the reads are whole pages all the same

    def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
        if self.is_direct:
            assert start % 4096 == 0 and len(buffer) % 4096 == 0
            self.reads.append((start, len(buffer)))
        return super().read_into(descriptor, start, buffer)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(DATA)
    return str(tmp_path / "file")


def _read(disk: SystemDisk, path: str, start: int, sizes: Sequence[int]) -> bytes:
    buffers = [memoryview(bytearray(size)) for size in sizes]
    with FileReading(disk, path) as reading:
        reading.fill_past_cache(start, *buffers)
    return b"".join(buffers)


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 70_000])
def test_any_part_comes_in_whole_pages(path: str, start: int) -> None:
    disk = Direct()
    sizes = [0, 3, 5 << 20, 0, 4096, 1, (1 << 20) + 7]
    assert _read(disk, path, start, sizes) == DATA[start : start + sum(sizes)]
    assert disk.reads and disk.is_direct


def test_the_end_of_the_file_is_no_whole_page(path: str) -> None:
    start = SIZE_BYTES - (2 << 20) - 5
    assert _read(Direct(), path, start, [(2 << 20) + 5]) == DATA[start:]
    with pytest.raises(StateError, match=f"it has {SIZE_BYTES}"):
        _read(Direct(), path, start, [(2 << 20) + 6])


def test_a_disk_that_gives_less_than_asked(path: str) -> None:
    class Slow(Direct):
        def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
            return super().read_into(descriptor, start, buffer[: 8192 + 8192 * (start % 3)])

    assert _read(Slow(), path, 100, [3 << 20]) == DATA[100 : 100 + (3 << 20)]


def test_a_file_system_with_rules_of_its_own_is_read_as_ever(path: str) -> None:
    class Choosy(Direct):
        def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
            if self.is_direct and start:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().read_into(descriptor, start, buffer)

    disk = Choosy()
    assert _read(disk, path, 5, [SIZE_BYTES - 5]) == DATA[5:]
    assert not disk.is_direct


def test_an_error_of_the_disk_is_no_reason_to_try_otherwise(path: str) -> None:
    class Broken(Direct):
        def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(OperatingError, match="Connection timed out"):
        _read(Broken(), path, 0, [2 << 20])


def test_what_is_cached_or_small_is_read_through_the_cache(path: str) -> None:
    class Counting(SystemDisk):
        asked = 0

        def bypass_cache(self, descriptor: int, wanted: bool) -> bool:
            self.asked += 1
            return super().bypass_cache(descriptor, wanted)

    disk = Counting()
    assert _read(disk, path, 0, [SIZE_BYTES]) == DATA  # just written
    assert _read(Direct(), path, 9, [1000]) == DATA[9:1009]
    assert disk.asked == 0


def test_the_kernel_says_what_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    disk = SystemDisk()
    descriptor = disk.open(str(path))
    try:
        assert disk.is_cached(descriptor, 5, SIZE_BYTES - 5)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if disk.is_cached(descriptor, 0, SIZE_BYTES):
            pytest.skip("this file system keeps files in memory")
        assert _read(disk, str(path), 0, [SIZE_BYTES]) == DATA
        assert not disk.is_cached(descriptor, 0, SIZE_BYTES), "read past the cache"
        os.pread(descriptor, SIZE_BYTES, 0)
        assert disk.is_cached(descriptor, 0, SIZE_BYTES)
    finally:
        disk.close(descriptor)
