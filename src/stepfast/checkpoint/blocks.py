"""Checksums of a file's blocks: what makes it possible to read a part of it and know it is right.

Owns: the size of a block, its checksum. Does not own: the checksum of whole files (`writer`), what
is done about a wrong one (`loading`).

Invariant: the blocks of a file are all of `BLOCK_BYTES`, but for the last, which has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import xxhash

from stepfast.runtime.ports import Buffer

# What one read of a store takes, and at least: smaller ones cost requests, larger ones read more
# than a part needs, and bigger manifests pay for smaller ones.
BLOCK_BYTES = 16 << 20


_DIGITS = 16  # of one block's checksum, xxh3-64 in hexadecimal
_DIGESTS = re.compile("[0-9a-f]*")


class BlockHasher:
    """The checksums of a file whose bytes come in pieces of any size."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        """Before the first byte."""
        self.block_bytes = block_bytes
        self._digests: list[str] = []
        self._hash = xxhash.xxh3_64()
        self._in_block = 0

    def update(self, data: Buffer) -> None:
        """The next bytes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part = rest[: self.block_bytes - self._in_block]
            self._hash.update(part)
            self._in_block += len(part)
            rest = rest[len(part) :]
            if self._in_block == self.block_bytes:
                self._end_block()

    def digests(self) -> str:
        """Behind the last byte: the checksums of all blocks, one behind the other."""
        if self._in_block:
            self._end_block()
        return "".join(self._digests)

    def _end_block(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        self._in_block = 0


def is_right(parts: Iterable[memoryview], number: int, digests: str) -> bool:
    """Whether the block of that number, in its parts, has its checksum."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.hexdigest() == digests[number * _DIGITS : (number + 1) * _DIGITS]


def is_whole(digests: str, size_bytes: int, block_bytes: int) -> bool:
    """Whether there is one checksum for each block of a file."""
    if block_bytes < 1 or _DIGESTS.fullmatch(digests) is None:
        return False
    return len(digests) == -(-size_bytes // block_bytes) * _DIGITS


def first_difference(found: str, expected: str) -> int | None:
    """The number of the first block whose checksum is another; None: all are the same."""
    if found == expected:
        return None
    starts = range(0, max(len(found), len(expected)), _DIGITS)
    pairs = enumerate((found[at : at + _DIGITS], expected[at : at + _DIGITS]) for at in starts)
    return next(number for number, (one, other) in pairs if one != other)
