"""One solver derives every time limit from a few inputs and keeps their order.

    interrupt grace < interrupt deadline < forming limit <= hang ceiling
    probe deadline  < hang floor         <= hang ceiling
    heartbeat interval * 4 <= node silence

Owns: the limits and what is learned from the job's own times. Does not own a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepfast.core.faults import SUSPICION_RATIO
from stepfast.core.messages import JobSettings
from stepfast.errors import ConfigError

TURN = "turn"
FIRST_TURN = "first turn"
SETUP = "set-up"
_WINDOW_TURNS = 64  # how many past durations of a phase are remembered
_LIMIT_RATIO = 4.0  # a phase may take four times the longest of the remembered ones
_OUTLIERS_MAX = 2  # so many of the longest turns count as one-offs: a hang later is not hidden by
_OUTLIERS_ONE_IN = 16  # them; one in so many turns, for a few turns know nothing of what is usual
_LATE_TURN_RATIO = 1.5  # over the longest turn that was suspected and came to an end
_UNLEARNED_FLOOR_RATIO = 5.0  # phases seen rarely get a floor five times higher
_DATA_RATIO = 10.0  # a loader may stall ten floors long before it counts as hung


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit of a job, in seconds. Make it by `solve_timeouts`."""

    hang_floor_s: float
    hang_ceiling_s: float
    heartbeat_interval_s: float
    node_silence_s: float
    collect_window_s: float
    probe_deadline_s: float
    interrupt_grace_s: float
    interrupt_deadline_s: float
    forming_limit_s: float
    stop_grace_s: float


def solve_timeouts(
    *,
    device: str,
    hang_floor_s: float | None = None,
    hang_ceiling_s: float = 600.0,
    heartbeat_interval_s: float = 0.5,
) -> Timeouts:
    """Derive all limits; raise ConfigError that names the rule where the inputs contradict each
    other.

    `device` is "cpu" or "cuda": on CUDA the host runs ahead of the device and collectives take
    longer to abort.
    """
    on_cpu = device == "cpu"
    floor_s = hang_floor_s if hang_floor_s is not None else (2.0 if on_cpu else 60.0)
    limits = Timeouts(
        hang_floor_s=floor_s,
        hang_ceiling_s=hang_ceiling_s,
        heartbeat_interval_s=heartbeat_interval_s,
        node_silence_s=max(10.0, heartbeat_interval_s * 20),
        collect_window_s=0.15,
        probe_deadline_s=0.1 if on_cpu else 1.0,
        interrupt_grace_s=0.03 if on_cpu else 0.5,
        interrupt_deadline_s=2.0 if on_cpu else 10.0,
        forming_limit_s=30.0 if on_cpu else 120.0,
        stop_grace_s=3.0,
    )
    _check_order(limits)
    return limits


def timeouts_of(settings: JobSettings) -> Timeouts:
    """The limits of a job, from what all its processes agree on."""
    return solve_timeouts(
        device=settings.device,
        hang_floor_s=settings.hang_floor_s,
        hang_ceiling_s=settings.hang_ceiling_s,
        heartbeat_interval_s=settings.heartbeat_interval_s,
    )


def _check_order(t: Timeouts) -> None:
    rules = (
        (t.heartbeat_interval_s > 0, "heartbeat_interval_s must be above 0"),
        (
            t.heartbeat_interval_s * 4 <= t.node_silence_s,
            "heartbeat_interval_s is too long for node_silence_s",
        ),
        (
            t.probe_deadline_s * 4 < t.hang_floor_s,
            f"hang_floor_s must be above {t.probe_deadline_s * 4:g} s",
        ),
        (t.hang_floor_s <= t.hang_ceiling_s, "hang_floor_s must not be above hang_ceiling_s"),
        (
            t.forming_limit_s <= t.hang_ceiling_s,
            f"hang_ceiling_s must be at least {t.forming_limit_s:g} s",
        ),
        (
            t.interrupt_grace_s < t.interrupt_deadline_s < t.forming_limit_s,
            "interrupt limits out of order",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise ConfigError(f"time limits contradict each other: {message}")


@dataclass(frozen=True, slots=True)
class LearnedLimits:
    """What one node has seen each phase take. Pure: `learn` returns the next value.

    A phase is TURN, FIRST_TURN, SETUP, or "section:NAME". A phase never seen gets the ceiling. The
    longest of a rare phase is remembered for good; so is a turn that was over its limit and came to
    an end all the same, for it will be back.
    """

    timeouts: Timeouts
    seen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)

    def learn(self, phase: str, seconds: float) -> LearnedLimits:
        """Remember one duration of a phase."""
        if phase != TURN or seconds > self.limit_s(TURN) * SUSPICION_RATIO:
            longest_s = max(seconds, self.longest_s.get(phase, 0.0))
            return replace(self, longest_s={**self.longest_s, phase: longest_s})
        window = (*self.seen.get(phase, ()), seconds)[-_WINDOW_TURNS:]
        return replace(self, seen={**self.seen, phase: window})

    def limit_s(self, phase: str) -> float:
        """How long the phase may take before it is suspected; between floor and ceiling."""
        t = self.timeouts
        window = self.seen.get(phase, ())
        longest_s = self.longest_s.get(phase, 0.0)
        if not window and not longest_s:
            return t.hang_ceiling_s
        if phase != TURN:
            floor_s = t.hang_floor_s * _UNLEARNED_FLOOR_RATIO
            return min(t.hang_ceiling_s, max(floor_s, _LIMIT_RATIO * longest_s))
        usual_s = (
            sorted(window)[-1 - min(_OUTLIERS_MAX, len(window) // _OUTLIERS_ONE_IN)]
            if window
            else 0.0
        )
        known_s = max(_LIMIT_RATIO * usual_s, _LATE_TURN_RATIO * longest_s)
        return min(t.hang_ceiling_s, max(t.hang_floor_s, known_s))

    def data_limit_s(self) -> float:
        """How long a wait for the tracked loader may take."""
        return min(self.timeouts.hang_ceiling_s, self.timeouts.hang_floor_s * _DATA_RATIO)
