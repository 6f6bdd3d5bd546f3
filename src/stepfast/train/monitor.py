"""The monitor thread: hears the agent, wakes the main thread, and ends the process when nobody is
left to.

Owns: the rank machine's driver, the signal that raises `Interrupted`, the flag that says "leave".
Does not own: process groups (`train.groups`) or the loop (`train.session`). Invariants:
`Interrupted` rises only in user code, never in a shielded part of stepfast; the flag is set before
anything is aborted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stepfast.core import rank as rank_machine
from stepfast.core.messages import (
    AboutPins,
    FromRank,
    ProbeAnswer,
    RankFinish,
    RankLeave,
    RankProbe,
    RankStart,
)
from stepfast.core.outputs import (
    AbortGroups,
    EndProcess,
    Output,
    ReleaseMain,
    SendToAgent,
    SignalMain,
)
from stepfast.core.rank import Place, ProcessState, RankInput
from stepfast.errors import EXIT_TRY_AGAIN, Interrupted
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.descendants import ProcessTable, try_signal
from stepfast.runtime.driver import Driver
from stepfast.train.link import AgentLink
from stepfast.train.progress import Progress

INTERRUPT_SIGNAL = signal.SIGRTMIN + 7  # a real-time signal: no library here or known to us uses it
_POLL_LIMIT_S = 5.0
_OWN_DIRECTORY = os.path.dirname(__file__)

Order = RankStart | RankLeave | RankFinish


class Monitor:
    """One per process. The main thread calls `feed`, `wait_for_order`, `check`, `shield`,
    `user_code`.
    """

    def __init__(
        self,
        link: AgentLink,
        *,
        interrupt_grace_s: float,
        answer_probe: Callable[[int], ProbeAnswer],
        hear_pin: Callable[[RankStart | AboutPins], None],
    ) -> None:
        """Make the machine; nothing runs before `start`."""
        self._link = link
        self._answer_probe = answer_probe
        self._hear_pin = hear_pin
        self._abort: Callable[[], object] = lambda: None
        self._progress: Progress | None = None
        self._orders: list[Order] = []
        self._lock = threading.RLock()
        self._released = threading.Condition(self._lock)
        state = ProcessState(pid=os.getpid(), interrupt_grace_s=interrupt_grace_s)
        self._driver: Driver[ProcessState, RankInput] = Driver(
            rank_machine.step, state, self, SystemClock()
        )
        self._main_ident = threading.main_thread().ident
        self._armed = False  # whether the main thread runs user code
        # Where `Interrupted` rose, until the wrapper saw it; where it rose before it rose again.
        self._delivered_at: str | None = None
        self._swallowed_at: str | None = None
        self._thread = threading.Thread(target=self._run, name="stepfast-monitor", daemon=True)

    def start(self) -> None:
        """Install the signal's handler (main thread only) and begin to listen."""
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)
        self._thread.start()

    def set_abort(self, abort: Callable[[], object]) -> None:
        """What wakes the pending collectives of the present generation; safe from any thread, safe
        to repeat.
        """
        self._abort = abort

    def watch(self, progress: Progress) -> None:
        """Ask the device about `progress` now and then; before `start`."""
        self._progress = progress

    # --- the main thread's side ------------------------------------------------------------------

    def feed(self, given: RankInput) -> None:
        """One step of the rank's machine."""
        with self._lock:
            self._driver.feed(given)
        self._link.wake()  # the next deadline may have changed

    def send(self, message: FromRank) -> None:
        """A message that decides nothing: phases, logs, notes."""
        self._link.send(message)

    def wait_for_order(self) -> Order:
        """Block until the machine releases the main thread."""
        with self._released:
            while not self._orders:
                self._released.wait()  # ended by an order, or by the end of the process
            return self._orders.pop(0)

    @property
    def must_leave(self) -> bool:
        """Whether the present generation is over."""
        return self._driver.state.place is Place.LEAVING

    def check(self) -> None:
        """A safe point: raise `Interrupted` where the generation is over."""
        if self.must_leave:
            self._note_if_swallowed()
            self._delivered_at = _where(sys._getframe(1))
            raise Interrupted

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Code that must not be torn apart by the signal; what came meanwhile rises at its end."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed
        if armed:
            self.check()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Code of the user's: `Interrupted` may rise anywhere in it."""
        armed, self._armed = self._armed, True
        try:
            yield
        finally:
            self._armed = armed

    def take_swallowed(self, *, arrived: bool) -> str | None:
        """Where `Interrupted` rose and user code went on all the same; None where it never did.

        `arrived`: it has come out of the user's function this time.
        """
        if not arrived:
            self._note_if_swallowed()
        where, self._swallowed_at, self._delivered_at = self._swallowed_at, None, None
        return where

    def _note_if_swallowed(self) -> None:
        unwinding = isinstance(sys.exc_info()[1], Interrupted)  # in a `finally` on its way out
        if self._delivered_at is not None and not unwinding:
            self._swallowed_at = self._delivered_at

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Between two lines of stepfast's own an exception could leave half of something done; the
        # signal comes again in a moment.
        if not self._armed or not self.must_leave or frame is None or _is_own(frame):
            return
        self._note_if_swallowed()
        self._delivered_at = _where(frame)
        raise Interrupted

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """A rank that hears nobody is worse than a dead one: whatever fails here ends the
        process.
        """
        try:
            self._hear_for_ever()
        finally:
            # Only an exception leads here; the interpreter's hook shows it once the thread is left.
            traceback.print_exc()
            self._end_process(EXIT_TRY_AGAIN)

    def _hear_for_ever(self) -> None:
        poller = select.poll()
        poller.register(self._link.wake_fd, select.POLLIN)
        while True:
            events = select.POLLIN | (select.POLLOUT if self._link.has_backlog else 0)
            poller.register(self._link.socket_fd, events)
            poller.poll(self._poll_ms())
            self._link.clear_wake()
            self._link.flush()
            try:
                self._hear()
            except EOFError:
                self.feed(rank_machine.AgentLost())
            with self._lock:
                self._driver.feed(rank_machine.RankTick())
            if self._progress is not None:
                self._progress.look()

    def _poll_ms(self) -> int:
        deadline = rank_machine.next_deadline(self._driver.state)
        wait_s = _POLL_LIMIT_S if deadline is None else max(0.0, deadline - time.monotonic())
        device_s = self._progress.poll_interval_s if self._progress is not None else None
        limit_s = _POLL_LIMIT_S if device_s is None else device_s
        return min(int(wait_s * 1000) + 1, int(limit_s * 1000))

    def _hear(self) -> None:
        while (message := self._link.receive()) is not None:
            if isinstance(message, RankProbe):
                self._link.send(self._answer_probe(message.probe))
            elif isinstance(message, AboutPins):
                self._hear_pin(message)
            else:
                if isinstance(message, RankStart):
                    self._hear_pin(message)  # here, in the order of what lets the pins go
                with self._lock:
                    self._driver.feed(rank_machine.Ordered(message))

    # --- the machine's hands ---------------------------------------------------------------------

    def perform(self, output: Output) -> None:
        """Carry out one order of the rank's machine."""
        match output:
            case SendToAgent(message):
                self._link.send(message)
            case AbortGroups():
                self._abort()
            case SignalMain():
                assert self._main_ident is not None, "the main thread has an ident"
                signal.pthread_kill(self._main_ident, INTERRUPT_SIGNAL)
            case ReleaseMain(order):
                self._orders.append(order)
                self._released.notify_all()
            case EndProcess(exit_code):
                self._end_process(exit_code)
            case _:
                raise AssertionError(f"not a rank's output: {output}")

    def _end_process(self, exit_code: int) -> None:
        """With everything that was started from here, and no code of the user's on the way out."""
        self._link.flush()
        for entry in ProcessTable.read().descendants(os.getpid()):
            try_signal(entry.id, signal.SIGKILL)
        os._exit(exit_code)


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_OWN_DIRECTORY) or file == contextlib.__file__
