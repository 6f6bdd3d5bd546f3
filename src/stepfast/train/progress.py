"""Signs of progress, each told when the device has come so far.

Owns: which message waits for which mark; durations as the device had them. Does not own: limits and
suspicion (`core.node_watch`), what a sign says (`train.rank_host`).

On CUDA the host queues a turn and goes on: that it has begun the next one says nothing of whether
the last one ever ends. So each sign waits behind a mark on the device's stream. The training thread
makes the mark and tells what has passed since; the monitor's thread asks now and then, for the
training thread may hang. In the loop that costs one event, one question and no wait.

Never run on a GPU: tested with a double of `torch.cuda` (tests/fakes/device.py).

Invariants: signs are told in their order. A generation that is left tells nothing more. On a CPU a
sign is told at once, as it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from stepfast.core.messages import FirstStepDone, FromRank, PhaseBegan, PhaseEnded
from stepfast.core.timeouts import TURN
from stepfast.runtime.ports import Accelerator, Mark

POLL_INTERVAL_S = 0.1
"""How often the monitor asks a device. Limits on CUDA begin at 60 s; smaller only takes the
interpreter's lock more often.
"""
TURNS_WAITING_MAX = 4
"""Turns whose marks are out. A device that is so far behind gets no more marks until one passed: an
event that is recorded into a full queue holds the host, and the interpreter's lock with it.
"""


@dataclass(slots=True, frozen=True)
class _Sign:
    mark: Mark
    message: FromRank
    at: float  # when the host was there


class Progress:
    """One object for the process; `begin` for each stay in a generation."""

    def __init__(
        self,
        send: Callable[[FromRank], object],
        *,
        on_broken: Callable[[RuntimeError], object] = lambda error: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_broken` hears once in a stay, on whatever thread, that the device fails its calls."""
        self._send, self._on_broken, self._now = send, on_broken, now
        self._device: Accelerator | None = None
        self._waiting: deque[_Sign] = deque()
        self._draining = threading.Lock()
        self._is_broken = False
        self._has_skipped = False  # a turn without a mark, since the last one with
        self._turn_at: float | None = None  # where the device began the present turn
        self._sections_s = 0.0
        self._section_at: dict[str, float] = {}

    def begin(self, device: Accelerator) -> None:
        """A stay in a generation begins."""
        self.forget()
        self._device, self._is_broken = device, False

    def forget(self) -> None:
        """The generation is left: what has not been told is told no more."""
        with self._draining:
            self._waiting.clear()
            self._turn_at, self._sections_s = None, 0.0
            self._section_at, self._has_skipped = {}, False

    @property
    def poll_interval_s(self) -> float | None:
        """How often another thread should `poll`; None: there is nothing to ask."""
        is_behind = self._device is not None and self._device.runs_behind
        return POLL_INTERVAL_S if is_behind else None

    def tell(self, message: FromRank) -> None:
        """The host is there; the message goes out when the device is. For the training thread."""
        device = self._device
        if device is None or not device.runs_behind or self._is_broken:
            self._send(message)
            return
        self.poll()
        if isinstance(message, PhaseBegan) and message.phase == TURN:
            if self._turns_waiting() >= TURNS_WAITING_MAX:
                self._has_skipped = True
                return
            if self._has_skipped:  # what lies between two marks is more than one turn
                message = msgspec.structs.replace(message, turn_s=None)
                self._has_skipped = False
        try:
            self._waiting.append(_Sign(device.mark(), message, self._now()))
        except RuntimeError as error:
            self._broke(error)

    def look(self) -> None:
        """As `poll`, for the monitor's thread: makes it one of the device's own."""
        device = self._device
        if device is None or not device.runs_behind or self._is_broken:
            return
        try:
            device.enter()
        except RuntimeError as error:
            self._broke(error)
            return
        self.poll()

    def poll(self) -> None:
        """Tell what the device has come by. From any thread; never waits, for another one that is
        just at it neither.
        """
        if not self._waiting or not self._draining.acquire(blocking=False):
            return
        try:
            self._drain()
        finally:
            self._draining.release()

    def is_device_busy(self) -> bool:
        """Whether the device is behind the host; False where it cannot be asked."""
        device = self._device
        if device is None or not device.runs_behind:
            return False
        try:
            return device.is_busy()
        except RuntimeError as error:
            self._broke(error)
            return False

    def _drain(self) -> None:
        assert self._device is not None, "what waits has marks of a device"
        try:
            while self._waiting and self._waiting[0].mark.query():
                sign = self._waiting.popleft()
                self._send(self._as_the_device_had_it(sign, self._now()))
        except RuntimeError as error:
            self._waiting.clear()
            self._broke(error)

    def _as_the_device_had_it(self, sign: _Sign, now: float) -> FromRank:
        match sign.message:
            case PhaseBegan(phase=phase) as message if phase.startswith("section:"):
                self._section_at[phase] = now
                return message
            case PhaseBegan() as message:
                turn_s = None
                if message.turn_s is not None and self._turn_at is not None:
                    turn_s = max(0.0, now - self._turn_at - self._sections_s)
                self._turn_at, self._sections_s = now, 0.0
                return msgspec.structs.replace(message, turn_s=turn_s)
            case PhaseEnded(phase=phase) as message:
                seconds = now - self._section_at.pop(phase, sign.at)
                self._sections_s += seconds
                return msgspec.structs.replace(message, seconds=seconds)
            case FirstStepDone() as message:
                return msgspec.structs.replace(message, seconds=message.seconds + now - sign.at)
            case message:
                return message

    def _turns_waiting(self) -> int:
        signs = [sign.message for sign in list(self._waiting)]
        return sum(isinstance(m, PhaseBegan) and m.phase == TURN for m in signs)

    def _broke(self, error: RuntimeError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)
