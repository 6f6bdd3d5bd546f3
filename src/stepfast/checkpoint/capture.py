"""One snapshot: the tracked state into a free slot, sealed when it is whole.

Owns: the order of the steps of a capture. Does not own: cadence; which snapshots are protected; the
copying itself.

Invariants, at whatever line the process dies:
- Until `seal` returns, the newest sealed slot is the one from before, untouched.
- A slot is unsealed before its first byte changes and sealed after its last: sealed means whole.
- What cannot be kept (state that is no plain value, too small a memory) is refused before any slot
  is unsealed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepfast.checkpoint.arena import Arena
from stepfast.core.terms import SnapshotId
from stepfast.errors import OperatingError

if TYPE_CHECKING:
    from stepfast.checkpoint.tensors.tree import StateTree


class Captured(msgspec.Struct, frozen=True):
    """A snapshot that was taken: where it lies and what it cost the training loop."""

    snapshot: SnapshotId
    slot_path: Path
    layout_digest: str
    blocked_s: float
    slot_bytes: int
    relaid: bool


class Capture:
    """Takes snapshots of `tree` into the slots of `arena`."""

    def __init__(self, arena: Arena, tree: StateTree) -> None:
        self._arena = arena
        self._tree = tree

    def take(
        self, snapshot: SnapshotId, protected: frozenset[SnapshotId] = frozenset()
    ) -> Captured:
        """Copy the state as it is now into a free slot; blocks until that is sealed as `snapshot`.

        Slots that hold `protected` snapshots are kept, besides the newest. Raises ScriptError for
        state that cannot be kept, OperatingError where memory or free slots lack.
        """
        began = time.perf_counter()
        laid_before = self._arena.laid_count
        state = self._tree.collect()
        self._arena.claim(state.layout)
        slot = self._arena.free_slot(protected)
        if slot is None:
            raise OperatingError(
                f"every slot in {self._arena.directory} is needed; give the rank one more slot"
            )
        slot.unseal()
        self._tree.copy_into(slot, state)
        slot.seal(snapshot)
        return Captured(
            snapshot=snapshot,
            slot_path=slot.path,
            layout_digest=slot.layout.digest,
            blocked_s=time.perf_counter() - began,
            slot_bytes=slot.layout.file_bytes,
            relaid=self._arena.laid_count != laid_before,
        )
