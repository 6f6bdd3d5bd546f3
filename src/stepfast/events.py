"""What happened: the event types of `events.jsonl`. No behaviour.

One JSON object a line: `{"v": 1, "at": seconds since the epoch, "t": monotonic seconds of the
coordinator, "type": ..., ...}`. Readers skip types they do not know; a field is never given another
meaning within a version.
"""

from __future__ import annotations

import msgspec

EVENTS_VERSION = 1


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of all events."""


class JobOpened(_Event, frozen=True, kw_only=True):
    """The coordinator serves the job; `run` counts how often this job directory was opened."""

    job_id: str
    nodes: int
    nproc_per_node: int
    script: str
    stepfast_version: str
    resumes: bool = False  # a coordinator that was killed came back for the same run


class NodeJoined(_Event, frozen=True, kw_only=True):
    """An agent is connected."""

    node: int
    host: str
    pid: int


class NodeLeft(_Event, frozen=True, kw_only=True):
    """An agent's connection ended."""

    node: int
    reason: str


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one health check found, where it is not that all is well."""

    check: str
    verdict: str  # "unhealthy" or "unknown"
    evidence: str
    change: str = ""


class NodeChecked(_Event, frozen=True, kw_only=True):
    """A node was looked at before it joins; one that is not `admitted` has left with exit code 85.

    `verdict` is the worst one: "unhealthy", then "unknown", then "healthy".
    """

    node: int
    occasion: str  # "join", or "rejoin" where the agent had a connection before
    verdict: str
    admitted: bool
    seconds: float
    healthy: tuple[str, ...]  # the checks that found nothing
    findings: tuple[CheckFinding, ...]


class FaultSeen(_Event, frozen=True, kw_only=True):
    """A fault was observed. `collateral`: believed to be the consequence of another."""

    kind: str
    rank: int | None
    node: int
    generation: int
    step: int
    reason: str
    collateral: bool
    detect_s: float
    error_type: str | None = None
    traceback: str | None = None
    log_tail: str | None = None


class DecisionMade(_Event, frozen=True, kw_only=True):
    """What is done about an incident, and why."""

    generation: int
    action: str
    reason: str


class GenerationOpened(_Event, frozen=True, kw_only=True):
    """Persisted before anything is sent: the membership and the step it goes on from."""

    generation: int
    step: int | None
    world_size: int
    store: str
    pids: dict[int, int]
    incarnations: dict[int, int]
    kept: bool
    source: str = "memory"  # "memory", "checkpoint", or "nothing" where `step` is None


class GenerationRunning(_Event, frozen=True, kw_only=True):
    """Every rank has resumed."""

    generation: int
    step: int


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One of an incident's causes."""

    kind: str
    rank: int | None
    node: int
    step: int


class Recovered(_Event, frozen=True, kw_only=True):
    """An incident is over: every rank has completed a step again. Seconds by phase; `total` begins
    at detection.
    """

    generation: int
    kind: str
    rank: int | None
    node: int
    step: int
    resumed_step: int
    steps_lost: int
    survivors_kept_pid: bool
    kept_model: bool
    causes: tuple[Cause, ...]
    detect_s: float
    interrupt_s: float
    respawn_s: float
    rendezvous_s: float
    build_s: float
    restore_s: float
    first_step_s: float
    total_s: float


class SloBreached(_Event, frozen=True, kw_only=True):
    """The recovery just recorded took more than its objective allows: seconds, or steps."""

    objective: str  # "recovery_s" or "steps_lost", as in the table [slo]
    limit: float
    value: float
    generation: int
    kind: str


class CheckpointCommitted(_Event, frozen=True, kw_only=True):
    """A checkpoint exists from now on. `seconds` took its commit alone, not the writing before."""

    step: int
    generation: int
    name: str
    size_bytes: int
    seconds: float


class CheckpointLost(_Event, frozen=True, kw_only=True):
    """A checkpoint that was being written will never exist; training went on."""

    step: int
    generation: int
    rank: int | None
    reason: str


class CheckpointsVanished(_Event, frozen=True, kw_only=True):
    """Committed checkpoints that this job did not remove are in the store no more. They were
    deleted or renamed, or the file system that they lie on is mounted there no more.
    """

    steps: tuple[int, ...]
    url: str


class CheckpointRejected(_Event, frozen=True, kw_only=True):
    """A committed checkpoint was read, and is damaged."""

    step: int
    generation: int
    reason: str


class StepLogged(_Event, frozen=True, kw_only=True):
    """What `run.log` said, once for each step."""

    step: int
    values: dict[str, float | int | str | bool]


AFTER_THE_END = "after the end"  # the topic of what happened behind the resilient function


class Note(_Event, frozen=True, kw_only=True):
    """Something worth knowing, in words."""

    topic: str
    text: str
    node: int | None = None
    rank: int | None = None


class Dropped(_Event, frozen=True, kw_only=True):
    """A message of an older generation was dropped."""

    what: str
    generation: int
    node: int


class JobEnded(_Event, frozen=True, kw_only=True):
    """The one end of a job."""

    status: str  # "finished", "failed", "stopped" or "checked"
    exit_code: int
    reason: str
    steps: int
    final_digest: str | None


Event = (
    JobOpened
    | NodeJoined
    | NodeLeft
    | NodeChecked
    | FaultSeen
    | DecisionMade
    | GenerationOpened
    | GenerationRunning
    | Recovered
    | SloBreached
    | CheckpointCommitted
    | CheckpointLost
    | CheckpointsVanished
    | CheckpointRejected
    | StepLogged
    | Note
    | Dropped
    | JobEnded
)


class EventLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `events.jsonl`."""

    v: int
    at: float
    t: float
    event: Event
