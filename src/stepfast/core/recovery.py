"""Which step to resume from: the newest one that every rank of the new generation can get.

Owns: lineage and the choice of the step. Does not own where bytes lie or how they are read.
Invariant: a snapshot of an abandoned lineage never enters a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepfast.core.terms import Generation, Rank, SnapshotId, Step

_OPENINGS_MAX = 256  # slots hold the newest few steps, so older openings cannot decide anything


@dataclass(frozen=True, slots=True)
class Lineage:
    """The openings so far: generation g went on from step s, so older states newer than s are
    void.
    """

    openings: tuple[tuple[Generation, Step], ...] = ()

    def opened(self, generation: Generation, step: Step) -> Lineage:
        """The lineage after one more opening; generations only grow."""
        assert not self.openings or generation > self.openings[-1][0], "generations only grow"
        return Lineage((*self.openings, (generation, step))[-_OPENINGS_MAX:])

    def admits(self, snapshot: SnapshotId) -> bool:
        """Whether the snapshot lies on this lineage."""
        if self.openings and snapshot.generation > self.openings[-1][0]:
            return False
        later = (step for generation, step in self.openings if generation > snapshot.generation)
        return all(snapshot.step <= step for step in later)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Where the generation resumes: `sources` names for each rank the sealed slot it reads; all of
    one step.
    """

    step: Step
    sources: Mapping[Rank, SnapshotId]


def choose_step(held: Mapping[Rank, Iterable[SnapshotId]], lineage: Lineage) -> RestorePlan | None:
    """The newest step that every rank holds on this lineage; None where there is none.

    Where a rank holds one step under several generations the newest generation is read: they are
    the same state.
    """
    by_rank = {
        rank: _newest_by_step(snapshots, lineage) for rank, snapshots in sorted(held.items())
    }
    if not by_rank:
        return None
    common = set.intersection(*(set(steps) for steps in by_rank.values()))
    if not common:
        return None
    step = max(common)
    return RestorePlan(step, {rank: steps[step] for rank, steps in by_rank.items()})


def _newest_by_step(snapshots: Iterable[SnapshotId], lineage: Lineage) -> dict[Step, SnapshotId]:
    return {s.step: s for s in sorted(snapshots) if lineage.admits(s)}
