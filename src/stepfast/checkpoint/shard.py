"""One rank's file of a checkpoint, read straight into the memory where its tensors shall be.

Owns: which bytes of a block go where. Does not own: reads and checksums (`loading`), which tensors
are wanted where (`tensors.restoration`).

Invariant: a block is read for who asks, at each call anew, but for what `view` has shown; nothing
is kept that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stepfast.checkpoint.layout import Entry
from stepfast.checkpoint.loading import OnRead, StoredCheckpoint, claim


class _Place(NamedTuple):
    """Where the bytes `start` to `end` of a file shall be."""

    start: int
    end: int
    memory: memoryview

    def part(self, start: int, end: int) -> memoryview:
        """The memory of those bytes of the file that are between `start` and `end`."""
        return self.memory[max(start, self.start) - self.start : min(end, self.end) - self.start]


class StoredShard:
    """One rank's file; what a restore into the same layout reads from, block by block."""

    def __init__(self, checkpoint: StoredCheckpoint, rank: int, on_read: OnRead | None) -> None:
        """Header and plain values are read; no tensor is."""
        self.layout = checkpoint.layout(rank)
        self.plain = checkpoint.plain(rank)
        self._checkpoint, self._rank = checkpoint, rank
        self._on_read = on_read
        self._memory = claim(self.layout.file_bytes)  # which takes room where it is written to
        self._there: set[int] = set()  # the blocks that are in it
        self._compared: set[int] = set()

    def view(self, entry: Entry) -> memoryview:
        """The bytes of one entry, verified."""
        start, end = (self.layout.data_start + at for at in (entry.start, entry.end))
        wanted = set(self._checkpoint.blocks(self._rank, start, end)) - self._there
        self._read({number: [] for number in sorted(wanted)})
        self._there |= wanted
        return self._memory[start:end]

    def fill(self, places: Iterable[tuple[Entry, memoryview]]) -> None:
        """Read entries into memory of just their sizes, without a copy in between.

        Where CheckpointDamaged is raised, any of that memory may hold what is wrong.
        """
        start = self.layout.data_start
        by_block: dict[int, list[_Place]] = {}
        twice: list[tuple[memoryview, memoryview]] = []
        first: dict[int, memoryview] = {}
        # Empty ones have no bytes, and may begin where another one does.
        filled = ((entry, memory) for entry, memory in places if len(memory))
        for entry, memory in sorted(filled, key=lambda place: place[0].start):
            if entry.start in first:
                twice.append((memory, first[entry.start]))
            else:
                first[entry.start] = memory
                place = _Place(start + entry.start, start + entry.end, memory)
                for number in self._checkpoint.blocks(self._rank, place.start, place.end):
                    by_block.setdefault(number, []).append(place)
        self._read(by_block)
        for memory, source in twice:
            memory[:] = source

    def check_rest(self) -> None:
        """Read what nobody asked for, so that every byte of the file was compared."""
        blocks = self._checkpoint.blocks(self._rank, 0, self.layout.file_bytes)
        self._read({number: [] for number in blocks if number not in self._compared})

    def _read(self, blocks: Mapping[int, list[_Place]]) -> None:
        """Blocks into places of theirs; one without any, into memory of our own."""
        parts = {number: self._parts(number, places) for number, places in blocks.items()}
        self._checkpoint.read_blocks(self._rank, parts, self._on_read)
        self._compared.update(blocks)

    def _parts(self, number: int, places: list[_Place]) -> list[memoryview]:
        """Memory for a whole block: what lies in no place, beside it."""
        at, end = self._checkpoint.block_range(self._rank, number)
        if not places:
            return [self._memory[at:end]]
        parts = []
        for place in places:
            parts.append(memoryview(bytearray(max(0, place.start - at))))
            parts.append(place.part(at, end))
            at = min(end, place.end)
        return [*parts, memoryview(bytearray(end - at))]
