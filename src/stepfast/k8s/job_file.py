"""The job file: what a user says of a job on Kubernetes, typed.

Owns: its fields, their defaults, what is refused. Does not own: what becomes of it (`manifest`).
Invariants: unknown keys are refused; a refusal is one line that names the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import msgspec

from stepfast.config import SETTINGS, load_config
from stepfast.errors import ConfigError
from stepfast.k8s.instances import Instance, instance_of

GRACE_MAX_S = 110  # an EKS node gives ordinary pods 120 s at its shutdown, a spot notice as much
COMPLETIONS_MAX = 4096
SLOTS_PER_RANK = 4  # three for an overlapped copy, one more while one is written to the store
# What the manifest itself decides; the others of the coordinator's settings may be given.
DECIDED_SETTINGS = frozenset(
    {
        "checkpoints",
        "device",
        "host",
        "job_dir",
        "job_id",
        "join_limit_s",
        "listen",
        "memory_dir",
        "nodes",
        "nproc_per_node",
        "summary",
        "token_file",
    }
)
_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME_MAX = 40  # with `-node-0-4095-abcde` behind it a pod's name must stay below 64
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?")
_OURS = frozenset({"JOB_COMPLETION_INDEX", "POD_IP", "POD_NAME", "POD_NAMESPACE", "POD_UID"})
_LAUNCHERS = ("PET_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "STEPFAST_")
# Set by AWS's NCCL plugin itself, or harmful with its present versions.
DENIED_VARIABLES = frozenset(
    {
        "FI_EFA_USE_DEVICE_RDMA",
        "FI_EFA_FORK_SAFE",
        "FI_EFA_ENABLE_SHM_TRANSFER",
        "FI_PROVIDER",
        "NCCL_ALGO",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_BLOCKING_WAIT",
        "NCCL_BUFFSIZE",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NSOCKS_PERTHREAD",
        "NCCL_P2P_NET_CHUNKSIZE",
        "NCCL_PROTO",
        "NCCL_SOCKET_NTHREADS",
    }
)


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the job file."""


class Resources(_Table):
    """What one node's pod asks for, where no instance type says it."""

    cpus: int
    memory_gib: int
    gpus: int = 0
    efa: int = 0


class Nodes(_Table):
    """How many, and what each is. `ranks`: on each node; left out, one for each GPU."""

    count: int
    ranks: int = 0
    instance: str = ""
    resources: Resources | None = None
    spares: int = 0
    ephemeral_gib: int = 50


class Model(_Table):
    """What decides the memory for snapshots. `state_gib_per_rank`: parameters, gradients left out,
    and the optimizer's state, of one rank; `working_gib_per_rank`: what its process needs besides.
    """

    state_gib_per_rank: float
    working_gib_per_rank: float = 4.0
    shm_gib: int = 8


class Storage(_Table):
    """Where checkpoints go: a claim for a shared file system, or S3. `role_arn`: IRSA; without it
    the role comes from an EKS Pod Identity association.
    """

    claim: str = ""
    s3: str = ""
    role_arn: str = ""


class Placement(_Table):
    """Which nodes. `topology_key`: nodes that share this label's value are preferred."""

    zone: str = ""
    topology_key: str = ""
    priority_class: str = ""
    node_selector: dict[str, str] = {}


class Slo(_Table):
    """What is promised; kept as annotations."""

    recovery_s: float | None = None
    steps_lost: int | None = None


class JobFile(_Table):
    """The whole file."""

    name: str
    image: str
    script: str
    nodes: Nodes
    model: Model
    storage: Storage
    namespace: str = "default"
    args: list[str] = []
    env: dict[str, str] = {}
    engine: str = "stepfast"
    queue: str = ""
    grace_s: int = 100
    join_limit_s: int = 900
    user_id: int = 10001
    settings: dict[str, str | int | float] = {}  # the coordinator's, as in stepfast.toml
    placement: Placement = Placement()
    slo: Slo = Slo()

    @property
    def instance(self) -> Instance | None:
        """The table's row, where an instance type was given."""
        return instance_of(self.nodes.instance) if self.nodes.instance else None

    @property
    def resources(self) -> Resources:
        """Of one node's pod."""
        if self.nodes.resources is not None:
            return self.nodes.resources
        row = instance_of(self.nodes.instance)
        return Resources(cpus=row.cpus, memory_gib=row.pod_memory_gib, gpus=row.gpus, efa=row.efa)

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        return self.nodes.ranks or self.resources.gpus

    @property
    def snapshot_mib(self) -> int:
        """Of one node's memory for snapshots: each rank's slots, and a little for headers."""
        slot_mib = ceil(self.model.state_gib_per_rank * 1024 * 1.02) + 1
        return slot_mib * SLOTS_PER_RANK * self.ranks


def read_job_file(path: Path) -> JobFile:
    """The job file at this path. Raises ConfigError with one line that says what to change."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from error
    try:
        return parse_job_file(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_job_file(text: str) -> JobFile:
    """A job file's text. Raises ConfigError with one line that says what to change."""
    try:
        job = msgspec.toml.decode(text, type=JobFile)
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error).replace("$.", "").replace("\n", " ")) from error
    except ValueError as error:  # tomllib's own: not TOML at all
        raise ConfigError(f"not valid TOML: {error}") from error
    for complaint in _complaints(job):
        raise ConfigError(complaint)
    return job


def _complaints(job: JobFile) -> Iterator[str]:
    yield from _about_names(job)
    yield from _about_nodes(job)
    yield from _about_memory(job)
    yield from _about_storage(job)
    yield from _about_environment(job)
    yield from _about_settings(job)
    if not 15 <= job.grace_s <= GRACE_MAX_S:
        yield f"grace_s must be 15 to {GRACE_MAX_S}, not {job.grace_s}: a node's end gives 120 s"
    if job.join_limit_s < 1:
        yield f"join_limit_s must be at least 1, not {job.join_limit_s}"
    if job.user_id < 1:
        yield "user_id must be at least 1: pods do not run as root"
    if job.slo.recovery_s is not None and not job.slo.recovery_s > 0:
        yield f"slo.recovery_s must be above 0, not {job.slo.recovery_s:g}"
    if job.slo.steps_lost is not None and job.slo.steps_lost < 0:
        yield f"slo.steps_lost must be at least 0, not {job.slo.steps_lost}"


def _about_names(job: JobFile) -> Iterator[str]:
    if _DNS_LABEL.fullmatch(job.name) is None or len(job.name) > _NAME_MAX:
        yield (
            f"name {job.name!r} must begin with a letter and have lower-case letters, digits and"
            f" '-', at most {_NAME_MAX}"
        )
    if _DNS_LABEL.fullmatch(job.namespace) is None or len(job.namespace) > 63:
        yield f"namespace {job.namespace!r} is no name of a namespace"
    if not job.image or any(c.isspace() for c in job.image):
        yield f"image {job.image!r} is no name of an image"
    elif re.fullmatch(r".+@sha256:[0-9a-f]{64}", job.image) is None:
        yield f"image {job.image} must be named by its digest: NAME@sha256:..."
    if not job.script.startswith("/"):
        yield f"script {job.script!r} must be an absolute path inside the image"
    if job.engine not in ("stepfast", "nvrx"):
        yield f"engine must be stepfast or nvrx, not {job.engine!r}"


def _about_nodes(job: JobFile) -> Iterator[str]:
    nodes = job.nodes
    if not 1 <= nodes.count <= COMPLETIONS_MAX:
        yield f"nodes.count must be 1 to {COMPLETIONS_MAX}, not {nodes.count}"
    if nodes.spares != 0:
        yield f"nodes.spares {nodes.spares}: the coordinator keeps no spares yet; leave it out"
    if bool(nodes.instance) == (nodes.resources is not None):
        yield "nodes needs one of instance and resources"
    if nodes.ephemeral_gib < 1:
        yield f"nodes.ephemeral_gib must be at least 1, not {nodes.ephemeral_gib}"
    asked = job.resources
    for name, least in (("cpus", 1), ("memory_gib", 1), ("gpus", 0), ("efa", 0)):
        if getattr(asked, name) < least:
            yield f"nodes.resources.{name} must be at least {least}, not {getattr(asked, name)}"
    if asked.efa and not asked.gpus:
        yield "nodes.resources.efa needs gpus: nothing on a CPU uses it"
    if nodes.ranks < 0 or job.ranks < 1:
        yield "nodes.ranks must be given and at least 1 where a node has no GPU"
    if asked.gpus and job.ranks > asked.gpus:
        yield f"nodes.ranks {job.ranks} are more than the node's {asked.gpus} GPUs"


def _about_memory(job: JobFile) -> Iterator[str]:
    model = job.model
    if not 0 < model.state_gib_per_rank < 1 << 20:
        yield f"model.state_gib_per_rank must be above 0, not {model.state_gib_per_rank:g}"
    if not 0 <= model.working_gib_per_rank < 1 << 20:
        yield f"model.working_gib_per_rank must be at least 0, not {model.working_gib_per_rank:g}"
    if model.shm_gib < 1:
        yield f"model.shm_gib must be at least 1, not {model.shm_gib}"
    snapshots, working = job.snapshot_mib / 1024, model.working_gib_per_rank * job.ranks
    needed = snapshots + model.shm_gib + working
    if needed > job.resources.memory_gib:
        yield (
            f"a node's pod has {job.resources.memory_gib} GiB of memory, and needs {needed:.1f}:"
            f" snapshots {snapshots:.1f}, /dev/shm {model.shm_gib}, processes {working:.1f};"
            " use more nodes, or correct [model]"
        )


def _about_storage(job: JobFile) -> Iterator[str]:
    storage = job.storage
    if bool(storage.claim) == bool(storage.s3):
        yield "storage needs one of claim and s3"
    if storage.s3 and _S3.fullmatch(storage.s3) is None:
        yield f"storage.s3 {storage.s3!r} must be s3://BUCKET/PREFIX"
    if storage.role_arn and not storage.role_arn.startswith("arn:"):
        yield f"storage.role_arn {storage.role_arn!r} must begin with arn:"


def _about_environment(job: JobFile) -> Iterator[str]:
    for name, value in sorted(job.env.items()):
        if _VARIABLE.fullmatch(name) is None:
            yield f"env.{name} is no name of a variable"
        if name in _OURS or name.startswith(_LAUNCHERS):
            yield f"env.{name} is set by the launcher; take it out"
        if name in DENIED_VARIABLES or name.startswith("RDMAV_"):
            yield f"env.{name}: AWS's NCCL plugin sets this as it needs it; take it out"
        if name == "NCCL_NVLS_ENABLE" and value == "0" and job.engine != "nvrx":
            yield "env.NCCL_NVLS_ENABLE = 0 costs bandwidth, and only engine nvrx asks for it"


def _about_settings(job: JobFile) -> Iterator[str]:
    for name in sorted(job.settings):
        if name in DECIDED_SETTINGS:
            yield f"settings.{name} follows from the rest of the file; take it out"
        elif name not in SETTINGS or str(SETTINGS[name].type).startswith("tuple"):
            yield f"settings.{name} is no setting that a manifest can carry"
    load_config(Path(os.devnull), {}, job.settings)  # refuses by itself
