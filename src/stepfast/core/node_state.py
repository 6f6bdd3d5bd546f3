"""The node's state and its inputs. No behaviour beyond small questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepfast.core.durable import ShardFile
from stepfast.core.faults import Fault
from stepfast.core.messages import (
    NOTHING_BUILT,
    CommitDone,
    FinishJob,
    FirstStepDone,
    FromCoordinator,
    FromRank,
    JobSettings,
    LoggedStep,
    NodeReport,
    ProbeAnswer,
    RankChecked,
    RankReport,
    RankResumed,
    RankReturned,
    RankState,
    ShardWritten,
    StoreRefused,
    TensorDigest,
)
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import SETUP, LearnedLimits, Timeouts
from stepfast.errors import EXIT_TRY_AGAIN

Milestone = RankResumed | FirstStepDone | RankChecked | RankReturned
LOGGED_STEPS_MAX = 2_000  # the newest of them are said again to a coordinator that was away


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """A slot on its way into the checkpoint store; the checkpoint is called as the slot is.

    `attempt` tells it from earlier writes of the same slot that hang, and may still end.
    """

    checkpoint: SnapshotId
    attempt: int = 0
    signs: int = 0  # of life, so far
    sign_at: float = 0.0  # the last one
    is_quiet: bool = False  # it was said that there is none

    def is_of(self, told: SlotWritten | SlotNotWritten | WriteSigns) -> bool:
        """Whether the thread that does this very write says so."""
        return (told.checkpoint, told.attempt) == (self.checkpoint, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """One rank of this node and the process that holds it. Times are of the node's clock."""

    rank: Rank
    state: RankState = RankState.ABSENT
    pid: int = 0
    incarnation: int = 0
    generation: Generation = NO_GENERATION
    step: Step = Step(0)
    phase: str = SETUP
    phase_since: float = 0.0
    turn_phase: str = SETUP  # what a section interrupts
    stopped_since: float | None = None  # the kernel has shown its process as stopped at each look
    suspect_at: float = 0.0  # the next time at which a suspicion may be told
    digests: tuple[TensorDigest, ...] = ()  # said in parts, before it returns
    leave_deadline: float | None = None  # told to leave; replaced if still there then
    doomed: bool = False  # being killed on order: its end is no fault
    forking: bool = False
    snapshots: tuple[SnapshotId, ...] = ()
    milestones: tuple[Milestone, ...] = ()  # of the present generation: told again when asked
    faults: tuple[Fault, ...] = ()  # since the last start, one of a kind: told again when asked
    longest_part_s: float = 0.0  # of a phase that sections cut into parts
    keep_obstacle: str | None = NOTHING_BUILT
    build_has_collectives: bool = False
    writing: Writing | None = None
    write_next: SnapshotId | None = None  # of a rank that has returned
    abandoned: tuple[Writing, ...] = ()  # given up; their threads have not ended yet
    written: tuple[ShardWritten, ...] = ()  # the newest: told again when asked

    @property
    def in_flight(self) -> tuple[SnapshotId, ...]:
        """What is being written, or will be."""
        writing = None if self.writing is None else self.writing.checkpoint
        return tuple(w for w in (writing, self.write_next) if w is not None)

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to leave, and has not yet."""
        return self.leave_deadline is not None and not self.doomed

    @property
    def is_watched(self) -> bool:
        """Whether it must make progress."""
        return self.state is RankState.ACTIVE and self.leave_deadline is None

    def report(self) -> RankReport:
        """The level that the coordinator is told."""
        return RankReport(
            rank=self.rank,
            state=self.state,
            pid=self.pid,
            incarnation=self.incarnation,
            generation=self.generation,
            step=self.step,
            snapshots=self.snapshots,
            keep_obstacle=self.keep_obstacle,
            build_has_collectives=self.build_has_collectives,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProbe:
    """A question to the local ranks, and their answers so far."""

    number: int
    deadline: float
    asked: frozenset[Rank]
    stopped: frozenset[Rank]  # the kernel says so
    answers: Mapping[Rank, ProbeAnswer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """Everything the node's decisions depend on."""

    node: NodeId
    host: str
    pid: int
    slot_root: str  # slots of rank R lie in `slot_root`/rank-R
    log_root: str  # logs of rank R and generation G: `log_root`/rank-R-gen-G.log
    settings: JobSettings | None = None
    timeouts: Timeouts | None = None
    limits: LearnedLimits | None = None
    ranks: Mapping[Rank, LocalRank] = field(default_factory=dict)
    connected: bool = False
    lost_at: float | None = None
    store_port: int | None = None
    store_wanted: bool = False
    beat_at: float = 0.0
    logged: tuple[LoggedStep, ...] = ()  # the newest; the coordinator passes over what it has
    unsent: int = 0  # how many of them, the newest, were not said yet
    probe: LocalProbe | None = None
    limit_step: Step = Step(-1)  # at this step hang limits are multiplied by `limit_factor`
    limit_factor: float = 1.0
    heard: Generation = NO_GENERATION  # the newest one to enter or to leave
    told: NodeReport | None = None
    checkpoints: tuple[SnapshotId, ...] | None = ()  # in the store, as far as is known; None: asked
    store_asked: bool = False
    listing_since: float | None = None  # the store was asked, and has not answered yet
    listing_is_quiet: bool = False  # that was said
    store_below: Generation = NO_GENERATION  # the newest that may be another job's in the store
    store_refusal: StoreRefused | None = None
    cancelled: tuple[SnapshotId, ...] = ()  # the newest that nobody writes any more
    committing: tuple[SnapshotId, ...] = ()  # also those that were given up and have not ended
    committed: CommitDone | None = None  # the newest by this node: told again when asked
    drains_for: str | None = None  # why this node has to leave; it waits to be let go
    drain_deadline: float | None = None
    finish: FinishJob | None = None
    failed_after: tuple[Rank, ...] = ()  # ranks whose script failed behind the resilient function
    is_job_over: bool = False  # the coordinator said so: what ranks left is of no use any more
    finish_deadline: float | None = None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorConnected:
    """Input: a connection stands; the node says who it is and how it stands."""


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """Input: the connection ended."""


@dataclass(frozen=True, slots=True)
class FromJob:
    """Input: a message of the coordinator; `stopped_ranks` are those whose process the kernel shows
    as stopped.
    """

    message: FromCoordinator
    stopped_ranks: frozenset[Rank] = frozenset()


@dataclass(frozen=True, slots=True)
class FromLocalRank:
    """Input: a message of a rank's process; `snapshots` is what its slots hold, where that
    matters.
    """

    rank: Rank
    incarnation: int
    message: FromRank
    snapshots: tuple[SnapshotId, ...] | None = None


@dataclass(frozen=True, slots=True)
class RankForked:
    """Input: a fresh process stands."""

    rank: Rank
    incarnation: int
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """Input: no process could be made."""

    rank: Rank
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """Input: a rank's process ended; everything it had sent has been taken in before."""

    rank: Rank
    incarnation: int
    exit_code: int | None
    signal: int | None
    log_tail: str
    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class CheckpointsListed:
    """Input: what the checkpoint store holds, and why something in it does not count; `below`: the
    newest generation in which another job may have written there.
    """

    checkpoints: tuple[SnapshotId, ...]
    problems: tuple[str, ...] = ()
    below: Generation = NO_GENERATION


@dataclass(frozen=True, slots=True)
class StoreUnusable:
    """Input: no job may begin with the checkpoint store as it is; `exit_code`: of such a job."""

    reason: str
    exit_code: int = EXIT_TRY_AGAIN


@dataclass(frozen=True, slots=True)
class SlotWritten:
    """Input: a slot is in the checkpoint store, durable."""

    rank: Rank
    checkpoint: SnapshotId
    shard: ShardFile
    seconds: float
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SlotNotWritten:
    """Input: it is not, and will not be."""

    rank: Rank
    checkpoint: SnapshotId
    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEnded:
    """Input: a commit is done (`reason` None) or failed; `removed` were not to be kept, `vanished`
    were, and are no more.
    """

    checkpoint: SnapshotId
    name: str
    size_bytes: int
    seconds: float
    removed: frozenset[SnapshotId] = frozenset()
    vanished: frozenset[SnapshotId] = frozenset()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StoreReady:
    """Input: an unused store listens."""

    port: int


@dataclass(frozen=True, slots=True)
class StoreLost:
    """Input: the store's process ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeNoted:
    """Input: the shell saw something worth an event."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeStopRequested:
    """Input: SIGTERM or SIGINT to this agent. `drains`: there is a grace in which what it holds can
    be made durable.
    """

    reason: str
    drains: bool = False


@dataclass(frozen=True, slots=True)
class WriteSigns:
    """How many signs of life a write has given: a piece that was taken, a rest that was over."""

    rank: Rank
    checkpoint: SnapshotId
    signs: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class NodeTick:
    """Input: time went by; `stopped_ranks` are those told to leave or to go on whose process
    the kernel shows as stopped, `writes` those under way.
    """

    stopped_ranks: frozenset[Rank] = frozenset()
    writes: tuple[WriteSigns, ...] = ()


NodeInput = (
    CoordinatorConnected
    | CoordinatorLost
    | FromJob
    | FromLocalRank
    | RankForked
    | ForkFailed
    | RankEnded
    | CheckpointsListed
    | StoreUnusable
    | SlotWritten
    | SlotNotWritten
    | CommitEnded
    | StoreReady
    | StoreLost
    | NodeNoted
    | NodeStopRequested
    | NodeTick
)
