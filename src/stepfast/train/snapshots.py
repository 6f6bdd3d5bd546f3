"""The snapshots of one rank under an agent: when a copy begins, where the loop waits for it.

Owns: the capture of the tracked state, the fence before every optimizer's step, the account of what
snapshots cost. Does not own: cadence and generations (`train.rank_host`), the copies
(`checkpoint`).

Invariants: nothing that is copied is updated by an optimizer of torch before its copy is whole,
whoever made it and whether it is tracked or not. When a generation is left no copy is under way.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena
from stepfast.checkpoint.capture import Capture, Captured
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import SnapshotId, Step
from stepfast.train.snapshot_cost import SnapshotCost


class Snapshots:
    """One object for the process; `attach` before the first snapshot of what was built."""

    def __init__(
        self,
        *,
        protected: Callable[[], frozenset[SnapshotId]],
        on_sealed: Callable[[Captured], object],
        note: Callable[[str, str], object],
        check: Callable[[], object],
        seal_obstacle: Callable[[], str | None],
        shield: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """The arguments are those of `Capture`; `shield`: code that no signal may tear apart."""
        self.cost = SnapshotCost()
        self.has_stepped = False  # an optimizer, since somebody said that none had
        self._pid = os.getpid()
        self._capture: Capture | None = None
        self._protected, self._on_sealed = protected, on_sealed
        self._note, self._check, self._shield = note, check, shield
        self._seal_obstacle = seal_obstacle
        # Of all optimizers: one that is not tracked may update tracked parameters.
        self._hook = register_optimizer_step_pre_hook(self._before_any_step)

    def attach(self, directory: Path, tree: StateTree, *, spare_slots: int = 0) -> None:
        """From now on snapshots are taken of `tree`, where that is not so already.

        `spare_slots`: so many may be protected for long without a snapshot having to wait.
        """
        if self._capture is None:
            self._capture = Capture(
                Arena(directory, SLOTS_WITH_OVERLAP + spare_slots),
                tree,
                protected=self._protected,
                on_sealed=self._sealed,
                note=self._note,
                check=self._check,
                seal_obstacle=self._seal_obstacle,
            )

    def restore(self, snapshot: SnapshotId) -> None:
        """Bring the tree into the state of a sealed slot; StateError where there is none."""
        assert self._capture is not None, "attached before"
        self._capture.restore(snapshot)

    def forget(self) -> None:
        """What was built is dropped."""
        assert self._capture is None or not self._capture.is_copying, "settled before"
        self._capture = None

    @property
    def is_copying(self) -> bool:
        """Whether a copy runs beside the training."""
        return self._capture is not None and self._capture.is_copying

    def begin(self, snapshot: SnapshotId, *, whole: bool = False) -> None:
        """At a boundary: the state as it is now. `whole`: it is sealed when this returns."""
        assert self._capture is not None, "attached before the first snapshot"
        self.fence()
        began = time.perf_counter()
        if whole:
            self._capture.take(snapshot)
        else:
            self._capture.stage(snapshot)
        self.cost.boundary(time.perf_counter() - began, whole=not self.is_copying)

    def fence(self) -> None:
        """Hold until no copy is under way; raises what stopped one."""
        if self._capture is None or self._capture.is_fenced:
            return
        began, whole = time.perf_counter(), not self.is_copying
        self._capture.fence()
        self.cost.fence(time.perf_counter() - began, whole=whole)

    def hold(self) -> None:
        """From any thread: return once no copy reads any more."""
        if self._capture is not None:
            self._capture.hold()

    def holds(self, step: Step) -> bool:
        """Whether a sealed slot has that step."""
        assert self._capture is not None, "attached before the first snapshot"
        return self._capture.holds(step)

    def digests(self, step: Step) -> list[tuple[str, tuple[int, ...], str]]:
        """The hashes of what a sealed slot holds of that step."""
        assert self._capture is not None, "attached before the first snapshot"
        return self._capture.digests(step)

    def try_seal(self) -> None:
        """Where the copy has ended already, seal it now: what follows may take long."""
        if self._capture is not None and self._capture.has_copied:
            self._capture.fence()

    def settle(self, *, aborted: bool) -> None:
        """The generation is left; see `Capture.settle`."""
        self.cost.drop_turn()
        if self._capture is not None:
            self._capture.settle(aborted=aborted)

    def _sealed(self, captured: Captured) -> None:
        if captured.overlapped:
            self.cost.copied(captured.own_s)
        self._on_sealed(captured)

    def _before_any_step(self, *_: Any) -> None:
        if os.getpid() != self._pid:
            return  # a fork of this process has parameters of its own, and no copy
        self.has_stepped = True
        if threading.get_ident() == threading.main_thread().ident:
            with self._shield():
                self.fence()
        else:
            self.hold()

    def close(self) -> None:
        """No optimizer is fenced any more."""
        self._hook.remove()
