"""A rank's device through its generations: entered, watched, left, and what is wrong with it told.

Owns: the one `Accelerator` of the process, its progress, when its unused memory is given back.
Does not own: the calls (`device`), what becomes of a rank that cannot go on (`core`).

Never run on a GPU: tested with a double of `torch.cuda` (tests/fakes/device.py).

Invariant: after `leave` returned None nothing of the generation is queued any more on the stream
that trained, nor what that stream waits for. Other streams of the user's own are not asked.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stepfast.core.faults import ErrorClass, ExceptionReport
from stepfast.core.messages import FromRank, RankRaised, RankStart
from stepfast.core.terms import Step
from stepfast.runtime.ports import Accelerator
from stepfast.train.device import SETTLE_LIMIT_S, device_of, first_line
from stepfast.train.progress import Progress
from stepfast.train.report import report_of


class RankDevice:
    """One object for the process."""

    def __init__(
        self,
        send: Callable[[FromRank], object],
        present_step: Callable[[], Step],
        make: Callable[[str, int], Accelerator] = device_of,
    ) -> None:
        """Nowhere yet. `make` is given the type of device and the rank's number on its node."""
        self.progress = Progress(send, on_broken=self._broke)
        self.ran_out_of_memory = False  # in the present generation
        self._send, self._present_step, self._make = send, present_step, make
        self._accelerator: Accelerator | None = None
        self._order: RankStart | None = None

    def enter(self, order: RankStart) -> None:
        """A generation begins; the device is this thread's. ConfigError where the rank has none."""
        self._order, self.ran_out_of_memory = order, False
        if self._accelerator is None:
            self._accelerator = self._make(order.settings.device, order.local_rank)
        self._accelerator.enter()
        self.progress.begin(self._accelerator)

    def enter_thread(self) -> None:
        """The device is the calling thread's too."""
        assert self._accelerator is not None, "inside a generation"
        self._accelerator.enter()

    def leave(self) -> str | None:
        """The generation is over, its groups are gone: wait, for a limited time, until nothing is
        queued where it trained. Why this process can be in no other generation, or None.
        """
        if self._accelerator is None:
            return None
        return self._accelerator.settle(SETTLE_LIMIT_S) or self._accelerator.obstacle()

    def free_memory(self, *, is_built_again: bool) -> str | None:
        """Where that helps: what is built again would find its room taken by what it was, and
        memory that ran out may only have been cut into pieces. A model that is kept needs the same
        pieces again. Returns as `leave` does.
        """
        if self._accelerator is None or not (is_built_again or self.ran_out_of_memory):
            return None
        try:
            self._accelerator.free_unused()
        except RuntimeError as error:
            return f"the device is broken: {first_line(error)}"
        return None

    def raised(self, report: ExceptionReport) -> None:
        """What ended the main thread's stay."""
        self.ran_out_of_memory = report.error_class is ErrorClass.MEMORY

    def _broke(self, error: RuntimeError) -> None:
        """On whatever thread looked: the main one may meet it late, or wait for it without end."""
        if self._order is None:
            return
        report = msgspec.structs.replace(report_of(error), error_class=ErrorClass.DEVICE)
        generation, step = self._order.generation, self._present_step()
        self._send(RankRaised(generation=generation, step=step, error=report))
