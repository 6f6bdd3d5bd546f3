"""The job's state and its inputs. No behaviour beyond small questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepfast.core.durable import Durable
from stepfast.core.faults import Evidence, Fault
from stepfast.core.incident import Incident
from stepfast.core.membership import Membership
from stepfast.core.messages import (
    FromAgent,
    JobSettings,
    RankChecked,
    RankReturned,
    StartGeneration,
)
from stepfast.core.objectives import Objectives
from stepfast.core.policy import Budget, Repeat
from stepfast.core.recovery import Lineage
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import Timeouts

REJOIN_LIMIT_S = 5.0  # an agent tries again at least every 2 s


class Phase(StrEnum):
    """FORMING -> STARTING -> RUNNING -> (fault) -> RECOVERING -> STARTING -> ... -> ENDING ->
    ENDED.
    """

    FORMING = "forming"  # nodes and ranks are coming; no generation yet
    STARTING = "starting"  # a generation is open; not every rank has resumed
    RUNNING = "running"
    RECOVERING = "recovering"  # the generation is over; ranks leave it or are replaced
    ENDING = "ending"  # decided; nodes are ending their ranks
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A question "where are you?" to all ranks, and the answers so far."""

    number: int
    deadline: float
    asked: frozenset[NodeId]
    answered: frozenset[NodeId] = frozenset()
    evidence: tuple[Evidence, ...] = ()


class Drain(StrEnum):
    """How far an ending job is with making its newest state durable."""

    NONE = "none"
    RANKS = "ranks"  # the ranks are being ended
    STORE = "store"  # their slots are being written


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How the job ended. `fault`: the one whose traceback is shown."""

    status: str
    exit_code: int
    reason: str
    deadline: float
    fault: Fault | None = None
    drain: Drain = Drain.NONE
    drained: SnapshotId | None = None  # what is being made durable on the way out
    keep_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything the job's decisions depend on."""

    settings: JobSettings
    timeouts: Timeouts
    budget: Budget
    opened_at: float
    join_limit_s: float
    objectives: Objectives = Objectives()
    phase: Phase = Phase.FORMING
    generation: Generation = NO_GENERATION
    lineage: Lineage = Lineage()
    membership: Membership = Membership()
    incident: Incident | None = None
    repeat: Repeat = Repeat()
    steps: Mapping[Rank, Step] = field(default_factory=dict)
    start: StartGeneration | None = None  # what the nodes were told of the present generation
    resumed: Mapping[Rank, Step] = field(default_factory=dict)  # in the present generation
    steps_max: Step = Step(0)  # the newest step that all ranks ever completed, in any run
    has_progressed: bool = False  # this run has completed a step that the job never had before
    logged_max: Step = Step(-1)
    hang_step: Step | None = None
    hang_count: int = 0
    probe: Probe | None = None
    probes: int = 0
    hang_noted_at: tuple[Generation, Step] | None = None
    kept: bool = False
    running_since: float = 0.0
    durable: Durable = Durable()
    returned: Mapping[Rank, RankReturned] = field(default_factory=dict)
    checked: Mapping[Rank, RankChecked] = field(default_factory=dict)
    end: JobEnd | None = None
    # Nodes that have to leave, and the checkpoint that each waits for.
    draining: Mapping[NodeId, SnapshotId | None] = field(default_factory=dict)
    came_back: bool = False  # a coordinator that was killed, started again for the same run
    # One that came back to a job's end waits so long for those who have not heard of it.
    rejoin_limit_s: float = REJOIN_LIMIT_S

    @property
    def nodes(self) -> int:
        """How many nodes the job has."""
        return self.settings.world_size // self.settings.nproc_per_node


@dataclass(frozen=True, slots=True)
class FromNode:
    """Input: a message from an agent."""

    node: NodeId
    message: FromAgent


@dataclass(frozen=True, slots=True)
class NodeConnectionLost:
    """Input: an agent's connection ended."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Input: the user (Ctrl-C, SIGTERM) wants the job to end in order."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Input: time went by."""


JobInput = FromNode | NodeConnectionLost | StopRequested | Tick
