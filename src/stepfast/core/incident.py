"""One incident: from the first fault to the moment when every rank has completed a step again.

A fault during the recovery of another joins its incident: one record, several causes.
Owns: the account of phases. Does not own decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from stepfast.core.faults import Fault, chief_cause, is_collateral, root_causes
from stepfast.core.messages import FirstStepDone, RankReport, RankResumed
from stepfast.core.terms import Generation, Rank, Step
from stepfast.events import Cause, Recovered


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is known of the incident so far. Times are of the coordinator's clock."""

    opened_at: float
    reached_by_rank: Mapping[Rank, Step]  # what each rank had completed when it was stopped
    pids_before: Mapping[Rank, int]
    faults: tuple[Fault, ...] = ()
    round_at: float = 0.0  # when the first fault came that no decision covers yet
    decided_faults: int = 0  # how many of them the last decision covers
    first_round: int = 0  # how many of them the first decision covered
    condemned: Mapping[Rank, int] = field(default_factory=dict)  # up to this incarnation: replaced
    quiet_at: float | None = None  # the last survivor left
    ready_at: float | None = None  # the last replacement stood at the barrier
    opened_generation: Generation | None = None
    kept_model: bool = False
    resumed: Mapping[Rank, RankResumed] = field(default_factory=dict)
    stepped: Mapping[Rank, FirstStepDone] = field(default_factory=dict)

    def joined_by(self, fault: Fault, now: float) -> Incident:
        """One more fault; whatever had been resumed counts no more."""
        is_first_of_round = self.decided_faults == len(self.faults)
        return replace(
            self,
            faults=(*self.faults, fault),
            round_at=now if is_first_of_round else self.round_at,
            quiet_at=None,
            resumed={},
            stepped={},
        )

    @property
    def replaced(self) -> frozenset[Rank]:
        """The ranks that got, or get, fresh processes."""
        return frozenset(self.condemned)

    def condemning(self, processes: Mapping[Rank, int]) -> Incident:
        """These incarnations, and all before, are to be followed by fresh processes."""
        worse = {r: max(i, self.condemned.get(r, i)) for r, i in processes.items()}
        return replace(self, condemned={**self.condemned, **worse}, ready_at=None)

    def is_condemned(self, report: RankReport) -> bool:
        """Whether the report still shows a process that is to be replaced."""
        return report.incarnation <= self.condemned.get(report.rank, -1)

    @property
    def reached(self) -> Step:
        """The newest step that all ranks had completed."""
        return min(self.reached_by_rank.values(), default=Step(0))

    def told_by(self, report: RankReport) -> Incident:
        """What a rank had completed is known better once it has left."""
        before = self.reached_by_rank.get(report.rank, Step(0))
        if report.generation == 0 or report.step <= before:
            return self
        return replace(self, reached_by_rank={**self.reached_by_rank, report.rank: report.step})

    @property
    def chief(self) -> Fault:
        """The fault that names the incident: the cause of its first round, for later ones are new
        faults.
        """
        return chief_cause(self.faults[: self.first_round or None])

    @property
    def undecided_chief(self) -> Fault:
        """The cause of the faults that came since the last decision."""
        return chief_cause(self.faults[self.decided_faults :])

    def decided(self) -> Incident:
        """A decision covers all faults so far."""
        count = len(self.faults)
        return replace(self, decided_faults=count, first_round=self.first_round or count)

    def opened(self, generation: Generation, *, kept_model: bool) -> Incident:
        """A generation opens. Who resumed in an older one, and says so again to a coordinator that
        came back, has not resumed in this one.
        """
        return replace(
            self, opened_generation=generation, kept_model=kept_model, resumed={}, stepped={}
        )

    @property
    def only_collateral(self) -> bool:
        """Whether no root cause is known yet for the faults that came since the last decision."""
        undecided = self.faults[self.decided_faults :]
        return bool(undecided) and all(is_collateral(f) for f in undecided)


def recovered_event(
    incident: Incident, *, ranks: Mapping[Rank, RankReport], now: float
) -> Recovered:
    """The record of an incident that is over."""
    assert incident.opened_generation is not None, "recovered without a generation"
    chief = incident.chief
    resumed = incident.resumed.values()
    resumed_step = max((r.step for r in resumed), default=Step(0))
    survivors = {
        r: pid for r, pid in incident.pids_before.items() if pid and r not in incident.replaced
    }
    quiet_at = incident.quiet_at if incident.quiet_at is not None else now
    ready_at = incident.ready_at if incident.ready_at is not None else incident.opened_at
    return Recovered(
        generation=incident.opened_generation,
        kind=chief.kind.value,
        rank=chief.rank,
        node=chief.node,
        step=chief.step,
        resumed_step=resumed_step,
        steps_lost=max(0, incident.reached - resumed_step),
        survivors_kept_pid=all(ranks[r].pid == pid for r, pid in survivors.items()),
        kept_model=incident.kept_model,
        causes=tuple(
            Cause(kind=f.kind.value, rank=f.rank, node=f.node, step=f.step)
            for f in root_causes(incident.faults)
        ),
        detect_s=chief.detect_s,
        interrupt_s=quiet_at - incident.opened_at,
        respawn_s=max(0.0, ready_at - incident.opened_at) if incident.replaced else 0.0,
        rendezvous_s=max((r.rendezvous_s for r in resumed), default=0.0),
        build_s=max((r.build_s for r in resumed), default=0.0),
        restore_s=max((r.restore_s for r in resumed), default=0.0),
        first_step_s=max((s.seconds for s in incident.stepped.values()), default=0.0),
        total_s=now - incident.opened_at,
    )
