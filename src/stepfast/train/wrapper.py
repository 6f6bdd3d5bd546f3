"""The resilient function's wrapper: one process's way through generations.

Owns: the main thread's loop (wait, form, restore, run, leave), snapshots at step boundaries, the
account of what each phase took. Does not own: when to leave (`core.rank`), groups, slots.
Invariants: user code runs only inside a generation; after a generation nothing of it is left: no
group, no iterator, no frame; a snapshot is taken only while the generation stands.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepfast.checkpoint.arena import Arena, invalidate, sealed_slots
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.restore import open_sealed
from stepfast.core.faults import Whereabouts
from stepfast.core.messages import (
    FirstStepDone,
    LoggedStep,
    PhaseBegan,
    PhaseEnded,
    ProbeAnswer,
    RankFinish,
    RankLeave,
    RankLogged,
    RankNoted,
    RankResumed,
    RankStart,
)
from stepfast.core.rank import (
    MainEntered,
    MainInterrupted,
    MainQuiet,
    MainRaised,
    MainReturned,
    RankInput,
)
from stepfast.core.terms import Rank, SnapshotId, Step
from stepfast.core.timeouts import FIRST_TURN, TURN, solve_timeouts
from stepfast.errors import EXIT_TRY_AGAIN, Interrupted, StateError
from stepfast.runtime.ports import FaultPoints
from stepfast.train import torch_private
from stepfast.train.groups import Groups, Membership
from stepfast.train.host import NoFaults, digests_of
from stepfast.train.kept import Kept
from stepfast.train.link import AgentLink
from stepfast.train.monitor import Monitor
from stepfast.train.report import forget_frames, report_of
from stepfast.train.rng import RngState
from stepfast.train.session import Run
from stepfast.train.whereabouts import Whereabout

_CLOSING = "section:behind the loop"
FaultsMaker = Callable[[RankStart, Callable[[str, str], None]], FaultPoints]


class RankProcess:
    """The process of one rank under an agent; implements `train.host.Host`."""

    def __init__(self, link: AgentLink, make_faults: FaultsMaker) -> None:
        """Take over the link; listens at once, enters a generation when the function is called."""
        self.kept = Kept()
        self.whereabout = Whereabout()
        self.faults: FaultPoints = NoFaults()
        self._make_faults = make_faults
        self._groups: Groups | None = None
        self._order: RankStart | None = None
        self._arena: Arena | None = None
        self._capture: Capture | None = None
        self._forming = False
        self._rng_first: RngState | None = None
        self._rng_resumed: RngState | None = None
        self._returned: Any = None
        self._account = _Account()
        grace_s = solve_timeouts(device="cpu").interrupt_grace_s
        self._monitor = Monitor(link, interrupt_grace_s=grace_s, answer_probe=self._answer_probe)
        self._monitor.start()

    # --- the loop over generations ---------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the user's function in every generation until the job is over; its last result."""
        self._rng_first = RngState.take()
        self._monitor.feed(MainEntered())
        while True:
            order = self._monitor.wait_for_order()
            match order:
                case RankFinish(finished=True):
                    self._leave_for_good()
                    return self._returned
                case RankFinish():
                    raise SystemExit(EXIT_TRY_AGAIN)
                case RankLeave():
                    self._become_quiet()
                case RankStart():
                    self._stay(order, function, args, kwargs)

    def report_script_error(self, error: BaseException) -> None:
        """The script failed outside the resilient function."""
        self._monitor.feed(MainRaised(step=self.kept.step, error=report_of(error)))

    def _stay(
        self,
        order: RankStart,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """One generation, from its start to the moment when the main thread is out."""
        outcome = self._outcome(order, function, args, kwargs)
        where = self._monitor.take_swallowed()
        if where is not None and not isinstance(outcome, MainInterrupted):
            self.note(
                "Interrupted swallowed",
                f"user code caught stepfast.Interrupted at {where}; catch Exception, not BaseException",
            )
        self._monitor.feed(outcome)
        if not isinstance(outcome, MainReturned) or self._monitor.must_leave:
            self._become_quiet()

    def _outcome(
        self,
        order: RankStart,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RankInput:
        try:
            self._enter(order)
            run = Run(self)
            with self._monitor.user_code():
                self._returned = function(run, *args, **kwargs)
            self._monitor.check()
            return MainReturned(step=run.finish(), digests=self._digests())
        except Interrupted as interrupted:
            forget_frames(interrupted)
            return MainInterrupted()
        except BaseException as error:  # noqa: BLE001 - the user's function may raise anything; it becomes a fault
            report = report_of(error, forming=self._forming)
            sys.stderr.write(report.traceback)
            forget_frames(error)
            return MainRaised(step=self.kept.step, error=report)

    def _enter(self, order: RankStart) -> None:
        """Log, environment, groups: everything before user code runs."""
        self._order = order
        self._account = _Account(began=time.monotonic())
        _redirect_output(Path(order.log_path))
        os.environ.update(_torchrun_names(order))
        threads = max(1, (os.cpu_count() or 1) // order.local_world_size)
        torch.set_num_threads(threads)
        if not order.keep:
            self._forget_built()
        self.kept.revived = []
        self.kept.step = order.step or Step(0)
        self._rng_resumed = None
        assert self._rng_first is not None, "the function was entered"
        self._rng_first.apply()
        if not self.faults.is_armed:
            self.faults = self._make_faults(order, self.note)
        self._form(order)

    def _form(self, order: RankStart) -> None:
        if self._groups is None:
            backend = "gloo" if self.device_type == "cpu" else "cpu:gloo,cuda:nccl"
            self._groups = Groups(backend)
            self._monitor.set_abort(self._groups.abort)
        settings = order.settings
        limits = solve_timeouts(
            device=settings.device,
            hang_floor_s=settings.hang_floor_s,
            hang_ceiling_s=settings.hang_ceiling_s,
            heartbeat_interval_s=settings.heartbeat_interval_s,
        )
        membership = Membership(
            generation=order.generation,
            rank=order.rank,
            world_size=order.world_size,
            store_host=order.store_host,
            store_port=order.store_port,
            forming_timeout_s=limits.forming_limit_s,
        )
        if order.generation > 1:
            with self._monitor.user_code():
                self.faults.reach("recovery", order.step or 0)
        with self._forming_groups():
            self._groups.form(membership, lambda: self._monitor.must_leave)
        self._account.formed = time.monotonic()

    @contextmanager
    def _forming_groups(self) -> Iterator[None]:
        self._forming = True
        with self.whereabout.said(Whereabouts.COLLECTIVE), self._monitor.user_code():
            yield
        self._forming = False

    def _become_quiet(self) -> None:
        """Leave nothing of the generation behind, then say so."""
        assert self._groups is not None, "quiet after a generation"
        self._forming = False
        self.kept.drop_loaders()
        self._groups.dissolve()
        torch_private.reset_modes()
        gc.collect()
        obstacle = self.kept.obstacle()
        if obstacle is not None:
            self._forget_built()
            gc.collect()
        has_collectives = self.kept.has_collectives if obstacle is None else False
        self._monitor.feed(MainQuiet(obstacle, has_collectives))

    def _forget_built(self) -> None:
        self.kept = Kept()
        self._arena = self._capture = None
        torch_private.forget_old_meshes()

    def _leave_for_good(self) -> None:
        self.kept.drop_loaders()
        if self._groups is not None:
            self._groups.dissolve()

    # --- Host: where this rank stands ------------------------------------------------------------

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
        return self._present.source is not None

    @property
    def _present(self) -> RankStart:
        assert self._order is not None, "outside of any generation"
        return self._order

    def check(self) -> None:
        """A safe point."""
        self._monitor.check()

    def shield(self) -> AbstractContextManager[None]:
        """Code that no signal may tear apart."""
        return self._monitor.shield()

    # --- Host: groups ----------------------------------------------------------------------------

    def replay_groups(self, record: Any) -> None:
        """Make recorded groups again."""
        assert self._groups is not None, "inside a generation"
        with self._forming_groups():
            self._groups.replay(record, lambda: self._monitor.must_leave)

    def recording(self) -> AbstractContextManager[object]:
        """Record the groups that are made meanwhile."""
        assert self._groups is not None, "inside a generation"
        return self._groups.recording()

    # --- Host: state -----------------------------------------------------------------------------

    def attach_state(self) -> None:
        """Restore from this rank's own slot; where the job begins, slots are only made ready."""
        order = self._present
        tracked = self.kept.tracked
        assert tracked is not None, "state is attached after track"
        directory = Path(order.slot_directory)
        with self._monitor.shield():
            self._account.built = time.monotonic()
            if order.source is not None:
                self._restore(directory, order.source)
            if order.step is not None:
                invalidate(
                    directory, newer_than_step=order.step, before_generation=order.generation
                )
            if self._capture is None:
                self._arena = Arena(directory)
                self._capture = Capture(self._arena, tracked.tree)
            self._account.restored = time.monotonic()

    def _restore(self, directory: Path, source: SnapshotId) -> None:
        tracked = self.kept.tracked
        assert tracked is not None, "restored after track"
        paths = [slot.path for slot in sealed_slots(directory) if slot.snapshot == source]
        if not paths:
            raise StateError(f"{directory}: no slot holds step {source.step} any more")
        tracked.tree.restore_from(open_sealed(Path(paths[0]), source))
        self._rng_resumed = RngState.take()

    def _take_snapshot(self, step: Step) -> None:
        assert self._capture is not None, "state is attached before the first snapshot"
        self._monitor.check()
        self._capture.take(SnapshotId(self._present.generation, step))

    def _digests(self) -> tuple[Any, ...]:
        tracked = self.kept.tracked
        return digests_of(tracked.tree.local_digests()) if tracked is not None else ()

    # --- Host: the loop --------------------------------------------------------------------------

    def begin_steps(self) -> Step:
        """Generators last, then the first boundary."""
        order = self._present
        with self._monitor.shield():
            step = order.step or Step(0)
            if self._rng_resumed is not None:
                self._rng_resumed.apply()
            if order.source is None:
                self._take_snapshot(step)
            account = self._account
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
            self._account.world_operations = self._world_operations()
        return step

    def turn_began(self, step: Step) -> None:
        """Tell the watch; the place where boundary faults strike."""
        account = self._account
        first = account.turns == 0
        now = time.monotonic()
        turn_s = None if first else now - account.turn_began - account.sections_s
        phase = FIRST_TURN if first else TURN
        account.turn_began, account.sections_s = now, 0.0
        self._monitor.send(
            PhaseBegan(generation=self._present.generation, step=step, phase=phase, turn_s=turn_s)
        )
        self._monitor.check()
        self.faults.reach("boundary", step)

    def turn_ended(self, step: Step, *, is_last: bool) -> None:
        """The boundary: bound how far ranks drift, snapshot, account."""
        order = self._present
        self._monitor.check()
        self._bound_drift()
        with self._monitor.shield():
            interval = order.settings.snapshot_interval_steps
            if is_last or step % interval == 0:
                self._take_snapshot(step)
            account = self._account
            if account.turns == 0:
                self._monitor.send(
                    FirstStepDone(
                        generation=order.generation,
                        rank=Rank(self.rank),
                        step=step,
                        seconds=time.monotonic() - account.resumed,
                    )
                )
            account.turns += 1
            self.kept.step = step

    def _bound_drift(self) -> None:
        """Where a turn had no collective over all ranks, nothing but this bounds how far ranks run apart."""
        account = self._account
        if self.world_size > 1 and self._world_operations() == account.world_operations:
            dist.barrier()
        account.world_operations = self._world_operations()

    def _world_operations(self) -> int:
        assert self._groups is not None, "inside a generation"
        return self._groups.progress().world_operations

    def steps_ended(self, step: Step) -> None:
        """What follows the loop has a limit of its own."""
        if self._monitor.must_leave:
            return
        phase = PhaseBegan(generation=self._present.generation, step=step, phase=_CLOSING)
        self._monitor.send(phase)

    def section_began(self, name: str) -> None:
        """A named phase."""
        self._monitor.check()
        generation, step = self._present.generation, self.kept.step
        phase = PhaseBegan(generation=generation, step=step, phase=f"section:{name}")
        self._monitor.send(phase)

    def section_ended(self, name: str, seconds: float) -> None:
        """It is over."""
        self._account.sections_s += seconds
        generation, step = self._present.generation, self.kept.step
        phase = f"section:{name}"
        self._monitor.send(
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

    def _answer_probe(self, probe: int) -> ProbeAnswer:
        """In the monitor thread."""
        where, seconds, stack = self.whereabout.look()
        operations = self._groups.progress().operations if self._groups is not None else 0
        return ProbeAnswer(
            probe=probe,
            whereabouts=where,
            seconds_there=seconds,
            collectives=operations,
            stack=stack,
        )


class _Account:
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
        self.world_operations = 0


def _redirect_output(path: Path) -> None:
    """Both outputs go to the generation's own file from here on; what was buffered stays in the old one."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _torchrun_names(order: RankStart) -> dict[str, str]:
    """What scripts expect of a launcher."""
    return {
        "RANK": str(order.rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": str(order.local_rank),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.node),
        "MASTER_ADDR": order.store_host,
        "MASTER_PORT": str(order.store_port),
    }
