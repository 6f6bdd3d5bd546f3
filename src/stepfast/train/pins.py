"""Which steps are to be made durable, and which slots are kept until they are.

Owns: the two small sets that the monitor thread and the main thread share. Does not own: cadence
(`core.durable`), slots (`checkpoint.arena`).
Invariants: a slot is pinned before it is sealed; at most one is pinned at a time, for one slot more
than snapshots need is there for it. Who seals it tells the agent, which lets it go. Orders count in
the order in which they were sent: a start may be followed at once by the end of a write that it
names, long before the main thread wakes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import RankCheckpointAt, RankStart, RankUnpin
from stepfast.core.terms import SnapshotId, Step

_ANNOUNCED_MAX = 8  # steps that were announced and not reached yet; the newest count


class Pins:
    """One per process. `hear` is called by the monitor thread, everything else by the main one."""

    def __init__(self) -> None:
        """Nothing is pinned."""
        self._lock = threading.Lock()
        self._announced: list[Step] = []
        self._pinned: set[SnapshotId] = set()
        self._unsealed: SnapshotId | None = None
        self.settings = CheckpointSettings()

    def begin(self, settings: CheckpointSettings, pinned: Iterable[SnapshotId]) -> None:
        """A generation begins; `pinned` are being written for the one before."""
        with self._lock:
            self.settings = settings
            self._announced = []
            self._pinned = set(pinned)
            self._unsealed = None

    def hear(self, message: RankStart | RankCheckpointAt | RankUnpin) -> None:
        """An order of the agent."""
        if isinstance(message, RankStart):
            self.begin(message.settings.checkpoints, message.pinned)
            return
        with self._lock:
            if isinstance(message, RankUnpin):
                self._pinned.discard(message.snapshot)
            else:
                self._announced = [*self._announced, message.step][-_ANNOUNCED_MAX:]

    def is_due(self, step: Step) -> bool:
        """Whether the snapshot of this step is to be made durable."""
        with self._lock:
            return step in self._announced or self.settings.is_due(step)

    def try_pin(self, snapshot: SnapshotId) -> bool:
        """Keep the slot that `snapshot` will be sealed in; False while another one is kept."""
        with self._lock:
            if self._pinned - {snapshot}:
                return False
            self._pinned.add(snapshot)
            self._unsealed = snapshot
            return True

    def seal(self, snapshot: SnapshotId) -> bool:
        """Its slot is sealed; whether it is kept, which the agent has to be told."""
        with self._lock:
            if self._unsealed != snapshot:
                return False
            self._unsealed = None
            return True

    def drop_unsealed(self) -> None:
        """What was pinned last and will never be sealed need not be kept."""
        with self._lock:
            if self._unsealed is not None:
                self._pinned.discard(self._unsealed)
                self._unsealed = None

    def held(self) -> frozenset[SnapshotId]:
        """What must not be overwritten."""
        with self._lock:
            return frozenset(self._pinned)
