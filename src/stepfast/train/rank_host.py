"""What a `Run` finds under an agent: this rank's place, groups, slots and watch.

Owns: when snapshots are due, restoring, the bound on drift, the account of what each phase
took. Does not own: the way through generations (`train.wrapper`), how snapshots are taken beside
the training (`train.snapshots`), the format of slots (`checkpoint`). Invariant: a snapshot is begun
only while its generation stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from stepfast.checkpoint.arena import SLOTS_TO_WRITE, invalidate
from stepfast.checkpoint.capture import Captured
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.store import open_store
from stepfast.checkpoint.tensors.reshard import restore
from stepfast.core.faults import Whereabouts
from stepfast.core.messages import (
    FirstStepDone,
    LoggedStep,
    PhaseBegan,
    PhaseEnded,
    RankLogged,
    RankNoted,
    RankResumed,
    RankSealed,
    RankSkipped,
    RankStart,
    TensorDigest,
)
from stepfast.core.terms import NOTHING_HELD, Rank, SnapshotId, Step
from stepfast.core.timeouts import FIRST_TURN, SETUP, TURN
from stepfast.runtime.ports import FaultPoints
from stepfast.train import torch_private
from stepfast.train.checking import Fit, how_it_fits, what_is_kept
from stepfast.train.gradients import GradientWatch
from stepfast.train.groups import Groups
from stepfast.train.host import NoFaults, digests_of
from stepfast.train.kept import Kept
from stepfast.train.monitor import Monitor
from stepfast.train.pins import Claim, Pins
from stepfast.train.rank_device import RankDevice
from stepfast.train.rng import RngState
from stepfast.train.snapshots import Snapshots
from stepfast.train.whereabouts import Whereabout

_READING_SIGN_S = 5.0
_CHECKED_POLL_S = 0.01
_CLOSING = "section:behind the loop"


class Account:
    """What the phases of a stay took; moments on the monotonic clock."""

    def __init__(self, began: float = 0.0) -> None:
        self.began = began
        self.formed = began
        self.built = began
        self.restored = began
        self.resumed = began
        self.turn_began = began
        self.sections_s = 0.0
        self.turns = 0
        self.is_copying = False  # whether a copy was under way when the turn began
        self.world_operations = 0


class RankHost:
    """Implements `train.host.Host` for a rank of a job; one object for the process."""

    def __init__(self, monitor: Monitor, whereabout: Whereabout, pins: Pins) -> None:
        """Nowhere yet: `enter` begins a stay."""
        self.kept = Kept()
        self.whereabout = whereabout
        self.faults: FaultPoints = NoFaults()
        self.groups: Groups | None = None
        self.is_forming = False
        self.account = Account()
        self._monitor = monitor
        self._pins = pins
        self._order: RankStart | None = None
        self.snapshots = Snapshots(
            protected=pins.held,
            on_sealed=self._sealed,
            note=self.note,
            check=self.check_sound,
            seal_obstacle=self.seal_obstacle,
            shield=self.shield,
        )
        self._gradients = GradientWatch(self._gradients_kept)
        self._rng_resumed: RngState | None = None
        self.device = RankDevice(monitor.send, lambda: self.kept.step)
        self._fit = Fit()

    def enter(self, order: RankStart) -> None:
        """A stay begins; what was built is kept where all ranks agree to it."""
        self._order = order
        self.account = Account(began=time.monotonic())
        if not order.keep:
            self.forget_built()
        self.kept.revived = []
        self.kept.step = order.step or Step(0)
        self._rng_resumed = None

    def forget_built(self) -> None:
        """Everything is built again in the next generation."""
        self.kept = Kept()
        self._gradients.forget()
        self.snapshots.forget()
        torch_private.forget_old_meshes()

    # --- where this rank stands ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of the present generation."""
        return self._present.rank

    @property
    def world_size(self) -> int:
        """Ranks of the present generation."""
        return self._present.world_size

    @property
    def local_rank(self) -> int:
        """The rank's number on its node."""
        return self._present.local_rank

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        return self._present.settings.device

    @property
    def is_resuming(self) -> bool:
        """Whether the generation goes on from a snapshot."""
        return self._present.step is not None

    @property
    def _present(self) -> RankStart:
        assert self._order is not None, "outside of any generation"
        return self._order

    def check(self) -> None:
        """A safe point."""
        self._monitor.check()

    def check_sound(self) -> None:
        """A safe point that also raises what the groups know to be wrong."""
        self._monitor.check()
        if self.groups is not None and (error := self.groups.error()) is not None:
            raise dist.DistBackendError(error)

    def seal_obstacle(self) -> str | None:
        """Why what was copied may be what an aborted collective left behind; asked behind the copy.

        Where a failed collective raises, a boundary that was reached is sound.
        """
        if self.groups is None or not self.groups.backend.ends_by_abort:
            return None
        if self._monitor.must_leave:
            return "the generation is over"
        return self.groups.error()

    def shield(self) -> AbstractContextManager[None]:
        """Code that no signal may tear apart."""
        return self._monitor.shield()

    # --- groups ----------------------------------------------------------------------------------

    @contextmanager
    def forming_groups(self) -> Iterator[None]:
        """The main thread waits for peers; user code as far as an interrupt is concerned."""
        self.is_forming = True
        with self.whereabout.said(Whereabouts.COLLECTIVE), self._monitor.shield():
            yield
        self.is_forming = False

    def replay_groups(self, record: Any) -> None:
        """Make recorded groups again."""
        assert self.groups is not None, "inside a generation"
        with self.forming_groups():
            self.groups.replay(record, lambda: self._monitor.must_leave)

    def recording(self) -> AbstractContextManager[object]:
        """Record the groups that are made meanwhile."""
        assert self.groups is not None, "inside a generation"
        return self.groups.recording()

    # --- state -----------------------------------------------------------------------------------

    def attach_state(self) -> None:
        """Restore from this rank's own slot; where the job begins, slots are only made ready."""
        order = self._present
        tracked = self.kept.tracked
        assert tracked is not None, "state is attached after track"
        directory = Path(order.slot_directory)
        with self._monitor.shield():
            self.account.built = self.account.restored = time.monotonic()
            if order.settings.check:
                self._fit = how_it_fits(tracked, order)
                return  # nothing is kept, so there is nothing to attach to
            spare = SLOTS_TO_WRITE if order.settings.checkpoints.url else 0
            self.snapshots.attach(directory, tracked.tree, spare_slots=spare)
            if order.source is not None:
                self._restore(order.source)
            elif order.checkpoint is not None:
                self._restore_stored(order.checkpoint)
            newest = NOTHING_HELD if order.step is None else order.step
            invalidate(directory, newer_than_step=newest, before_generation=order.generation)
            self.account.restored = time.monotonic()

    def _restore(self, source: SnapshotId) -> None:
        self.snapshots.restore(source)
        self._rng_resumed = RngState.take()

    def _restore_stored(self, checkpoint: SnapshotId) -> None:
        """From the checkpoint store, whatever layout it was saved in."""
        order, tracked = self._present, self.kept.tracked
        assert tracked is not None, "restored after track"
        stored = StoredCheckpoint.open(open_store(order.settings.checkpoints.url), checkpoint)
        saved_by = stored.manifest.job_id
        if self.rank == 0 and saved_by != order.settings.job_id:
            self.note("checkpoint", f"starts from step {checkpoint.step} of job {saved_by}")
        restore(
            tracked.tree,
            stored,
            world_size=self.world_size,
            start_fresh=order.settings.checkpoints.start_fresh,
            on_warning=lambda text: self.note("checkpoint", text),
            on_read=self._bytes_came(order),
        )
        if stored.manifest.job_id != order.settings.job_id:
            tracked.tree.loop_left = False  # another job goes on from there
        self._rng_resumed = RngState.take()

    def _bytes_came(self, order: RankStart) -> Callable[[int], None]:
        """Reading may take long: each piece is a safe point, and now and then a sign of life."""
        told_at = time.monotonic()

        def came(size_bytes: int) -> None:
            nonlocal told_at
            self._monitor.check()
            if time.monotonic() - told_at >= _READING_SIGN_S:
                told_at = time.monotonic()
                step = order.step or Step(0)
                self._monitor.send(PhaseBegan(generation=order.generation, step=step, phase=SETUP))

        return came

    def _begin_snapshot(self, step: Step, *, whole: bool = False) -> None:
        self._monitor.check()
        snapshot = SnapshotId(self._present.generation, step)
        self.snapshots.fence()
        for late in self._pins.passed(step):
            self._skipped(SnapshotId(snapshot.generation, late), "announced too late", is_late=True)
        if (void := self._pins.drop_unsealed()) is not None:
            self._skipped(void, "its snapshot was void")
        # The last step is written when the function has returned, whatever is written now.
        if self._pins.claim(snapshot) is Claim.BUSY and not whole:
            self._skipped(snapshot, "the one before is still being written")
        self.snapshots.begin(snapshot, whole=whole)

    def _skipped(self, snapshot: SnapshotId, reason: str, *, is_late: bool = False) -> None:
        self._monitor.send(RankSkipped(snapshot=snapshot, reason=reason, is_late=is_late))

    def _sealed(self, captured: Captured) -> None:
        if self._pins.seal(captured.snapshot):
            self._monitor.send(RankSealed(snapshot=captured.snapshot))

    def finish_snapshots(self, step: Step) -> None:
        """The user's function has returned at `step`: what is being copied is sealed.

        A loop that was left early may have no snapshot of it: the state as it is now is that. It is
        taken here and not before: a fault until now has the turn that left made again.
        """
        with self._monitor.shield():
            self.snapshots.fence()
            if not self.snapshots.holds(step):
                self._begin_snapshot(step, whole=True)

    def settle_snapshots(self) -> None:
        """The generation is over, its groups aborted: no copy is under way behind this."""
        self.snapshots.settle(aborted=True)

    def digests(self, step: Step) -> tuple[TensorDigest, ...]:
        """The state that the slot of `step` holds, which is what is made durable: name, place and
        hash of every local tensor.
        """
        return digests_of(self.snapshots.digests(step))

    # --- the loop --------------------------------------------------------------------------------

    def begin_steps(self) -> Step:
        """Generators last, then the first boundary."""
        order = self._present
        with self._monitor.shield():
            step = order.step or Step(0)
            if self._rng_resumed is not None:
                self._rng_resumed.apply()
            if order.source is None and not order.settings.check:
                self._begin_snapshot(step)
            account = self.account
            account.resumed = time.monotonic()
            self._monitor.send(
                RankResumed(
                    generation=order.generation,
                    rank=Rank(self.rank),
                    step=step,
                    rendezvous_s=account.formed - account.began,
                    build_s=account.built - account.formed,
                    restore_s=account.restored - account.built,
                    kept=order.keep,
                )
            )
            self.account.world_operations = self._world_operations()
        return step

    def optimizer_steps(self, name: str, optimizer: object) -> None:
        """A tracked optimizer is about to step."""
        self._gradients.before_step(name, optimizer)

    def _gradients_kept(self, topic: str, text: str) -> None:
        if self.rank == 0:  # all ranks run the same loop
            self.note(topic, text)

    @property
    def loop_left(self) -> bool:
        """Whether the state that was restored is that of a loop that was left early."""
        return self.kept.tracked is not None and self.kept.tracked.tree.loop_left

    def turn_left(self, step: Step) -> Step:
        """The loop was left within a turn; it counts if an optimizer has stepped in it."""
        assert self.kept.tracked is not None, "steps begin after track"
        if not self.snapshots.has_stepped:
            return step
        self.kept.tracked.tree.loop_left = True
        return Step(step + 1)

    def turn_began(self, step: Step) -> None:
        """Tell the watch; the place where boundary faults strike."""
        self.snapshots.has_stepped = False
        account = self.account
        first = account.turns == 0
        now = time.monotonic()
        turn_s = None if first else now - account.turn_began - account.sections_s
        phase = FIRST_TURN if first else TURN
        if turn_s is None or account.turns == 1:
            self.snapshots.cost.drop_turn()
        else:
            self.snapshots.cost.turn(turn_s, copying=account.is_copying)
        account.turn_began, account.sections_s = now, 0.0
        account.is_copying = self.snapshots.is_copying
        self.device.progress.tell(
            PhaseBegan(generation=self._present.generation, step=step, phase=phase, turn_s=turn_s)
        )
        self._monitor.check()
        self.faults.reach("boundary", step)

    def turn_ended(self, step: Step, *, is_last: bool) -> None:
        """The boundary: bound how far ranks drift, snapshot, account."""
        order = self._present
        self._monitor.check()
        self._bound_drift()
        if order.settings.check:
            self._end_check()
        with self._monitor.shield():
            assert self.kept.tracked is not None, "steps begin after track"
            self._gradients.turn_ended(self.kept.tracked.optimizers)
            interval = order.settings.snapshot_interval_steps
            if is_last or step % interval == 0:
                self._begin_snapshot(step, whole=is_last)
            account = self.account
            if account.turns == 0:
                self.device.progress.tell(
                    FirstStepDone(
                        generation=order.generation,
                        rank=Rank(self.rank),
                        step=step,
                        seconds=time.monotonic() - account.resumed,
                    )
                )
            account.turns += 1
            self.kept.step = step

    def _end_check(self) -> NoReturn:
        """Say what would be kept of the turn that is whole, and wait for the end of the job."""
        seconds = time.monotonic() - self.account.resumed
        with self._monitor.shield():
            assert self.groups is not None, "inside a generation"
            backend = self.groups.backend.spec
            self._monitor.send(what_is_kept(self.kept, self._present, backend, seconds, self._fit))
        while True:
            self._monitor.check()
            time.sleep(_CHECKED_POLL_S)

    def _bound_drift(self) -> None:
        """No rank may be two steps ahead of another, or their slots would hold no common step.

        A model that is sharded over the whole world and ran in this turn waits for all ranks by
        itself. Nothing else is known to: a broadcast or a send lets ranks run on.
        """
        if self.world_size == 1:
            return
        tracked = self.kept.tracked
        assert tracked is not None, "steps begin after track"
        operations = self._world_operations()
        ran = operations > self.account.world_operations
        if not ran or not torch_private.spans_world(tracked.modules, self.world_size):
            dist.barrier()
        self.account.world_operations = self._world_operations()

    def _world_operations(self) -> int:
        assert self.groups is not None, "inside a generation"
        return self.groups.progress().world_operations

    def steps_ended(self, step: Step) -> None:
        """What follows the loop has a limit of its own."""
        if self._monitor.must_leave:
            return
        phase = PhaseBegan(generation=self._present.generation, step=step, phase=_CLOSING)
        self.device.progress.tell(phase)
        cost = self.snapshots.cost.words(self._present.settings.snapshot_interval_steps)
        if self.rank == 0 and cost is not None:
            self.note("snapshot cost", cost)

    def section_began(self, name: str) -> None:
        """A named phase."""
        self._monitor.check()
        with self._monitor.shield():
            self.snapshots.try_seal()
        generation, step = self._present.generation, self.kept.step
        phase = PhaseBegan(generation=generation, step=step, phase=f"section:{name}")
        self.device.progress.tell(phase)

    def section_ended(self, name: str, seconds: float) -> None:
        """It is over."""
        self.account.sections_s += seconds
        generation, step = self._present.generation, self.kept.step
        phase = f"section:{name}"
        self.device.progress.tell(
            PhaseEnded(generation=generation, step=step, phase=phase, seconds=seconds)
        )
        self._monitor.check()

    def logged(self, step: Step, values: Mapping[str, float | int | str | bool]) -> None:
        """Hand a turn's values on."""
        logged = LoggedStep(step=step, values=dict(values))
        self._monitor.send(RankLogged(generation=self._present.generation, logged=logged))

    def note(self, topic: str, text: str) -> None:
        """Something worth an event."""
        self._monitor.send(RankNoted(topic=topic, text=text))
