"""What a JobSet or Jobs say, as far as a run on one machine follows it.

Owns: the types. Does not own: reading them (`reading`), following them (`machine`).
Invariant: frozen; whatever is not here is not followed, and `reading` refuses or names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

INDEX_KEY = "batch.kubernetes.io/job-completion-index"
JOBSET_PREFIX = "jobset.sigs.k8s.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    """`In` or `NotIn` some exit codes."""

    is_in: bool
    codes: frozenset[int]

    def match(self, code: int) -> bool:
        """Whether a container's end with this code is meant."""
        return (code in self.codes) is self.is_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe of a container; one of `path`, `command` and neither (a TCP connection)."""

    path: str | None = None
    port: int = 0
    command: tuple[str, ...] = ()
    delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    failures_max: int = 3
    successes_min: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable: a text, a field of the pod, or a key of a Secret."""

    name: str
    value: str = ""
    field_path: str = ""
    secret: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A volume's place in a container."""

    volume: str
    path: str
    sub_path: str = ""
    is_read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """`kind`: memory, disk, secret or claim; `source`: the Secret's or the claim's name."""

    name: str
    kind: str
    size_bytes: int | None = None
    source: str = ""
    items: tuple[tuple[str, str], ...] = ()  # key, path
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container. `probes` by startup, liveness, readiness."""

    name: str
    command: tuple[str, ...]
    variables: tuple[Variable, ...] = ()
    mounts: tuple[Mount, ...] = ()
    probes: Mapping[str, Probe] = field(default_factory=dict)
    restart_policy: str = ""  # empty: the pod's
    restarts_on: tuple[ExitCodes, ...] = ()
    working_directory: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """What every pod of a job is made of."""

    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = "Never"
    grace_s: float = 30.0

    def container(self, name: str) -> Container:
        """The container of this name."""
        return next(c for c in self.containers if c.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRule:
    """Of a podFailurePolicy: by exit codes, or (`exits` None) where the pod was disrupted."""

    action: str
    container: str = ""  # empty: any
    exits: ExitCodes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One Indexed Job. `replicated`: its name in the JobSet; pods are called `name`-INDEX."""

    name: str
    replicated: str
    completions: int
    parallelism: int
    pod: PodTemplate
    backoff_limit: int = 6
    index_limit: int | None = None
    failed_indexes_max: int | None = None
    rules: tuple[FailureRule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRule:
    """Of a JobSet's failurePolicy. Empty: any reason, message or job."""

    action: str
    reasons: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything that runs. `restarts_max` None: the first failed job fails it all."""

    name: str
    namespace: str
    subdomain: str
    is_set: bool
    jobs: tuple[Job, ...]
    restarts_max: int | None = None
    rules: tuple[SetRule, ...] = ()
    success_of: tuple[str, ...] = ()  # replicated jobs; empty: all
    is_any_enough: bool = False

    def job(self, name: str) -> Job:
        """The job of this name."""
        return next(job for job in self.jobs if job.name == name)
