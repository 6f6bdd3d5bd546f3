"""The state of a manifest's run, its inputs and its orders.

Owns: the types. Does not own: how they change (`machine`). Times are of the runner's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stepfast.k8s.local.model import Workload


class ContainerStatus(StrEnum):
    """Where a container stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeState:
    """One probe of a running container."""

    next_at: float
    failures: int = 0
    successes: int = 0
    is_asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """One container of a pod. `restarts` tells its processes apart."""

    status: ContainerStatus = ContainerStatus.WAITING
    restarts: int = 0
    quick_restarts: int = 0  # since it last ran for long: they delay the next one
    start_at: float = 0.0
    began_at: float = 0.0
    exit_code: int | None = None
    kill_at: float | None = None  # it was told to end, and is killed then
    probes: Mapping[str, ProbeState] = field(default_factory=dict)
    is_started: bool = True
    is_ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod. `number`: of all pods of this run, from which its address comes."""

    name: str
    hostname: str
    job: str
    index: int
    number: int
    attempt: int  # of the JobSet
    containers: Mapping[str, ContainerState]
    is_leaving: bool = False
    is_disrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One index of a job and what became of its pods."""

    failures: int = 0
    ignored: int = 0
    create_at: float = 0.0
    is_done: bool = False
    is_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that decisions depend on."""

    workload: Workload
    base_delay_s: float  # kubelet's and the Job controller's first delay
    pods: Mapping[str, Pod] = field(default_factory=dict)
    indexes: Mapping[tuple[str, int], Index] = field(default_factory=dict)
    failed_jobs: frozenset[str] = frozenset()
    container_restarts: Mapping[str, int] = field(default_factory=dict)  # by job
    pods_made: int = 0
    attempt: int = 0  # restarts of the JobSet
    counted_attempts: int = 0
    is_restarting: bool = False
    ending: tuple[int, str] | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Input: time went by."""


@dataclass(frozen=True, slots=True)
class ContainerEnded:
    """Input: a container's first process ended; 128 + N for a signal."""

    pod: str
    container: str
    restarts: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """Input: what a probe found."""

    pod: str
    container: str
    restarts: int
    probe: str
    is_ok: bool
    words: str


@dataclass(frozen=True, slots=True)
class PodDeleted:
    """Input: somebody deletes a pod. `is_disrupted`: by the eviction API; `is_lost`: its node went
    with it, and nobody is asked.
    """

    pod: str
    is_disrupted: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Input: the user ends the run; asked again, without a grace."""

    exit_code: int


Given = Tick | ContainerEnded | ProbeAnswered | PodDeleted | StopAsked


@dataclass(frozen=True, slots=True)
class MakePod:
    """Order: an address, a name in DNS, empty volumes."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class RemovePod:
    """Order: its volumes and its name go."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class StartContainer:
    """Order: its command, as a process of its own."""

    pod: Pod
    container: str
    restarts: int


@dataclass(frozen=True, slots=True)
class SignalContainer:
    """Order: to its first process; `is_kill`: SIGKILL instead of SIGTERM."""

    pod: str
    container: str
    is_kill: bool


@dataclass(frozen=True, slots=True)
class AskProbe:
    """Order: look, and say what was found."""

    pod: Pod
    container: str
    restarts: int
    probe: str


@dataclass(frozen=True, slots=True)
class Say:
    """Order: a line for people."""

    text: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """Order: nothing is left to do."""

    exit_code: int
    reason: str


Order = MakePod | RemovePod | StartContainer | SignalContainer | AskProbe | Say | EndRun
