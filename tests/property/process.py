"""One rank's process: the real rank machine, and a main thread that follows a script.

The script: import, wait for an order, form, restore, turns (compute, collective, snapshot), return.
It leaves as the real one does: at safe points, by the collective's error, or by the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepfast.core import rank as rank_machine
from stepfast.core.faults import ErrorClass, ExceptionReport, Whereabouts
from stepfast.core.messages import (
    AboutPins,
    FirstStepDone,
    LoggedStep,
    PhaseBegan,
    ProbeAnswer,
    RankFinish,
    RankLeave,
    RankLogged,
    RankProbe,
    RankResumed,
    RankSealed,
    RankSkipped,
    RankStart,
    TensorDigest,
)
from stepfast.core.outputs import (
    AbortGroups,
    EndProcess,
    Output,
    ReleaseMain,
    SendToAgent,
    SignalMain,
)
from stepfast.core.rank import (
    MainEntered,
    MainInterrupted,
    MainQuiet,
    MainRaised,
    MainReturned,
    Ordered,
    Place,
    ProcessState,
    RankTick,
)
from stepfast.core.terms import Generation, Rank, SnapshotId, Step
from stepfast.core.timeouts import FIRST_TURN, TURN
from stepfast.runtime.driver import Driver
from stepfast.train.pins import Claim, Pins

if TYPE_CHECKING:
    from property.world import Agent, World

SLOTS_PER_RANK = 2
SLOTS_WITH_OVERLAP = 3


def error_report(error_class: ErrorClass, frame: str = "train.py:7") -> ExceptionReport:
    """What a rank says about an exception."""
    return ExceptionReport(
        type="Error", message="why", traceback="", frame=frame, error_class=error_class
    )


class Group:
    """The process groups of one generation at one store; its one collective is a barrier."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.waiting: list[tuple[Process, Callable[[], None]]] = []
        self.broken = False

    def join(self, process: Process, then: Callable[[], None]) -> None:
        """Wait for all; `then` runs when they are there."""
        if self.broken:
            process.after(0.002, process.collective_failed)
            return
        self.waiting.append((process, then))
        if len(self.waiting) == self.world_size:
            done, self.waiting = self.waiting, []
            for member, go_on in done:
                member.after(member.world.delay(0.0001, 0.002), go_on)

    def break_up(self) -> None:
        """A member is gone: whoever waits or comes gets an error."""
        self.broken = True
        waiting, self.waiting = self.waiting, []
        for member, _ in waiting:
            member.after(member.world.delay(0.001, 0.008), member.collective_failed)


class Process:
    """One process from its fork to its end."""

    def __init__(self, world: World, agent: Agent, rank: Rank, incarnation: int) -> None:
        self.world, self.agent = world, agent
        self.rank, self.incarnation = rank, incarnation
        self.pid = world.next_pid()
        self.is_alive, self.is_stopped = True, False
        self.holds_gil, self.hangs, self.raises = False, False, None
        self.holds_graph = False  # its next way out of a generation is its last
        self.is_deaf = False  # the signal does not reach the main thread
        self.step, self.turns, self.group = Step(0), 0, None
        self.orders: list[Any] = []
        self.waits_for_order = False
        self.where = Whereabouts.USER
        self.epoch = 0  # what the main thread had planned before is void
        self.state_of_step: tuple[int, ...] = ()
        self.pins = Pins()
        self.staged: tuple[SnapshotId, Claim] | None = None  # copied beside the turn
        self.was_void = False
        self.up: list[Any] = []
        self.down_at = 0.0
        state = ProcessState(pid=self.pid, interrupt_grace_s=0.03)
        self.driver: Driver[ProcessState, Any] = Driver(rank_machine.step, state, self, world)
        self.after(world.delay(0.01, 0.15), self._enter)

    @property
    def is_numb(self) -> bool:
        """Whether nothing happens in it."""
        return not self.is_alive or self.is_stopped or self.holds_gil

    @property
    def place(self) -> Place:
        return self.driver.state.place

    def feed(self, given: Any) -> None:
        if self.is_alive:
            self.driver.feed(given)
            self._arm()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """The main thread does this next, unless it is somewhere else by then."""
        self.epoch += 1
        epoch = self.epoch

        def run() -> None:
            if not self.is_numb and epoch == self.epoch:
                do()

        self.world.at(seconds, run)

    def _arm(self) -> None:
        deadline = rank_machine.next_deadline(self.driver.state)
        if deadline is not None and self.is_alive:
            wait_s = max(0.001, deadline - self.world.now)
            self.world.at(wait_s, lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        still = rank_machine.next_deadline(self.driver.state) == deadline
        if still and not self.is_numb:
            self.feed(RankTick())

    # --- the link to the agent -------------------------------------------------------------------

    def link_down(self, message: Any) -> None:
        at = max(self.down_at, self.world.now + self.world.delay(0.0001, 0.001))
        self.down_at = at
        self.world.at_time(at, lambda: self._hear(message))

    def _hear(self, message: Any) -> None:
        if self.is_numb:
            return
        if isinstance(message, RankStart | AboutPins):
            self.pins.hear(message)
        if isinstance(message, AboutPins):
            return
        if not isinstance(message, RankProbe):
            self.feed(Ordered(message))
            return
        answer = ProbeAnswer(
            probe=message.probe,
            whereabouts=self.where,
            seconds_there=0.0,
            collectives=self.turns,
            stack="",
        )
        self._send(answer)

    def _send(self, message: Any) -> None:
        self.up.append(message)
        self.world.at(self.world.delay(0.0001, 0.001), self._deliver)

    def _deliver(self) -> None:
        if self.up and self.agent.is_alive:
            self.agent.from_rank(self, self.up.pop(0))

    def perform(self, output: Output) -> None:
        match output:
            case SendToAgent(message):
                self._send(message)
            case AbortGroups():
                self._abort()
            case SignalMain():
                if self.where is Whereabouts.USER and not self.is_deaf:
                    self.hangs = False
                    self.after(0.0005, lambda: self._leave(MainInterrupted()))
            case ReleaseMain(order):
                self.orders.append(order)
                if self.waits_for_order:
                    self.after(0.0005, self._take_order)
            case EndProcess(exit_code):
                self.end(exit_code=exit_code, signal=None)
            case _:
                raise AssertionError(f"not a rank's output: {output}")

    def _abort(self) -> None:
        if self.group is not None:
            self.group.break_up()

    # --- its end ---------------------------------------------------------------------------------

    def end(self, *, exit_code: int | None, signal: int | None, is_told: bool = True) -> None:
        """The process is no more; what it had said arrives before that."""
        if not self.is_alive:
            return
        self.is_alive = False
        if self.group is not None:
            self.group.break_up()
        if is_told:
            self.world.at(
                self.world.delay(0.0005, 0.005), lambda: self._tell_end(exit_code, signal)
            )

    def _tell_end(self, exit_code: int | None, signal: int | None) -> None:
        while self.up:
            self._deliver()
        self.agent.rank_ended(self, exit_code, signal)

    # --- the main thread -------------------------------------------------------------------------

    def _enter(self) -> None:
        self.feed(MainEntered())
        self._wait_for_order()

    def _wait_for_order(self) -> None:
        self.waits_for_order = True
        if self.orders:
            self.after(0.0005, self._take_order)

    def _take_order(self) -> None:
        self.waits_for_order = False
        order = self.orders.pop(0)
        match order:
            case RankFinish(finished=finished):
                code = 0 if finished else 1
                self.after(self.world.delay(0, 0.05), lambda: self.end(exit_code=code, signal=None))
            case RankLeave():
                self._dissolve()
            case RankStart():
                self._form(order)

    def _form(self, order: RankStart) -> None:
        self.order, self.turns, self.staged = order, 0, None
        self.step = order.step or Step(0)
        self.world.watcher.entered(self, order)
        groups = self.world.groups
        key = (order.generation, order.store_port)
        self.group = groups.setdefault(key, Group(order.world_size))
        self.where = Whereabouts.COLLECTIVE
        self.group.join(self, self._restore)
        epoch = self.epoch
        self.world.at(self.world.timeouts.forming_limit_s, lambda: self._forming_late(epoch))

    def _forming_late(self, epoch: int) -> None:
        still = self.epoch == epoch and self.where is Whereabouts.COLLECTIVE
        if still and not self.is_numb and self.turns == 0 and self.group is not None:
            self.group.break_up()

    def _restore(self) -> None:
        self.where = Whereabouts.USER
        self.after(self.world.delay(0.001, 0.03), self._begin_steps)

    def _begin_steps(self) -> None:
        if self._leaves_at_safe_point():
            return
        order = self.order
        held = self.world.slots[self.rank]
        if order.source is not None:
            self.state_of_step = self.world.watcher.restored(self, order.source)
        if order.checkpoint is not None:
            self.state_of_step = self.world.store.committed[order.checkpoint][self.rank]
        if order.step is not None:
            for snapshot in [s for s in held if _is_void(s, order)]:
                del held[snapshot]
        if order.source is None:
            if order.checkpoint is None:
                self.state_of_step = ()
            self._seal(self.step)
        resumed = RankResumed(
            generation=order.generation,
            rank=self.rank,
            step=self.step,
            rendezvous_s=0.0,
            build_s=0.0,
            restore_s=0.0,
            kept=order.keep,
        )
        self._send(resumed)
        self._turn()

    def _turn(self) -> None:
        if self.step >= self.world.shape.steps:
            self._return()
            return
        phase = TURN if self.turns else FIRST_TURN
        turn_s = 0.02 if self.turns else None
        self._send(
            PhaseBegan(generation=self._generation, step=self.step, phase=phase, turn_s=turn_s)
        )
        if self._leaves_at_safe_point():
            return
        self.where = Whereabouts.USER
        self.after(self.world.delay(0.005, 0.03), self._collective)

    def _collective(self) -> None:
        if self.hangs:
            self.after(0.05, self._collective)  # sleeps for ever, unless it is interrupted
            return
        if self._leaves_at_safe_point():
            return
        if self.raises is not None:
            error, self.raises = self.raises, None
            self._leave(MainRaised(self.step, error))
            return
        self.where = Whereabouts.COLLECTIVE
        assert self.group is not None, "a turn runs in a group"
        self.group.join(self, self._boundary)

    def _boundary(self) -> None:
        """The optimizer has stepped; the oldest slot is taken, sealed when the copy is whole."""
        self.where = Whereabouts.USER
        if self._leaves_at_safe_point():
            return
        self._fence()
        self._free_a_slot()
        self.after(self.world.delay(0.0005, 0.004), self._turn_ended)

    def _free_a_slot(self) -> None:
        held = self.world.slots[self.rank]
        overlaps = self.world.shape.void_share > 0
        slots = SLOTS_WITH_OVERLAP if overlaps else SLOTS_PER_RANK
        slots += 1 if self.order.settings.checkpoints.url else 0
        while len(held) >= slots:
            free = set(held) - {max(held)} - self.pins.held()
            del held[min(free)]

    def _turn_ended(self) -> None:
        self.step = Step(self.step + 1)
        self.state_of_step = (*self.state_of_step, self._generation)
        self._take(self.step)
        if self.turns == 0:
            done = FirstStepDone(
                generation=self._generation, rank=self.rank, step=self.step, seconds=0.02
            )
            self._send(done)
        self.turns += 1
        if self.rank == 0:
            logged = LoggedStep(step=self.step, values={})
            self._send(RankLogged(generation=self._generation, logged=logged))
        self._turn()

    def _take(self, step: Step) -> None:
        """Whole at the boundary; with overlap it is sealed before the next optimizer's step."""
        is_whole = self.was_void or step >= self.world.shape.steps
        if self.world.shape.void_share == 0 or is_whole:
            self.was_void = False
            self._seal(step)
        else:
            snapshot = SnapshotId(self._generation, step)
            self.staged = (snapshot, self._claim(snapshot))

    def _fence(self) -> None:
        """What is staged is whole: sealed, unless a tensor changed under the copy."""
        if self.staged is None:
            return
        if self.world.random.random() < self.world.shape.void_share:
            self.staged, self.was_void = None, True
        else:
            self._settle()

    def _settle(self) -> None:
        if self.staged is not None:
            snapshot, claim = self.staged
            self.staged = None
            self._put(snapshot, claim)

    def _seal(self, step: Step) -> None:
        snapshot = SnapshotId(self._generation, step)
        self._put(snapshot, self._claim(snapshot))

    def _claim(self, snapshot: SnapshotId) -> Claim:
        for late in self.pins.passed(snapshot.step):
            missed = SnapshotId(self._generation, late)
            self._send(RankSkipped(snapshot=missed, reason="late", is_late=True))
        if (void := self.pins.drop_unsealed()) is not None:
            self._send(RankSkipped(snapshot=void, reason="void"))
        claim = self.pins.claim(snapshot)
        if claim is Claim.BUSY and snapshot.step < self.world.shape.steps:
            self._send(RankSkipped(snapshot=snapshot, reason="busy"))
        return claim

    def _put(self, snapshot: SnapshotId, claim: Claim) -> None:
        self.world.slots[self.rank][snapshot] = self.state_of_step
        if claim is Claim.PINNED and self.pins.seal(snapshot):
            self._send(RankSealed(snapshot=snapshot))
        self.world.watcher.sealed(self.rank, snapshot.step)

    def _return(self) -> None:
        digest = TensorDigest(f"weight-{self.rank}", (0,), "same")
        self.feed(MainReturned(step=self.step, digests=(digest,)))
        self.after(0.0002, self._after_return)  # an order to leave may come in between

    def _after_return(self) -> None:
        if self.place is Place.LEAVING:
            self._dissolve()
        else:
            self._wait_for_order()

    # --- leaving ---------------------------------------------------------------------------------

    @property
    def _generation(self) -> Generation:
        return self.order.generation

    def _leaves_at_safe_point(self) -> bool:
        if self.place is not Place.LEAVING:
            return False
        self._leave(MainInterrupted())
        return True

    def collective_failed(self) -> None:
        """The collective's error rises in the main thread."""
        if self.place is Place.LEAVING and self.world.random.random() < 0.5:
            self._leave(MainInterrupted())
        else:
            self._leave(MainRaised(self.step, error_report(ErrorClass.COLLECTIVE)))

    def _leave(self, outcome: Any) -> None:
        self.where = Whereabouts.USER
        self.feed(outcome)
        self._dissolve()

    def _dissolve(self) -> None:
        self._settle()
        if self.group is not None:
            self.group.break_up()
            self.group = None
        self.is_deaf = True
        self.after(self.world.delay(0.001, 0.02), self._quiet)

    def _quiet(self) -> None:
        self.is_deaf = False
        unusable = "a graph of its own" if self.holds_graph else None
        self.feed(MainQuiet(keep_obstacle=None, build_has_collectives=False, unusable=unusable))
        self._wait_for_order()


def _is_void(snapshot: SnapshotId, order: RankStart) -> bool:
    assert order.step is not None, "asked only where the generation has a step"
    return snapshot.step > order.step and snapshot.generation < order.generation
