"""What a person sees while a job runs: one line for each event that matters, and a progress line.

Owns: words. Does not own: where the lines go (the shells print them).
"""

from __future__ import annotations

from collections.abc import Mapping

from stepfast.core.objectives import RECOVERY
from stepfast.core.quantities import counted, numbered, size_text
from stepfast.events import (
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRejected,
    CheckpointsVanished,
    DecisionMade,
    Event,
    FaultSeen,
    GenerationOpened,
    JobEnded,
    JobOpened,
    NodeChecked,
    NodeLeft,
    Note,
    Recovered,
    SloBreached,
)

# A line that begins with this is a progress line: `stepfast run` shows the newest one in place on a
# terminal.
PROGRESS_MARK = "\x1e"
# A line that begins with this is shown after everything else of the job.
LAST_WORDS_MARK = "\x1d"


def line_of(event: Event) -> str | None:
    """The event in one line, or None where it is not for people."""
    match event:
        case JobOpened():
            ranks = f"{event.nodes} x {counted(event.nproc_per_node, 'rank')}"
            return f"job {event.job_id}: {event.script} on {ranks}"
        case NodeLeft():
            return f"node {event.node} left: {event.reason}"
        case NodeChecked(verdict="healthy"):
            return None
        case NodeChecked():
            told = [
                f"{f.check}: {f.evidence}" for f in event.findings if f.verdict == event.verdict
            ]
            what = "was not wholly looked at" if event.admitted else "is unfit and stays out"
            return f"node {event.node} {what}: {_first_line('; '.join(told))}"
        case FaultSeen():
            also = " (collateral)" if event.collateral else ""
            reason = _first_line(event.reason)
            reason = reason[:_COLLATERAL_CHARS_MAX] if event.collateral else reason
            return f"fault at step {event.step}: {event.kind}{also}: {reason}"
        case DecisionMade():
            return f"decision: {event.action} ({_first_line(event.reason)})"
        case GenerationOpened():
            at = "the beginning" if event.step is None else f"step {event.step}"
            source = ", from a checkpoint" if event.source == "checkpoint" else ""
            return f"generation {event.generation} opens at {at}{source}"
        case CheckpointCommitted():
            return f"checkpoint of step {event.step} committed: {size_text(event.size_bytes)}"
        case CheckpointLost():
            reason = _first_line(event.reason)
            return f"no checkpoint of step {event.step}: {reason}"
        case CheckpointsVanished():
            return (
                f"checkpoints vanished: {numbered('step', event.steps)} not in {event.url} any more"
                " (deleted or renamed, or what was mounted there is not); new ones go there"
            )
        case CheckpointRejected():
            return f"checkpoint of step {event.step} cannot be used: {_first_line(event.reason)}"
        case Recovered():
            phases = ", ".join(
                f"{name} {getattr(event, name + '_s') * 1000:.0f}"
                for name in ("interrupt", "respawn", "rendezvous", "build", "restore", "first_step")
            )
            return (
                f"recovered from {event.kind} of rank {event.rank} in {event.total_s * 1000:.0f} ms"
                f" ({phases} ms), {counted(event.steps_lost, 'step')} lost, at step"
                f" {event.resumed_step}"
            )
        case SloBreached():
            unit = "s" if event.objective == RECOVERY else "steps"
            return (
                f"objective missed: {event.objective} is {event.limit:g}, and the recovery from"
                f" {event.kind} took {event.value:.3g} {unit}"
            )
        case Note(topic=topic, text=text):
            where = "" if event.rank is None else f" (rank {event.rank})"
            return f"{topic}{where}: {_first_line(text)}"
        case JobEnded(status="finished"):
            return f"job finished at step {event.steps}, state {event.final_digest}"
        case JobEnded():
            # Which step it is, is known when what memory holds has been made durable.
            return f"job {event.status}: {_first_line(event.reason)}"
    return None


class Lines:
    """The lines of one job's events: what was said at length is not said at length again."""

    def __init__(self) -> None:
        """Nothing said yet."""
        self._said: list[str] = []

    def line_of(self, event: Event) -> str | None:
        """The event in one line; of a fault's long reason, from the second time on, its begin."""
        line = line_of(event)
        if line is None:
            return None
        for text in self._said:
            line = line.replace(text, f"{text[:_AGAIN_CHARS]}... (as above)")
        if isinstance(event, FaultSeen):
            reason = _first_line(event.reason)
            _, colon, after = reason.partition(": ")  # the same from any rank
            text = after if colon and reason.startswith("rank ") else reason
            if len(text) >= _LONG_CHARS and text in line:
                self._said.append(text)
        return line


_LONG_CHARS = 160  # of a reason, from which on it is not repeated
_AGAIN_CHARS = 70
_COLLATERAL_CHARS_MAX = 80  # a victim's words explain nothing


class Progress:
    """The progress line's numbers."""

    def __init__(self) -> None:
        """Nothing known yet."""
        self._step = 0
        self._rate: float | None = None  # until there is one
        self._marked: tuple[float, int] | None = None
        self._values: Mapping[str, float | int | str | bool] = {}
        self._last_recovery = ""

    def take(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case Recovered():
                self._last_recovery = f", last recovery {event.kind} {event.total_s * 1000:.0f} ms"
        values = getattr(event, "values", None)
        if isinstance(values, Mapping):
            self._values = values

    def at_step(self, step: int, now: float) -> None:
        """Learn how far the job is."""
        is_still = self._rate is None and self._marked is not None and step == self._marked[1]
        if self._marked is None or step < self._marked[1] or is_still:
            self._marked = (now, step)
        elif now - self._marked[0] >= 2.0:
            self._rate = (step - self._marked[1]) / (now - self._marked[0])
            self._marked = (now, step)
        self._step = step

    def line(self, generation: int) -> str:
        """The progress in one line."""
        words = [f"step {self._step}", *(f"{k}={_short(v)}" for k, v in self._values.items())]
        if self._rate is not None:
            words.append(f"{self._rate:.1f} steps/s")
        return " ".join([*words, f"generation {generation}{self._last_recovery}"])


def _short(value: float | int | str | bool) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
