"""The coordinator's metrics: a fold of the event log, and the levels of the job's machine.

Owns: names, units and meaning of what `/metrics` of a coordinator says. Does not own: the format
(`exposition`), the port.
Invariants: what an event says is counted from the event alone, so the numbers are those of
`events.jsonl` and `summary.json`, also after the coordinator came back; one thread may ask while
another takes events in.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from stepfast.core.messages import RankState
from stepfast.core.objectives import OBJECTIVES
from stepfast.events import (
    CheckpointCommitted,
    CheckpointRejected,
    CheckpointsVanished,
    EventLine,
    FaultSeen,
    JobOpened,
    NodeChecked,
    Recovered,
    SloBreached,
)
from stepfast.observe.exposition import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Family,
    Histogram,
    Sample,
    by_label,
    page,
)

PHASES = (
    "detect",
    "interrupt",
    "respawn",
    "rendezvous",
    "build",
    "restore",
    "first_step",
    "total",
)
RECOVERY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_CHECKPOINTS_MAX = 64  # the newest; older ones are never the newest again


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Where the job stands now."""

    generation: int
    step: int  # that all ranks have completed
    ranks: Counter[RankState] = field(default_factory=Counter)


class Pace:
    """What a step takes, seen from outside: between two looks at how far somebody is."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._seen: tuple[int, int, float] | None = None

    def at(self, generation: int, step: int, now: float) -> tuple[float, int] | None:
        """Seconds a step, and how many were completed since the last look that found any.

        The first steps of a generation are no steps like others, and none is counted across two.
        """
        before, self._seen = self._seen, (generation, step, now)
        if before is None or before[0] != generation or step < before[1] or before[1] == 0:
            return None
        steps = step - before[1]
        if steps == 0:
            self._seen = before
            return None
        return (now - before[2]) / steps, steps


class JobMetrics:
    """Everything that a coordinator's `/metrics` says."""

    def __init__(self, log: Iterable[EventLine] = ()) -> None:
        """`log`: what happened before, in this job directory."""
        self._lock = threading.Lock()
        self._levels = Levels(generation=0, step=0)
        self._pace = Pace()
        self._recoveries = Histogram(RECOVERY_BOUNDS_S)
        self._steps = Histogram(STEP_BOUNDS_S)
        self._steps_lost = 0
        self._faults: Counter[str] = Counter()
        self._unfit = 0
        self._breaches: Counter[str] = Counter(dict.fromkeys(OBJECTIVES, 0))
        self._opened_at: float | None = None
        self._checkpoints: dict[int, float] = {}  # step and when it was committed, oldest first
        for line in log:
            self.take(line)

    def take(self, line: EventLine) -> None:
        """Learn from an event."""
        with self._lock:
            self._take(line)

    def _take(self, line: EventLine) -> None:
        match line.event:
            case JobOpened():
                self._opened_at = line.at if self._opened_at is None else self._opened_at
            case FaultSeen(collateral=False, kind=kind):
                self._faults[kind] += 1
            case Recovered() as event:
                for phase in PHASES:
                    labels = (("kind", event.kind), ("phase", phase))
                    self._recoveries.observe(getattr(event, f"{phase}_s"), labels)
                self._steps_lost += event.steps_lost
            case NodeChecked(admitted=False):
                self._unfit += 1
            case SloBreached(objective=objective):
                self._breaches[objective] += 1
            case CheckpointCommitted(step=step):
                self._checkpoints.pop(step, None)
                self._checkpoints[step] = line.at
                if len(self._checkpoints) > _CHECKPOINTS_MAX:
                    del self._checkpoints[next(iter(self._checkpoints))]
            case CheckpointRejected(step=step):
                self._checkpoints.pop(step, None)
            case CheckpointsVanished(steps=steps):
                for step in steps:
                    self._checkpoints.pop(step, None)

    def look(self, levels: Levels, now: float) -> None:
        """Learn where the job stands; `now` is monotonic."""
        paced = self._pace.at(levels.generation, levels.step, now)
        with self._lock:
            self._levels = levels
            if paced is not None:
                self._steps.observe(paced[0], times=paced[1])

    def page(self, wall: float) -> str:
        """The page, at `wall` seconds since the epoch. From any thread."""
        with self._lock:
            return page(self._families(wall))

    def families(self, wall: float) -> tuple[Family, ...]:
        """What there is, also what has no sample yet."""
        with self._lock:
            return self._families(wall)

    def _families(self, wall: float) -> tuple[Family, ...]:
        return (*self._of_events(), *self._of_checkpoints(wall), *self._of_levels())

    def _of_events(self) -> tuple[Family, ...]:
        return (
            Family(
                name="stepfast_recovery_seconds",
                kind=HISTOGRAM,
                text="What recoveries took, by kind of fault and phase. Phases overlap; total"
                " begins at the detection.",
                labels=("kind", "phase"),
                samples=tuple(self._recoveries.samples()),
            ),
            Family(
                name="stepfast_steps_lost_total",
                kind=COUNTER,
                text="Steps that faults undid.",
                samples=(Sample(self._steps_lost),),
            ),
            Family(
                name="stepfast_faults_total",
                kind=COUNTER,
                text="Faults by kind, without those that only follow from others.",
                labels=("kind",),
                samples=by_label("kind", self._faults),
            ),
            Family(
                name="stepfast_slo_breaches_total",
                kind=COUNTER,
                text="Recoveries that missed an objective of [slo].",
                labels=("objective",),
                samples=by_label("objective", self._breaches),
            ),
            Family(
                name="stepfast_unfit_total",
                kind=COUNTER,
                text="Nodes that were refused by their health checks.",
                samples=(Sample(self._unfit),),
            ),
        )

    def _of_checkpoints(self, wall: float) -> tuple[Family, ...]:
        newest_at = next(reversed(self._checkpoints.values()), self._opened_at)
        age = () if newest_at is None else (Sample(max(0.0, wall - newest_at)),)
        return (
            Family(
                name="stepfast_checkpoint_age_seconds",
                kind=GAUGE,
                text="Since the newest checkpoint was committed; since the job was opened while"
                " there is none.",
                samples=age,
            ),
        )

    def _of_levels(self) -> tuple[Family, ...]:
        levels = self._levels
        ranks = {state.value: levels.ranks[state] for state in RankState}
        return (
            Family(
                name="stepfast_generation",
                kind=GAUGE,
                text="The generation that is open, or was last; it only grows.",
                samples=(Sample(levels.generation),),
            ),
            Family(
                name="stepfast_step",
                kind=GAUGE,
                text="The newest step that all ranks have completed.",
                samples=(Sample(levels.step),),
            ),
            Family(
                name="stepfast_step_seconds",
                kind=HISTOGRAM,
                text="What a step of the job takes, averaged over a heartbeat; the first of each"
                " generation is not counted.",
                samples=tuple(self._steps.samples()),
            ),
            Family(
                name="stepfast_ranks",
                kind=GAUGE,
                text="Ranks by the state of their processes.",
                labels=("state",),
                samples=by_label("state", ranks),
            ),
        )
