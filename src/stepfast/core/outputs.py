"""Orders of the machines. The driver performs them in one fixed order: persist, send, act,
record.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfast.core.durable import ShardFile
from stepfast.core.messages import (
    FromAgent,
    FromCoordinator,
    FromRank,
    RankFinish,
    RankLeave,
    RankStart,
    ToRank,
)
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId
from stepfast.events import Event


@dataclass(frozen=True, slots=True)
class Persist:
    """Durable before anything of the same step is sent."""

    event: Event


@dataclass(frozen=True, slots=True)
class Record:
    """An event for the log; may be written late, never lost in an orderly end."""

    event: Event


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Coordinator: a message to an agent; dropped where the node is not connected (it is told again
    when it is).
    """

    node: NodeId
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class SendToCoordinator:
    """Agent: a message to the coordinator; kept, within a bound, while the connection is away."""

    message: FromAgent


@dataclass(frozen=True, slots=True)
class SendToRank:
    """Agent: a message to a local rank's present process."""

    rank: Rank
    message: ToRank


@dataclass(frozen=True, slots=True)
class ForkRank:
    """Agent: make a fresh process for the rank."""

    rank: Rank
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillRank:
    """Agent: end this incarnation with all its descendants, at once."""

    rank: Rank
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Agent: have an unused store ready for a generation that may meet at this node."""


@dataclass(frozen=True, slots=True)
class ListCheckpoints:
    """Agent: look into the checkpoint store."""


@dataclass(frozen=True, slots=True)
class WriteSlot:
    """Agent: copy the rank's sealed slot of this snapshot into the checkpoint store; `attempt`:
    which one, while earlier ones hang.
    """

    rank: Rank
    checkpoint: SnapshotId
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Agent: the write is of no use any more; its thread ends where it can, and says so."""

    rank: Rank
    checkpoint: SnapshotId
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class CommitShards:
    """Agent: check the shards and write the manifest; then remove what need not be kept, but
    nothing that is `in_flight`. What of `known` the store has no more vanished. The job will never
    go on from `void` ones.
    """

    checkpoint: SnapshotId
    shards: tuple[ShardFile, ...]
    in_flight: frozenset[SnapshotId]
    known: frozenset[SnapshotId] = frozenset()
    void: frozenset[SnapshotId] = frozenset()


@dataclass(frozen=True, slots=True)
class EndProcess:
    """The process of this machine ends, in order, with this code."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Rank: wake whatever is pending in the generation's groups, all at once; safe to repeat."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class SignalMain:
    """Rank: make `Interrupted` rise in the main thread; safe to repeat."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class ReleaseMain:
    """Rank: the main thread, waiting in the wrapper, takes up the order."""

    order: RankStart | RankLeave | RankFinish


@dataclass(frozen=True, slots=True)
class SendToAgent:
    """Rank: a message to the agent."""

    message: FromRank


Output = (
    Persist
    | Record
    | SendToNode
    | SendToCoordinator
    | SendToRank
    | ForkRank
    | KillRank
    | OpenStore
    | ListCheckpoints
    | WriteSlot
    | CancelWrite
    | CommitShards
    | EndProcess
    | AbortGroups
    | SignalMain
    | ReleaseMain
    | SendToAgent
)
