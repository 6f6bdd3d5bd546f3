"""What a coordinator says of itself over HTTP: whether its loop turns, where the job stands.

Owns: the pages. Does not own: the numbers (`observe.metrics`), the ports that show them.
Invariant: no page waits for the event loop; a coordinator that hangs is said to hang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from stepfast.core.job_state import JobState, Phase
from stepfast.core.terms import Step
from stepfast.events import EventLine
from stepfast.observe.exposition import CONTENT_TYPE
from stepfast.observe.metrics import JobMetrics, Levels
from stepfast.runtime.ports import Clock
from stepfast.runtime.status_port import Page, alive

METRICS_PATH = "/metrics"


class JobStatus:
    """The pages of one job. Told by the loop, asked from any thread."""

    def __init__(self, log: list[EventLine], clock: Clock) -> None:
        """`log`: what happened before, in this job directory."""
        self._clock = clock
        self._metrics = JobMetrics(log)
        self._turned_at = clock.monotonic()
        self._phase = Phase.FORMING

    def take(self, line: EventLine) -> None:
        """Learn from an event."""
        self._metrics.take(line)

    def turned(self, state: JobState) -> None:
        """The loop came by, and the job stands so."""
        self._turned_at = self._clock.monotonic()
        self._phase = state.phase
        self._metrics.look(levels_of(state), self._turned_at)

    def metrics(self) -> Page:
        """For Prometheus."""
        return Page(self._metrics.page(self._clock.wall()), content_type=CONTENT_TYPE)

    def livez(self) -> Page:
        """Whether this process can do anything at all."""
        return alive(self._clock.monotonic() - self._turned_at)

    def healthz(self) -> Page:
        """Whether agents are served; never whether training gets on."""
        page = self.livez()
        if page.is_ok and self._phase is Phase.ENDED:
            return Page("the job has ended\n", is_ok=False)
        return page

    def pages(self) -> Mapping[str, Callable[[], Page]]:
        """By path."""
        return {"/livez": self.livez, "/healthz": self.healthz, METRICS_PATH: self.metrics}


def levels_of(state: JobState) -> Levels:
    """What metrics say of the job's state."""
    is_known = len(state.steps) == state.settings.world_size
    opened = Step(0) if state.start is None else state.start.step or Step(0)
    step = min(state.steps.values()) if is_known else opened
    ranks = Counter(report.state for report in state.membership.ranks.values())
    return Levels(generation=state.generation, step=step, ranks=ranks)
