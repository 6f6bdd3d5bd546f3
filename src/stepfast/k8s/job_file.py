"""The job file: what a user says of a job on Kubernetes, typed.

Owns: its fields and their defaults, what follows from them. Does not own: reading it and what is
refused (`job_reader`), what becomes of it (`manifest`).
"""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec

from stepfast.k8s.instances import instance_of

SLOTS_PER_RANK = 4  # three for an overlapped copy, one more while one is written to the store
AGENT_MIB = 1024  # the agent, its store, and the zygote with torch loaded
_HEADER_PERCENT = 2  # of a slot: names, shapes, alignment


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the job file."""


class Resources(_Table, frozen=True, kw_only=True):
    """What one node's pod asks for, where no instance type says it."""

    cpus: int
    memory_gib: int
    gpus: int = 0
    efa: int = 0


class Nodes(_Table, frozen=True, kw_only=True):
    """How many, and what each is. `ranks`: on each node; left out, one for each GPU.
    `ephemeral_gib`: of the node's disk, for logs, compile caches and what the script writes.
    """

    count: int
    ranks: int = 0
    instance: str = ""
    resources: Resources | None = None
    spares: int = 0
    ephemeral_gib: int = 50


class Model(_Table, frozen=True, kw_only=True):
    """What decides the memory for snapshots. `state_gib_per_rank`: parameters, gradients left out,
    and the optimizer's state, of one rank; `working_gib_per_rank`: what its process needs besides.
    """

    state_gib_per_rank: float
    working_gib_per_rank: float = 4.0
    shm_gib: int = 8


class Storage(_Table, frozen=True, kw_only=True):
    """Where checkpoints go: a claim for a shared file system, or S3. `role_arn`: IRSA; without it
    the role comes from an EKS Pod Identity association. `flush_s`: how long a node may take to
    write its last checkpoint when it has to leave.
    """

    claim: str = ""
    s3: str = ""
    role_arn: str = ""
    flush_s: int = 60


class Placement(_Table, frozen=True, kw_only=True):
    """Which nodes, and who has to give way. `topology_key`: nodes that share this label's value are
    preferred.
    """

    priority_class: str = ""
    zone: str = ""
    topology_key: str = ""
    node_selector: dict[str, str] = {}


class Slo(_Table, frozen=True, kw_only=True):
    """What is promised: the coordinator's settings slo_recovery_s and slo_steps_lost."""

    recovery_s: float | None = None
    steps_lost: int | None = None


class Health(_Table, frozen=True, kw_only=True):
    """What decides whether a node is fit: the agents' settings of the same names."""

    check: str = ""
    unknown: str = ""
    limit_s: float | None = None


class Monitoring(_Table, frozen=True, kw_only=True):
    """Prometheus with its operator: the namespace that it runs in; without it nobody outside of the
    job reads its metrics.
    """

    namespace: str


class JobFile(_Table, frozen=True, kw_only=True):
    """The whole file. `secrets`: variables out of Secrets, as NAME = "SECRET/KEY"."""

    name: str
    image: str
    script: str
    nodes: Nodes
    model: Model
    storage: Storage
    namespace: str = "default"
    args: list[str] = []
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    engine: str = "stepfast"
    queue: str = ""
    grace_s: int = 100
    join_limit_s: int = 900
    user_id: int = 10001
    settings: dict[str, str | int | float | list[str]] = {}  # the coordinator's, as stepfast.toml's
    placement: Placement = Placement()
    slo: Slo = Slo()
    health: Health = Health()
    monitoring: Monitoring | None = None

    @property
    def resources(self) -> Resources:
        """Of one node's pod. Raises ConfigError for an instance type that is not known."""
        if self.nodes.resources is not None:
            return self.nodes.resources
        row = instance_of(self.nodes.instance)
        return Resources(
            cpus=row.pod_cpus, memory_gib=row.pod_memory_gib, gpus=row.gpus, efa=row.efas
        )

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.nodes.ranks or self.resources.gpus

    @property
    def snapshot_mib(self) -> int:
        """Of one node's memory for snapshots: each rank's slots, and a little for headers."""
        state_mib = self.model.state_gib_per_rank * 1024
        slot_mib = ceil(state_mib * (100 + _HEADER_PERCENT) / 100) + 1
        return slot_mib * SLOTS_PER_RANK * self.ranks

    @property
    def working_mib(self) -> int:
        """Of one node's memory for its processes: the ranks, and those that start them."""
        return ceil(self.model.working_gib_per_rank * 1024) * self.ranks + AGENT_MIB

    @property
    def table_settings(self) -> dict[str, Any]:
        """Settings that come from tables of their own, by the names that they have in `config`."""
        tables = {"slo": self.slo, "health": self.health}
        found = {
            f"{table}_{key}": value
            for table, values in tables.items()
            for key, value in msgspec.structs.asdict(values).items()
        }
        return {name: value for name, value in found.items() if value not in (None, "")}
