"""What a `Run` needs of the process it runs in: a rank under an agent, or a plain script.

Owns: the protocol and its null twin for `python` and `torchrun`. Does not own: the rank's
(`train.wrapper`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from stepfast.core.messages import TensorDigest
from stepfast.core.terms import Step
from stepfast.runtime.ports import FaultPoints
from stepfast.train.kept import Kept
from stepfast.train.whereabouts import Whereabout

_PRINT_INTERVAL_S = 1.0


class NoFaults:
    """The fault points of a rank in which nothing is injected."""

    @property
    def is_armed(self) -> bool:
        """Never."""
        return False

    def reach(self, point: str, step: int) -> None:
        """Nothing happens here."""


class Host(Protocol):
    """The process around a run. All of it is called from the main thread."""

    kept: Kept
    whereabout: Whereabout
    faults: FaultPoints

    @property
    def rank(self) -> int:
        """This process's number in the job."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""

    @property
    def local_rank(self) -> int:
        """The rank's number on its node."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def is_resuming(self) -> bool:
        """Whether state is restored when it is tracked."""

    def check(self) -> None:
        """A safe point: raises `Interrupted` where the generation is over."""

    def shield(self) -> AbstractContextManager[None]:
        """Code of stepfast's own that no signal may tear apart."""

    def replay_groups(self, record: object) -> None:
        """Make recorded groups again in this generation."""

    def recording(self) -> AbstractContextManager[object]:
        """Record the groups that are made meanwhile."""

    def attach_state(self) -> None:
        """State is tracked now: restore it where the job resumes."""

    def begin_steps(self) -> Step:
        """The loop begins: the step at which the job stands."""

    def turn_began(self, step: Step) -> None:
        """One more turn."""

    def optimizer_steps(self, name: str, optimizer: object) -> None:
        """A tracked optimizer is about to step."""

    @property
    def loop_left(self) -> bool:
        """Whether the job goes on from a loop that was left early: no turn is to follow."""

    def turn_left(self, step: Step) -> Step:
        """The loop was left by `break` within a turn: how many steps are done."""

    def turn_ended(self, step: Step, *, is_last: bool) -> None:
        """A turn is whole; `step` steps are done."""

    def steps_ended(self, step: Step) -> None:
        """The loop is over, by its end or by `break`."""

    def section_began(self, name: str) -> None:
        """A named phase with a limit of its own."""

    def section_ended(self, name: str, seconds: float) -> None:
        """It is over."""

    def logged(self, step: Step, values: Mapping[str, float | int | str | bool]) -> None:
        """What `run.log` said of a whole turn."""

    def note(self, topic: str, text: str) -> None:
        """Something worth an event."""


class PlainHost:
    """A plain script: no agent, no recovery, the same result."""

    def __init__(self, *, rank: int, world_size: int, local_rank: int, device_type: str) -> None:
        """Where torchrun, or nobody, put this process."""
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device_type = device_type
        self.is_resuming = False
        self.kept = Kept()
        self.whereabout = Whereabout()
        self.faults: FaultPoints = NoFaults()
        self._printed_at = 0.0
        self._unprinted: Callable[[], None] | None = None

    def check(self) -> None:
        """Nobody interrupts a plain script."""

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Nothing to be shielded from."""
        yield

    def replay_groups(self, record: object) -> None:
        """Nothing is ever kept across generations here."""

    @contextmanager
    def recording(self) -> Iterator[object]:
        """Nothing is recorded."""
        yield None

    def attach_state(self) -> None:
        """Nothing to restore from."""

    def begin_steps(self) -> Step:
        """From the beginning."""
        return Step(0)

    def turn_began(self, step: Step) -> None:
        """Nobody watches."""

    def optimizer_steps(self, name: str, optimizer: object) -> None:
        """No fault drops gradients."""

    @property
    def loop_left(self) -> bool:
        """A plain script goes on from nothing."""
        return False

    def turn_left(self, step: Step) -> Step:
        """Nobody counts."""
        return step

    def turn_ended(self, step: Step, *, is_last: bool) -> None:
        """Nobody takes a snapshot."""

    def steps_ended(self, step: Step) -> None:
        """Show the last values, whenever they came."""
        if self._unprinted is not None:
            self._unprinted()

    def section_began(self, name: str) -> None:
        """Nobody watches."""

    def section_ended(self, name: str, seconds: float) -> None:
        """Nobody watches."""

    def logged(self, step: Step, values: Mapping[str, float | int | str | bool]) -> None:
        """On rank 0: one line, at most once a second."""
        if self.rank != 0:
            return
        shown = " ".join(
            f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
        )
        self._unprinted = lambda: self._print(f"step {step} {shown}")
        if time.monotonic() - self._printed_at >= _PRINT_INTERVAL_S:
            self._unprinted()

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self._unprinted = None
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def note(self, topic: str, text: str) -> None:
        """To the error stream."""
        sys.stderr.write(f"stepfast: {topic}: {text}\n")


def digests_of(rows: list[tuple[str, tuple[int, ...], str]]) -> tuple[TensorDigest, ...]:
    """The state tree's rows as a message."""
    return tuple(TensorDigest(name, offsets, digest) for name, offsets, digest in rows)
