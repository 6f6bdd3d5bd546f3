"""Durable checkpoints as the machines see them: which are due, whose shards are written, which one
is read.

Owns: the settings, the account of what is written and committed, the choice of what to resume from.
Does not own: bytes, stores (`checkpoint`), the handling of messages (`core.job_durable`).
Invariants: a checkpoint is committed only when every rank's shard of it is written; one whose
lineage was abandoned, or that was found damaged, is never chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from stepfast.core.recovery import Lineage, RestorePlan, choose_step
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, SnapshotId, Step

# To commit one may take so long, and ranks may be so far apart with writing an announced one. Then
# it has failed, and the next is due.
COMMIT_LIMIT_S = 900.0
GATHERING_LIMIT_S = 3600.0
# A job that goes on from the store waits so long for a newer checkpoint that is being committed.
PASSING_LIMIT_S = 30.0
# A job that ends may take so long to make its newest state durable: below the two minutes that a
# spot instance is told beforehand.
DRAIN_LIMIT_S = 90.0
_UNFINISHED_MAX = 4  # so many checkpoints are gathered at once; the oldest gives way
_FAILURES_MAX = 16  # the newest reasons are remembered
_COMMITTED_MAX = 256  # more than any retention keeps within reach of a restart
_REMOVED_MAX = 1024  # a node may name so many for longer than they are there


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's file, as it was written.

    `name` is relative to the checkpoint's directory, `layout_digest` that of the slot's layout.
    `blocks` has the checksums of its blocks of `block_bytes` (the last one is shorter), one behind
    the other: all bytes are in one of them, and a part of the file can be verified.
    """

    rank: int
    name: str
    size_bytes: int
    layout_digest: str
    block_bytes: int
    blocks: str


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a checkpoint due, and what is kept. The job's last step always is."""

    url: str = ""  # of the store; empty: nothing is made durable
    interval_steps: int = 0  # 0: not by steps
    interval_s: float = 0.0  # 0: not by time
    keep_last: int = 2
    keep_every_steps: int = 0  # 0: none is kept for its step
    bytes_per_s_max: float | None = None  # of each rank; None: as fast as the store takes it
    user: dict[str, str] = {}  # what the user wants to be in the manifest
    is_strict: bool = False  # a damaged checkpoint ends the job instead of an older one being used
    start_fresh: tuple[str, ...] = ()  # names of what a checkpoint may lack

    def is_due(self, step: Step) -> bool:
        """Whether the step is one of those that every rank makes durable by itself."""
        return bool(self.url and self.interval_steps and step and step % self.interval_steps == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit that a node was asked for."""

    checkpoint: SnapshotId
    node: NodeId
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A step that is made durable because time went by; no rank had reached it when it was told."""

    step: Step = Step(-1)
    generation: Generation = Generation(0)
    at: float = 0.0
    margin_steps: int = 2  # doubled where ranks were faster than the word


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """What the job knows of its checkpoints."""

    committed: frozenset[SnapshotId] = frozenset()
    below: Generation = NO_GENERATION  # the newest in which another job may have written
    removed: frozenset[SnapshotId] = frozenset()  # by the retention; nodes may name them still
    rejected: frozenset[SnapshotId] = frozenset()  # found damaged when they were to be loaded
    shards: Mapping[SnapshotId, Mapping[int, ShardFile]] = field(default_factory=dict)
    failed: Mapping[SnapshotId, str] = field(default_factory=dict)
    commit: Commit | None = None
    announced: Announcement = Announcement()
    skips: int = 0  # due steps that were skipped since the last commit
    # Where skips had set ranks apart, from this step on they go on together; so often since then.
    together: SnapshotId = SnapshotId(Generation(0), Step(-1))
    rounds: int = 0

    def told_of(
        self, committed: Iterable[SnapshotId], below: Generation = NO_GENERATION
    ) -> Durable:
        """What a node found in the store, some time ago."""
        there = _newest(self.committed.union(committed) - self.removed, _COMMITTED_MAX)
        return replace(self, committed=there, below=max(self.below, below))

    def written(self, checkpoint: SnapshotId, shard: ShardFile) -> Durable:
        """One more shard."""
        if checkpoint in self.committed or checkpoint in self.failed:
            return self
        known = {**self.shards.get(checkpoint, {}), shard.rank: shard}
        shards = {**self.shards, checkpoint: known}
        kept = sorted(shards)[-_UNFINISHED_MAX:]
        return replace(self, shards={c: shards[c] for c in kept})

    def lost(self, checkpoint: SnapshotId, reason: str) -> Durable:
        """It will never be whole; the first reason counts."""
        failed = {**self.failed, checkpoint: self.failed.get(checkpoint, reason)}
        kept = sorted(failed)[-_FAILURES_MAX:]
        shards = {c: s for c, s in self.shards.items() if c != checkpoint}
        commit = self.commit
        if commit is not None and commit.checkpoint == checkpoint:
            commit = None
        return replace(self, failed={c: failed[c] for c in kept}, shards=shards, commit=commit)

    def skipped(self) -> Durable:
        """One more due step was skipped for an earlier one that takes long."""
        return replace(self, skips=self.skips + 1)

    def awaits(self, generation: Generation) -> SnapshotId | None:
        """The announced checkpoint, while it is neither committed nor given up."""
        told = SnapshotId(generation, self.announced.step)
        if self.announced.step < 0 or self.announced.generation != generation:
            return None
        return None if told in self.committed or told in self.failed else told

    def begun_again(self, step: Step) -> Durable:
        """The step is written once more: earlier failures count no more."""
        failed = {c: reason for c, reason in self.failed.items() if c.step != step}
        return replace(self, failed=failed)

    def failure(self, step: Step) -> str | None:
        """Why the step will not be durable, where that is known."""
        return next((reason for c, reason in sorted(self.failed.items()) if c.step == step), None)

    def done(self, checkpoint: SnapshotId, removed: Iterable[SnapshotId] = ()) -> Durable:
        """It is committed: what was being gathered of older ones is of no use any more. `removed`
        went for it, and is never chosen.
        """
        shards = {c: s for c, s in self.shards.items() if c > checkpoint}
        commit = self.commit
        if commit is not None and commit.checkpoint <= checkpoint:
            commit = None
        gone = self.removed.union(removed)
        committed = _newest((self.committed | {checkpoint}) - gone, _COMMITTED_MAX)
        return replace(
            self,
            committed=committed,
            removed=_newest(gone, _REMOVED_MAX),
            rejected=self.rejected - gone,
            skips=0,
            rounds=0,
            shards=shards,
            commit=commit,
        )

    def refused(self, checkpoint: SnapshotId) -> Durable:
        """It was read and is damaged."""
        return replace(self, rejected=self.rejected | {checkpoint})

    def whole(self, world_size: int, lineage: Lineage) -> SnapshotId | None:
        """The newest checkpoint on the lineage of which every shard is written."""
        ready = [c for c, s in self.shards.items() if len(s) == world_size and lineage.admits(c)]
        return max(ready, default=None)

    def newest(self, lineage: Lineage) -> SnapshotId | None:
        """The one to resume from, as far as durable ones are concerned."""
        usable = self.committed - self.rejected
        return max((c for c in usable if lineage.admits(c)), default=None)

    def void(self, lineage: Lineage) -> frozenset[SnapshotId]:
        """Those that are there and never chosen: damaged, or of an abandoned branch."""
        return frozenset(c for c in self.committed if c in self.rejected or not lineage.admits(c))

    def holds(self, step: Step, lineage: Lineage) -> bool:
        """Whether this very step of the lineage is committed."""
        usable = self.committed - self.rejected
        return any(c.step == step and lineage.admits(c) for c in usable)

    @property
    def newest_generation(self) -> Generation:
        """No generation of the job may have a number that one of another job in the store has."""
        return max((self.below, *(c.generation for c in self.committed)))


def choose_source(
    held: Mapping[Rank, Iterable[SnapshotId]], lineage: Lineage, durable: Durable
) -> RestorePlan | SnapshotId | None:
    """Where to go on: slots that hold a common step, or a checkpoint where that is newer; None:
    there is neither.
    """
    plan = choose_step(held, lineage)
    stored = durable.newest(lineage)
    if stored is not None and (plan is None or stored.step > plan.step):
        return stored
    return plan


def is_about_to_be_passed(
    stored: SnapshotId | None, lineage: Lineage, durable: Durable, now: float
) -> bool:
    """Whether a newer checkpoint is being committed than the one to go on from (None: there is
    none), which may go for it while ranks still read. A commit that takes long is not waited for.
    """
    commit = durable.commit
    if commit is None or stored is None:
        return commit is not None
    is_slow = now > commit.deadline - COMMIT_LIMIT_S + PASSING_LIMIT_S
    is_newer = lineage.admits(commit.checkpoint) and commit.checkpoint.step > stored.step
    return is_newer and not is_slow


def would_start_over(
    held: Mapping[Rank, Iterable[SnapshotId]], lineage: Lineage, durable: Durable, steps_max: Step
) -> bool:
    """Whether a job that finds nothing to go on from has steps that it would make again."""
    if durable.committed:
        return True
    steps = (s.step for snapshots in held.values() for s in snapshots if lineage.admits(s))
    return steps_max > 0 or max(steps, default=Step(0)) > 0


def _newest(checkpoints: Iterable[SnapshotId], count: int) -> frozenset[SnapshotId]:
    return frozenset(sorted(checkpoints)[-count:])
