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
from enum import Enum, auto

from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import AboutPins, RankCancel, RankCheckpointAt, RankStart, RankUnpin
from stepfast.core.terms import SnapshotId, Step

_ANNOUNCED_MAX = 8  # steps that were announced and not reached yet; the newest count
_CANCELLED_MAX = 8


class Claim(Enum):
    """What became of a snapshot that is about to be taken."""

    NOT_DUE = auto()
    PINNED = auto()
    BUSY = auto()  # due, and another one is kept


class Pins:
    """One per process. `hear` is called by the monitor thread, everything else by the main one."""

    def __init__(self) -> None:
        """Nothing is pinned."""
        self._lock = threading.Lock()
        self._announced: list[Step] = []
        self._cancelled: list[SnapshotId] = []
        self._not_before = Step(0)
        self._pinned: set[SnapshotId] = set()
        self._unsealed: SnapshotId | None = None
        self.settings = CheckpointSettings()

    def begin(self, settings: CheckpointSettings, pinned: Iterable[SnapshotId]) -> None:
        """A generation begins; `pinned` are being written for the one before."""
        with self._lock:
            self.settings = settings
            self._announced = []
            self._not_before = Step(0)
            self._pinned = set(pinned)
            self._unsealed = None

    def hear(self, message: RankStart | AboutPins) -> None:
        """An order of the agent."""
        with self._lock:
            match message:
                case RankUnpin(snapshot=snapshot):
                    self._pinned.discard(snapshot)
                case RankCheckpointAt(step=step):
                    self._announced = [*self._announced, step][-_ANNOUNCED_MAX:]
                case RankCancel(snapshot=snapshot):
                    self._cancel(snapshot)
                    self._not_before = max(self._not_before, message.not_before)
                case RankStart():
                    pass
        if isinstance(message, RankStart):
            self.begin(message.settings.checkpoints, message.pinned)

    def _cancel(self, snapshot: SnapshotId) -> None:
        self._pinned.discard(snapshot)
        if self._unsealed == snapshot:
            self._unsealed = None
        self._cancelled = [*self._cancelled, snapshot][-_CANCELLED_MAX:]

    def claim(self, snapshot: SnapshotId) -> Claim:
        """Keep the slot that `snapshot` will be sealed in, if it is due and no other is kept."""
        step = snapshot.step
        with self._lock:
            by_number = self.settings.is_due(step) and step >= self._not_before
            if snapshot in self._cancelled or not (by_number or step in self._announced):
                return Claim.NOT_DUE
            self._announced = [s for s in self._announced if s != step]
            if self._pinned - {snapshot}:
                return Claim.BUSY
            self._pinned.add(snapshot)
            self._unsealed = snapshot
            return Claim.PINNED

    def passed(self, step: Step) -> list[Step]:
        """Steps before `step` that were announced when they were over."""
        with self._lock:
            late = [s for s in self._announced if s < step]
            self._announced = [s for s in self._announced if s >= step]
            return late

    def seal(self, snapshot: SnapshotId) -> bool:
        """Its slot is sealed; whether it is kept, which the agent has to be told."""
        with self._lock:
            if self._unsealed != snapshot:
                return False
            self._unsealed = None
            return True

    def drop_unsealed(self) -> SnapshotId | None:
        """What was pinned last and will never be sealed need not be kept; what that was."""
        with self._lock:
            dropped, self._unsealed = self._unsealed, None
            if dropped is not None:
                self._pinned.discard(dropped)
            return dropped

    def held(self) -> frozenset[SnapshotId]:
        """What must not be overwritten."""
        with self._lock:
            return frozenset(self._pinned)
