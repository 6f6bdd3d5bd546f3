"""One snapshot: the tracked state into a free slot, sealed when it is whole.

Owns: the order of the steps of a capture; which tensors are copied beside the training, and which
no more. Does not own: cadence; which snapshots others protect; the copying itself.

    stage  -> what optimizers hold is copied beside the next turn, everything else before it begins
    fence  -> no optimizer steps before this returned: the copy is whole, nothing changed, sealed
    take   -> both at once

Some snapshots (`_is_whole_due`) are taken whole at the boundary, and at the fence the live tensors
are compared with them: that finds changes that leave no trace, and gives a turn without a copy
beside it, to compare times with.

Invariants, at whatever line the process dies:
- Until `seal` returns, the newest sealed slot is the one from before, untouched.
- A slot is unsealed before its first byte changes and sealed after its last: sealed means whole.
- What cannot be kept (state that is no plain value, too small a memory) is refused before any slot
  is unsealed.
- A slot is sealed only where nothing speaks against what was copied (`seal_obstacle`), asked behind
  the copy: collectives that were aborted leave garbage, and no exception.
- A slot in which a tensor may have changed under the copy is never sealed (void), and the snapshot
  behind a void one is whole before its turn begins.

While ranks are at most one step apart, three slots hold a step that all of them have, at any
instant; void snapshots included where all ranks lose the same one, or of two ranks one loses any.
(Where some of many ranks lose one and a process dies between its last collective and its fence,
there may be none: that costs the snapshots in memory, never a wrong state.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepfast.checkpoint.arena import WHO_REMOVES, Arena, Slot
from stepfast.core.quantities import counted
from stepfast.core.terms import SnapshotId, Step
from stepfast.errors import OperatingError

if TYPE_CHECKING:
    from stepfast.checkpoint.layout import Layout
    from stepfast.checkpoint.tensors.staging import Staging
    from stepfast.checkpoint.tensors.tree import Collected, StateTree

COPY_ERRORS = (RuntimeError, MemoryError, OSError, ValueError)
"""What a copy may fail with; torch's and CUDA's errors are RuntimeErrors."""
SLOT_WAIT_LIMIT_S = 600.0
"""How long a due snapshot waits for a slot that others protect: as long as any phase may take."""
COPY_LIMIT_S = 600.0
"""The same for the copy. A node that swaps may take minutes, and is better seen as a hang."""
FINISH_LIMIT_S = 1.0
"""How long an interrupt waits for a copy to end before it is cancelled, and again for its end; too
small loses a step, too big delays a recovery. 1 s is 5 GB and more.
"""
_SLOT_POLL_S = 0.002
WHOLE_EVERY = 64
"""One of so many snapshots is whole once a loop has run for a while. Smaller finds a change that
leaves no trace earlier, and holds the training for a whole copy more often.
"""
_NAMES_SHOWN = 3


class Captured(msgspec.Struct, frozen=True):
    """A snapshot that was taken: where it lies and what it cost the training loop.

    `blocked_s` held the training thread, at the boundary and at the fence; `waited_s` of it passed
    until a slot was free. `own_s` is processor time beside the training, if it was `overlapped`.
    """

    snapshot: SnapshotId
    slot_path: Path
    layout_digest: str
    blocked_s: float
    slot_bytes: int
    relaid: bool
    waited_s: float = 0.0
    own_s: float = 0.0
    overlapped: bool = False


class _UnderWay(NamedTuple):
    """A snapshot between its boundary and its fence."""

    slot: Slot
    staging: Staging
    captured: Captured  # as far as it is known


class _Whole(NamedTuple):
    """A whole snapshot that the live tensors will be compared with."""

    slot: Slot
    state: Collected


def _no_snapshots() -> frozenset[SnapshotId]:
    return frozenset()


class Capture:
    """Takes snapshots of `tree` into the slots of `arena`. For the thread that trains."""

    def __init__(
        self,
        arena: Arena,
        tree: StateTree,
        *,
        protected: Callable[[], frozenset[SnapshotId]] = _no_snapshots,
        on_sealed: Callable[[Captured], object] = lambda _: None,
        note: Callable[[str, str], object] = lambda topic, text: None,
        check: Callable[[], object] = lambda: None,
        seal_obstacle: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`protected`: snapshots that are kept besides the newest, asked again while none is free.

        `on_sealed` hears of each slot that was sealed. `check` may end a wait by raising.
        `seal_obstacle`: why what was just copied is not sealed; `check` then raises the cause.
        """
        self._arena, self._tree = arena, tree
        self._protected, self._on_sealed = protected, on_sealed
        self._note, self._check, self._seal_obstacle = note, check, seal_obstacle
        self._under_way: _UnderWay | None = None
        self._whole: _Whole | None = None
        self._staged_count = 0
        self._was_void = False
        self._at_boundary: set[str] = set()

    @property
    def is_copying(self) -> bool:
        """Whether a copy is under way, or has ended and awaits its fence."""
        return self._under_way is not None

    @property
    def has_copied(self) -> bool:
        """Whether a copy has ended, well or not, and awaits its fence."""
        return self._under_way is not None and self._under_way.staging.has_ended

    @property
    def is_fenced(self) -> bool:
        """Whether there is nothing to do for `fence`."""
        return self._under_way is None and self._whole is None

    def holds(self, step: Step) -> bool:
        """Whether a sealed slot has that step."""
        self._note_removed()
        return any(s.snapshot is not None and s.snapshot.step == step for s in self._arena.slots)

    def digests(self, step: Step) -> list[tuple[str, tuple[int, ...], str]]:
        """The hashes of what the sealed slot of that step holds; see `StateTree.local_digests`."""
        held = [s.snapshot for s in self._arena.slots if s.snapshot is not None]
        newest = max(snapshot for snapshot in held if snapshot.step == step)
        return self._tree.digests_in(self._arena.read(newest))

    def restore(self, snapshot: SnapshotId) -> None:
        """Bring the tree into the state of a sealed slot; StateError where there is none, or it
        does not fit.
        """
        self._tree.restore_from(self._arena.read(snapshot))

    def take(self, snapshot: SnapshotId) -> Captured:
        """Copy the state as it is now into a free slot; blocks until that is sealed as `snapshot`.

        Raises ScriptError for state that cannot be kept, OperatingError where memory or free slots
        lack.
        """
        slot, state, captured, began = self._begin(snapshot)
        self._tree.copy_into(slot, state)
        self._refuse_unsound()
        return self._seal(slot, captured, time.perf_counter() - began)

    def stage(self, snapshot: SnapshotId) -> Captured | None:
        """Begin to copy the state as it is now; the rest of it happens beside the training.

        Returns what was taken where that is sealed at once. Call `fence` before anything that an
        optimizer holds may change. Raises as `take` does.
        """
        is_whole = self._is_whole_due()
        slot, state, captured, began = self._begin(snapshot, trusting=not is_whole)
        if is_whole:
            self._tree.copy_into(slot, state)
            self._refuse_unsound()
            self._whole = _Whole(slot, state)
            return self._seal(slot, captured, time.perf_counter() - began)
        staging = self._tree.stage(slot, state, self._at_boundary)
        blocked_s = time.perf_counter() - began
        captured = msgspec.structs.replace(captured, blocked_s=blocked_s, overlapped=True)
        self._under_way = _UnderWay(slot, staging, captured)
        return None

    def fence(self) -> Captured | None:
        """Hold until what is staged is whole and sealed; None where nothing was, or it is void.

        Raises what stopped the copy; the slot is not sealed then.
        """
        began = time.perf_counter()
        self._compare_whole()
        if self._under_way is None:
            return None
        slot, staging, captured = self._under_way
        self._wait(COPY_LIMIT_S)
        self._refuse_unsound()
        if self._is_void(captured.snapshot, staging):
            return None
        fence_s = time.perf_counter() - began
        captured = msgspec.structs.replace(captured, own_s=staging.own_s)
        return self._seal(slot, captured, captured.blocked_s + fence_s)

    def hold(self) -> None:
        """For threads other than the one that trains: return once no copy reads any more."""
        under_way = self._under_way
        if under_way is not None:
            under_way.staging.wait(COPY_LIMIT_S)

    def settle(self, *, aborted: bool) -> Captured | None:
        """The generation is over: seal what is sound, drop the rest; nothing is copied any more.

        `aborted`: its groups were. Raises OperatingError where a copy failed or does not end; the
        process cannot go on with these slots.
        """
        self._whole = None
        if self._under_way is None:
            return None
        slot, staging, captured = self._under_way
        sound = staging.stands_after_abort or not aborted
        try:
            ended = staging.wait(FINISH_LIMIT_S)
            if not ended:
                sound = False
                staging.cancel()
            self._wait(FINISH_LIMIT_S)
        except COPY_ERRORS as error:
            raise OperatingError(f"copying a snapshot failed: {error}") from error
        if not sound or self._seal_obstacle() is not None:
            return None
        if staging.changed() or staging.broken():
            return None
        captured = msgspec.structs.replace(captured, own_s=staging.own_s)
        return self._seal(slot, captured, captured.blocked_s)

    # --- the steps -------------------------------------------------------------------------------

    def _begin(
        self, snapshot: SnapshotId, *, trusting: bool = False
    ) -> tuple[Slot, Collected, Captured, float]:
        """The state, a slot that may be written to, and when it began."""
        began = time.perf_counter()
        assert self._under_way is None, "the fence of the last snapshot comes first"
        self._whole = None
        laid_before = self._arena.laid_count
        state = self._tree.collect(trusting=trusting)
        slot, waited_s = self._slot_of(state.layout)
        slot.unseal()
        captured = Captured(
            snapshot=snapshot,
            slot_path=slot.path,
            layout_digest=slot.layout.digest,
            blocked_s=0.0,
            slot_bytes=slot.layout.file_bytes,
            relaid=self._arena.laid_count != laid_before,
            waited_s=waited_s,
        )
        return slot, state, captured, began

    def _slot_of(self, layout: Layout) -> tuple[Slot, float]:
        """A slot that may be written to and will be found, and how long it was waited for."""
        self._arena.claim(layout)
        slot, waited_s = self._wait_for_slot()
        if slot.is_removed:  # the others are looked at when it is their turn
            self._note_removed()
            self._arena.claim(layout)
            slot, more_s = self._wait_for_slot()
            waited_s += more_s
        return slot, waited_s

    def _note_removed(self) -> None:
        """Slots that nobody will find any more hold nothing; at a few microseconds a slot."""
        gone = self._arena.drop_removed()
        if gone:
            self._note(
                "snapshots removed",
                f"another process removed {counted(len(gone), 'slot')} in {self._arena.directory}"
                f" ({WHO_REMOVES}); what is gone is laid anew, and what it held is lost",
            )

    def _wait_for_slot(self) -> tuple[Slot, float]:
        began = time.perf_counter()
        while (slot := self._arena.free_slot(self._protected())) is None:
            if time.perf_counter() - began > SLOT_WAIT_LIMIT_S:
                raise OperatingError(
                    f"every slot in {self._arena.directory} was needed for"
                    f" {SLOT_WAIT_LIMIT_S:g} s; give the rank one more slot"
                )
            self._check()
            time.sleep(_SLOT_POLL_S)
        return slot, time.perf_counter() - began

    def _seal(self, slot: Slot, captured: Captured, blocked_s: float) -> Captured:
        slot.seal(captured.snapshot)
        self._was_void = False
        captured = msgspec.structs.replace(captured, blocked_s=blocked_s)
        self._on_sealed(captured)
        return captured

    def _refuse_unsound(self) -> None:
        if (obstacle := self._seal_obstacle()) is not None:
            self._check()
            raise OperatingError(f"a snapshot is not sealed: {obstacle}")

    def _wait(self, limit_s: float) -> None:
        """Until nothing is written any more. A copy that failed has ended too."""
        assert self._under_way is not None, "there is something to wait for"
        ended = True
        try:
            ended = self._under_way.staging.wait(limit_s)
        finally:
            if ended:
                self._under_way = None
        if not ended:
            raise OperatingError(f"copying a snapshot did not end within {limit_s:g} s")

    # --- what changes outside of optimizers ------------------------------------------------------

    def _is_whole_due(self) -> bool:
        """Behind a void one; else the 1st, 2nd, 4th, 8th ... and each 64th."""
        self._staged_count += 1
        count = self._staged_count
        return self._was_void or count & (count - 1) == 0 or count % WHOLE_EVERY == 0

    def _is_void(self, snapshot: SnapshotId, staging: Staging) -> bool:
        """Whether something speaks against what was copied; it is then done in another way."""
        broken = staging.broken()
        # Tensors that are not where they were believed to be are no news beside that.
        changed = [] if broken else staging.changed()
        if changed:
            self._at_boundary.update(changed)
            self._note(
                "snapshot void",
                f"step {snapshot.step}: {_words(changed)} changed before the optimizer's step; from"
                " now on copied before the turn begins. Changed behind the optimizer's step"
                " instead, in the same turn, it costs less",
            )
        if broken:
            self._tree.doubt(broken)
            self._note(
                "snapshot void",
                f"step {snapshot.step}: {_words(broken)} holds other tensors than at the step"
                " before; from now on it is looked through before each turn begins",
            )
        self._was_void = bool(changed or broken)
        return self._was_void

    def _compare_whole(self) -> None:
        whole, self._whole = self._whole, None
        if whole is None:
            return
        found = self._tree.held_and_different(whole.slot, whole.state)
        changed = [name for name in found if name not in self._at_boundary]
        if changed:
            self._at_boundary.update(changed)
            self._note(
                "copied at the boundary",
                f"{_words(changed)} changes before the optimizer's step: it is copied before the"
                " turn begins. Changed behind the optimizer's step instead it costs less",
            )


def _words(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
