"""The typed messages between coordinator, agents and ranks. Versioned; MessagePack on every wire;
never a pickle.

Every message about a generation carries its number; receivers drop what is older, with an event.
The report goes up, the order comes down, and one barrier (quiet up, start down) closes the round.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from stepfast.core.durable import CheckpointSettings, ShardFile
from stepfast.core.faults import Evidence, ExceptionReport, Fault, Whereabouts
from stepfast.core.node_health import HealthReported
from stepfast.core.terms import NO_GENERATION, Generation, JobId, NodeId, Rank, SnapshotId, Step
from stepfast.errors import EXIT_TRY_AGAIN

PROTOCOL_VERSION = 1
AFTER_FINISH_LIMIT_S = 3600.0  # code behind the resilient function: a last export may take long
MESSAGE_BYTES_MAX = 16 * 1024 * 1024  # agent <-> coordinator; a larger one is refused
RANK_MESSAGE_BYTES_MAX = 128 * 1024  # rank <-> agent; below the socket's buffer: never split


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: frozen, keyword-only, tagged by its class name."""


# --- what a rank's process is told when it is made -----------------------------------------------


class JobSettings(_Message, frozen=True, kw_only=True):
    """What every agent and rank of a job must agree on; the coordinator tells it."""

    job_id: JobId
    world_size: int
    nproc_per_node: int
    job_dir: str
    device: str  # "cpu" or "cuda"
    recovery: str  # "off", "report" or "on"
    hang: str  # "recover" or "report"
    hang_floor_s: float | None
    hang_ceiling_s: float
    heartbeat_interval_s: float
    snapshot_interval_steps: int
    memory_dir: str
    preload: tuple[str, ...]
    faults: tuple[str, ...]
    checkpoints: CheckpointSettings = CheckpointSettings()
    check: bool = False  # end after the first turn, and leave nothing: no slot, no checkpoint
    check_against: tuple[str, SnapshotId] | None = None  # then: where a run would resume from


# --- agent -> coordinator ------------------------------------------------------------------------


class RankState(StrEnum):
    """Where a rank's process stands, as its agent sees it."""

    ABSENT = "absent"  # no process, or its replacement is being forked
    STARTING = "starting"  # forked; runs the script's own top level
    READY = "ready"  # waits for its first generation
    ACTIVE = "active"  # in a generation: forming, restoring or training
    QUIET = "quiet"  # has left its generation and waits for the next
    RETURNED = "returned"  # the user's function returned; waits for the others
    GONE = "gone"  # the job is over for it


NOTHING_BUILT = "nothing built yet"  # a `keep_obstacle` that obliges nobody else to build again


class RankReport(_Message, frozen=True, kw_only=True):
    """One rank of a node: a level, not an edge. Saying it twice is the same as once."""

    rank: Rank
    state: RankState
    pid: int
    incarnation: int
    generation: Generation
    step: Step = Step(0)  # completed by this process in its generation
    snapshots: tuple[SnapshotId, ...] = ()
    keep_obstacle: str | None = (
        "nothing built yet"  # why `run.once` results cannot be kept; None: they can
    )
    build_has_collectives: bool = False


class Hello(_Message, frozen=True, kw_only=True):
    """An agent's first message on a connection."""

    protocol: int
    node: NodeId
    host: str  # the address at which peers reach this node
    pid: int


class NodeDraining(_Message, frozen=True, kw_only=True):
    """The node has to leave within a grace; it stays until what it holds is durable."""

    node: NodeId
    reason: str


class NodeReport(_Message, frozen=True, kw_only=True):
    """Everything the job must know of one node. Sent when it changes."""

    node: NodeId
    ranks: tuple[RankReport, ...]
    heard: Generation  # the newest one the node was told to enter or to leave
    store_port: int | None  # an unused store, ready for the next generation
    # Committed ones in the checkpoint store, as far as this node knows; None: not listed yet.
    checkpoints: tuple[SnapshotId, ...] | None = ()
    store_below: Generation = NO_GENERATION  # the newest that another job may have written there


class FaultReported(_Message, frozen=True, kw_only=True):
    """Up, once, for each observed fault."""

    fault: Fault


class HangSuspected(_Message, frozen=True, kw_only=True):
    """A rank is beyond its limit; repeated while it stays so."""

    generation: Generation
    rank: Rank
    step: Step
    since_progress_s: float
    limit_s: float


class EvidenceGiven(_Message, frozen=True, kw_only=True):
    """The answers of one node's ranks to a probe."""

    probe: int
    evidence: tuple[Evidence, ...]


class RankResumed(_Message, frozen=True, kw_only=True):
    """A rank has restored its state and enters its first turn. Durations in seconds, of the rank's
    own clock.
    """

    generation: Generation
    rank: Rank
    step: Step
    rendezvous_s: float
    build_s: float
    restore_s: float
    kept: bool


class FirstStepDone(_Message, frozen=True, kw_only=True):
    """A rank has completed its first turn of the generation."""

    generation: Generation
    rank: Rank
    step: Step
    seconds: float


class TensorDigest(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The digest of one local tensor: where it lies in the global one, and the hash of its
    bytes.
    """

    name: str
    offsets: tuple[int, ...]
    digest: str


class RankDigests(_Message, frozen=True, kw_only=True):
    """A part of the digests of a rank that is about to return; all of them are too many for one."""

    generation: Generation
    digests: tuple[TensorDigest, ...]


class TrackedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object that a rank tracks, and how much of a slot it takes."""

    name: str
    type: str
    tensors: int
    size_bytes: int


class RankChecked(_Message, frozen=True, kw_only=True):
    """In a check: the rank has made its first turn, and this is what it would keep of each."""

    generation: Generation
    rank: Rank
    seconds: float  # the turn, with everything that happens once
    objects: tuple[TrackedObject, ...]
    loaders: tuple[str, ...]
    slot_bytes: int
    layout: str  # the digest of what a slot would hold
    once: tuple[str, ...]  # the functions given to `run.once`
    keep_obstacle: str | None  # as far as can be seen before a restart
    device: str
    backend: str
    torch_version: str
    torch_obstacle: str | None  # why nothing may be kept under this version
    misfits: str = ""  # why the checkpoint that a run would resume from is refused
    remarks: tuple[str, ...] = ()  # what a run would say when it resumes


class RankReturned(_Message, frozen=True, kw_only=True):
    """The user's function returned on this rank, at this step, with this state."""

    generation: Generation
    rank: Rank
    step: Step
    digests: tuple[TensorDigest, ...]


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What `run.log` said at one step."""

    step: Step
    values: dict[str, float | int | str | bool]


class ShardWritten(_Message, frozen=True, kw_only=True):
    """A rank's part of a checkpoint is in the store, durable, and was hashed on its way."""

    checkpoint: SnapshotId
    shard: ShardFile
    seconds: float


class CheckpointFailed(_Message, frozen=True, kw_only=True):
    """A part of it could not be written, or it could not be committed. `rank` None: the commit."""

    checkpoint: SnapshotId
    rank: Rank | None
    reason: str
    is_skip: bool = False  # not begun: the one before is still being written there


class CheckpointMissed(_Message, frozen=True, kw_only=True):
    """An announced step that a rank had passed already."""

    step: Step


class CommitDone(_Message, frozen=True, kw_only=True):
    """The manifest is in the store; what need not be kept beside it was `removed`, and what
    `vanished` was removed by somebody else, or the store is another one by now.
    """

    checkpoint: SnapshotId
    name: str
    size_bytes: int
    seconds: float
    removed: tuple[SnapshotId, ...] = ()
    vanished: tuple[SnapshotId, ...] = ()


class StoreRefused(_Message, frozen=True, kw_only=True):
    """No job may begin with the checkpoint store as it is; one that does ends with `exit_code`."""

    node: NodeId
    reason: str
    exit_code: int = EXIT_TRY_AGAIN


class Heartbeat(_Message, frozen=True, kw_only=True):
    """A node lives. Carries the progress of its ranks and what `run.log` said since the last
    one.
    """

    node: NodeId
    steps: dict[Rank, Step]
    logged: tuple[LoggedStep, ...] = ()


class Noted(_Message, frozen=True, kw_only=True):
    """Something worth an event, in words."""

    node: NodeId
    topic: str
    text: str
    rank: Rank | None = None


class Bye(_Message, frozen=True, kw_only=True):
    """The node has ended its ranks and leaves."""

    node: NodeId
    failed: tuple[Rank, ...] = ()  # those that failed behind the resilient function


# --- coordinator -> agent ------------------------------------------------------------------------


class Welcome(_Message, frozen=True, kw_only=True):
    """The job's settings and this node's ranks with the last incarnation known of each."""

    settings: JobSettings
    ranks: dict[Rank, int]


class Replacement(msgspec.Struct, frozen=True):
    """This incarnation of the rank is to be ended, where it still lives, and followed by a fresh
    process.
    """

    rank: Rank
    incarnation: int


class Interrupt(_Message, frozen=True, kw_only=True):
    """Leave the generation. Ranks in `replace` cannot, or shall not: they get fresh processes."""

    generation: Generation
    reason: str
    replace: tuple[Replacement, ...]


class StartGeneration(_Message, frozen=True, kw_only=True):
    """The barrier opens: every rank joins `generation` at `store` and resumes from `step`."""

    generation: Generation
    step: Step | None  # None: no rank holds any state; begin from what `build` makes
    sources: dict[Rank, SnapshotId]
    store_host: str
    store_port: int
    incarnations: dict[Rank, int]  # the processes that are meant; no other one may join
    keep: bool  # survivors keep what `run.once` built
    limit_step: Step | None  # at this step hang limits are multiplied by `limit_factor`
    limit_factor: float
    checkpoint: SnapshotId | None = None  # read this one instead of slots


class ProbeRanks(_Message, frozen=True, kw_only=True):
    """Ask every local rank where it is."""

    probe: int
    generation: Generation


class CheckpointAt(_Message, frozen=True, kw_only=True):
    """Make this step durable, which no rank has reached as far as the coordinator knows."""

    generation: Generation
    step: Step


class CommitCheckpoint(_Message, frozen=True, kw_only=True):
    """Every shard is written: check them, write the manifest, then remove what need not be kept.

    `void` are committed ones that the job will never go on from: damaged, or abandoned.
    """

    checkpoint: SnapshotId
    shards: tuple[ShardFile, ...]
    void: tuple[SnapshotId, ...] = ()


class CancelCheckpoint(_Message, frozen=True, kw_only=True):
    """It will never be whole: nobody writes it or keeps a slot for it.

    Where ranks took different steps, `not_before` brings them together again: in the checkpoint's
    generation no earlier step is due by its number.
    """

    checkpoint: SnapshotId
    not_before: Step


class CheckpointsHeld(_Message, frozen=True, kw_only=True):
    """What the store holds now, for every node but the one that changed it: a coordinator that
    comes back hears it from them.
    """

    checkpoints: tuple[SnapshotId, ...]


class PersistSlots(_Message, frozen=True, kw_only=True):
    """The ranks are no more: make the state that these slots hold durable."""

    checkpoint: SnapshotId
    sources: dict[Rank, SnapshotId]


class LeaveNow(_Message, frozen=True, kw_only=True):
    """What a draining node held is durable, or need not be: it may leave, the job goes on."""


class FinishJob(_Message, frozen=True, kw_only=True):
    """The job is over. With `finished` the ranks run on behind the resilient function; otherwise
    they end.
    """

    finished: bool
    exit_code: int
    reason: str
    drain: bool = False  # end the ranks and stay: what their slots hold is to be made durable
    keep_memory: bool = False  # it could not be: leave the slots for another run


# --- rank -> agent -------------------------------------------------------------------------------


class RankEntered(_Message, frozen=True, kw_only=True):
    """The main thread has reached the resilient function and waits for a generation."""

    pid: int


class PhaseBegan(_Message, frozen=True, kw_only=True):
    """A turn (`name` None) or a named phase began. The level that hang limits are judged by."""

    generation: Generation
    step: Step
    phase: str
    turn_s: float | None = None  # what the turn before took


class PhaseEnded(_Message, frozen=True, kw_only=True):
    """A named section ended; the turn goes on."""

    generation: Generation
    step: Step
    phase: str
    seconds: float


class RankRaised(_Message, frozen=True, kw_only=True):
    """An exception came out of the user's code (generation 0: before any)."""

    generation: Generation
    step: Step
    error: ExceptionReport


class RankQuiet(_Message, frozen=True, kw_only=True):
    """The rank has left the generation: no collective of it is pending."""

    generation: Generation
    keep_obstacle: str | None
    build_has_collectives: bool
    interrupt_s: float  # from the first sign to leave to here
    unusable: str | None = None  # why this process can be in no other generation


class RankSealed(_Message, frozen=True, kw_only=True):
    """The slot of a step that is to be made durable is sealed, and kept until it is."""

    snapshot: SnapshotId


class RankSkipped(_Message, frozen=True, kw_only=True):
    """A step that was due is not kept for being made durable."""

    snapshot: SnapshotId
    reason: str
    is_late: bool = False  # the word came when the step was over


class RankLogged(_Message, frozen=True, kw_only=True):
    """`run.log` of one step."""

    generation: Generation
    logged: LoggedStep


class RankNoted(_Message, frozen=True, kw_only=True):
    """Something worth an event, in words."""

    topic: str
    text: str


class ProbeAnswer(_Message, frozen=True, kw_only=True):
    """Where the main thread is."""

    probe: int
    whereabouts: Whereabouts
    seconds_there: float
    collectives: int
    stack: str


# --- agent -> rank -------------------------------------------------------------------------------


class RankStart(_Message, frozen=True, kw_only=True):
    """Join a generation."""

    generation: Generation
    rank: Rank
    local_rank: int
    world_size: int
    local_world_size: int
    node: NodeId
    step: Step | None
    source: SnapshotId | None
    store_host: str
    store_port: int
    keep: bool
    slot_directory: str
    log_path: str
    settings: JobSettings
    checkpoint: SnapshotId | None = None  # where `source` is None: state is read from the store
    pinned: tuple[SnapshotId, ...] = ()  # slots that are being written to the store


class RankLeave(_Message, frozen=True, kw_only=True):
    """Leave this generation, or any older one."""

    generation: Generation


class RankFinish(_Message, frozen=True, kw_only=True):
    """The job is over: go on behind the resilient function (`finished`), or end the process."""

    finished: bool


class RankCheckpointAt(_Message, frozen=True, kw_only=True):
    """Keep the slot of this step until it is durable."""

    step: Step


class RankUnpin(_Message, frozen=True, kw_only=True):
    """The slot need not be kept any longer."""

    snapshot: SnapshotId


class RankCancel(_Message, frozen=True, kw_only=True):
    """Do not keep this slot; no step before `not_before` is due by its number."""

    snapshot: SnapshotId
    not_before: Step


class RankProbe(_Message, frozen=True, kw_only=True):
    """Where are you?"""

    probe: int


FromAgent = (
    Hello
    | NodeDraining
    | HealthReported
    | NodeReport
    | FaultReported
    | HangSuspected
    | EvidenceGiven
    | RankResumed
    | FirstStepDone
    | RankChecked
    | RankReturned
    | ShardWritten
    | CheckpointFailed
    | CheckpointMissed
    | CommitDone
    | StoreRefused
    | Heartbeat
    | Noted
    | Bye
)
FromCoordinator = (
    Welcome
    | Interrupt
    | StartGeneration
    | ProbeRanks
    | CheckpointAt
    | CommitCheckpoint
    | CancelCheckpoint
    | CheckpointsHeld
    | PersistSlots
    | LeaveNow
    | FinishJob
)
FromRank = (
    RankEntered
    | PhaseBegan
    | PhaseEnded
    | RankRaised
    | RankQuiet
    | RankDigests
    | RankResumed
    | FirstStepDone
    | RankChecked
    | RankReturned
    | RankSealed
    | RankSkipped
    | RankLogged
    | RankNoted
    | ProbeAnswer
)
AboutPins = RankCheckpointAt | RankUnpin | RankCancel
ToRank = RankStart | RankLeave | RankFinish | RankProbe | AboutPins
