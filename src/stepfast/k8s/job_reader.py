"""Reads a job file and refuses what could not run.

Owns: which values are no values, which do not go together. Does not own: the fields (`job_file`),
the rules of the coordinator's and the agents' settings (`config`).
Invariants: unknown keys are refused; a refusal is one line that names the key and what to change;
what is accepted renders to manifests in which `k8s validate` finds nothing, as long as instance
types are those of the table and no node is chosen that may be taken back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stepfast.config import SETTINGS, load_config
from stepfast.errors import ConfigError
from stepfast.k8s.environment import NVLS, harm_of, is_secret
from stepfast.k8s.instances import INSTANCE_LABEL, ZONE_LABEL
from stepfast.k8s.job_file import JobFile

GRACE_MAX_S = 110  # an EKS node gives ordinary pods 120 s at its shutdown, a spot notice as much
FLUSH_MARGIN_S = 15  # between the flush and the kill: the step that is under way, the goodbye
COMPLETIONS_MAX = 4096
NAME_MAX = 40  # with `-node-0-4095-abcde` behind it a pod's name must stay below 64
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
        "metrics_port",
        "nodes",
        "nproc_per_node",
        "summary",
        "token_file",
    }
)
_TABLES = ("health", "slo")  # their settings have tables of their own
_AMOUNT_MAX = 1 << 20  # of anything counted in a node
_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_LABEL_VALUE.pattern}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(rf"{_SUBDOMAIN.pattern}/[A-Za-z0-9._-]{{1,253}}")
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s/$]+)*/?")
_LAUNCHERS = re.compile(r"PET_\w*|MASTER_(ADDR|PORT)|(LOCAL_|NODE_)?RANK|WORLD_SIZE|STEPFAST_\w*")
_OURS = re.compile(r"JOB_COMPLETION_INDEX|JOBSET_RESTART_ATTEMPT|NODE_NAME|POD_\w*|HOME|USER")


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
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`$.", "`").replace("\n", " ")) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    for complaint in _complaints(job):
        raise ConfigError(complaint)
    return job


def _complaints(job: JobFile) -> Iterator[str]:
    yield from _about_names(job)
    yield from _about_nodes(job)
    yield from _about_placement(job)
    yield from _about_memory(job)
    yield from _about_storage(job)
    yield from _about_environment(job)
    yield from _about_settings(job)
    if not 1 <= job.user_id < 1 << 31:
        yield f"user_id must be at least 1, not {job.user_id}: pods do not run as root"


def _about_names(job: JobFile) -> Iterator[str]:
    if _DNS_LABEL.fullmatch(job.name) is None or len(job.name) > NAME_MAX:
        yield (
            f"name {job.name!r} must begin with a letter and have lower-case letters, digits and"
            f" '-', at most {NAME_MAX}"
        )
    if _DNS_LABEL.fullmatch(job.namespace) is None or len(job.namespace) > 63:
        yield f"namespace {job.namespace!r} is no name of a namespace"
    if re.fullmatch(r"[^\s@]+@sha256:[0-9a-f]{64}", job.image) is None:
        yield f"image {job.image!r} must be named by its digest: NAME@sha256:..."
    if not job.script.startswith("/"):
        yield f"script {job.script!r} must be an absolute path inside the image"
    if any("\0" in text for text in (job.script, job.health.check, *job.args)):
        yield "args, script and health.check cannot have a character 0 in them"
    if job.engine not in ("stepfast", "nvrx"):
        yield f"engine must be stepfast or nvrx, not {job.engine!r}"
    if job.engine != "stepfast" and "engine" not in SETTINGS:
        yield f"engine {job.engine}: nodes run stepfast's own engine alone so far; leave it out"
    if job.queue and _LABEL_VALUE.fullmatch(job.queue) is None:
        yield f"queue {job.queue!r} is no name of a queue"
    if job.monitoring and _DNS_LABEL.fullmatch(job.monitoring.namespace) is None:
        yield f"monitoring.namespace {job.monitoring.namespace!r} is no name of a namespace"


def _about_nodes(job: JobFile) -> Iterator[str]:
    nodes = job.nodes
    if not 1 <= nodes.count <= COMPLETIONS_MAX:
        yield f"nodes.count must be 1 to {COMPLETIONS_MAX}, not {nodes.count}"
    if nodes.spares != 0 and "spares" not in SETTINGS:
        yield f"nodes.spares {nodes.spares}: the coordinator keeps no spares so far; leave it out"
    if bool(nodes.instance) == (nodes.resources is not None):
        yield "nodes needs one of instance and resources"
    asked = job.resources
    amounts = (
        ("nodes.ephemeral_gib", nodes.ephemeral_gib, 1),
        ("nodes.resources.cpus", asked.cpus, 1),
        ("nodes.resources.memory_gib", asked.memory_gib, 1),
        ("nodes.resources.gpus", asked.gpus, 0),
        ("nodes.resources.efa", asked.efa, 0),
        ("nodes.ranks", nodes.ranks, 0),
    )
    for key, amount, least in amounts:
        if not least <= amount <= _AMOUNT_MAX:
            yield f"{key} must be {least} to {_AMOUNT_MAX}, not {amount}"
    if asked.efa and not asked.gpus:
        yield "nodes.resources.efa needs gpus: nothing on a CPU uses it"
    if job.ranks < 1:
        yield "nodes.ranks must be given and at least 1 where a node has no GPU"
    if asked.gpus and job.ranks > asked.gpus:
        yield f"nodes.ranks {job.ranks} are more than the node's {asked.gpus} GPUs"


def _about_placement(job: JobFile) -> Iterator[str]:
    placement = job.placement
    if not placement.priority_class:
        yield (
            "placement.priority_class: name a PriorityClass, or any pod of a higher one ends the"
            " job; kubectl create priorityclass training --value=1000 makes one"
        )
    if _SUBDOMAIN.fullmatch(placement.priority_class) is None:
        yield f"placement.priority_class {placement.priority_class!r} is no name of one"
    for key in (placement.topology_key, *placement.node_selector):
        if key and _LABEL_KEY.fullmatch(key) is None:
            yield f"placement: {key!r} is no label of a node"
    for value in (placement.zone, *placement.node_selector.values()):
        if value and _LABEL_VALUE.fullmatch(value) is None:
            yield f"placement: {value!r} is no value of a label"
    ours = {INSTANCE_LABEL: job.nodes.instance, ZONE_LABEL: placement.zone}
    for key, value in ours.items():
        if value and key in placement.node_selector:
            yield f"placement.node_selector: {key} is {value} already; take it out"


def _about_memory(job: JobFile) -> Iterator[str]:
    model = job.model
    if not 0 < model.state_gib_per_rank <= _AMOUNT_MAX:
        yield f"model.state_gib_per_rank must be above 0, not {model.state_gib_per_rank:g}"
    if not 0 <= model.working_gib_per_rank <= _AMOUNT_MAX:
        yield f"model.working_gib_per_rank must be at least 0, not {model.working_gib_per_rank:g}"
    if not 1 <= model.shm_gib <= _AMOUNT_MAX:
        yield f"model.shm_gib must be at least 1, not {model.shm_gib}"
    snapshots, working = job.snapshot_mib / 1024, job.working_mib / 1024
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
    if storage.claim and _SUBDOMAIN.fullmatch(storage.claim) is None:
        yield f"storage.claim {storage.claim!r} is no name of a claim"
    if storage.s3 and _S3.fullmatch(storage.s3) is None:
        yield f"storage.s3 {storage.s3!r} must be s3://BUCKET/PREFIX"
    if storage.role_arn and re.fullmatch(r"arn:[^\s]+", storage.role_arn) is None:
        yield f"storage.role_arn {storage.role_arn!r} must begin with arn:"
    if not 1 <= job.grace_s <= GRACE_MAX_S:
        yield f"grace_s must be at most {GRACE_MAX_S}, not {job.grace_s}: a node's end gives 120 s"
    if not 1 <= storage.flush_s <= job.grace_s - FLUSH_MARGIN_S:
        yield (
            f"storage.flush_s must be 1 to {job.grace_s - FLUSH_MARGIN_S}, not {storage.flush_s}:"
            f" grace_s less a margin of {FLUSH_MARGIN_S} s"
        )


def _about_environment(job: JobFile) -> Iterator[str]:
    for table, entries in (("env", job.env), ("secrets", job.secrets)):
        for name in sorted(entries):
            if _VARIABLE.fullmatch(name) is None:
                yield f"{table}.{name} is no name of a variable"
            if _LAUNCHERS.fullmatch(name) or _OURS.fullmatch(name):
                yield f"{table}.{name} is set by the launcher; take it out"
    for name, value in sorted(job.env.items()):
        if harm := harm_of(name, value):
            yield f"env.{name}: {harm}; take it out"
        if is_secret(name, value):
            yield f'env.{name} is a secret: make it secrets.{name} = "SECRET/KEY"'
        if name == NVLS and value == "0" and job.engine != "nvrx":
            yield f"env.{NVLS} = 0 costs bandwidth, and only engine nvrx asks for it; take it out"
        if "\0" in value:
            yield f"env.{name} cannot have a character 0 in it"
    for name, place in sorted(job.secrets.items()):
        if name in job.env:
            yield f"secrets.{name} stands in env, too; keep one of them"
        if _SECRET_KEY.fullmatch(place) is None:
            yield f"secrets.{name} {place!r} must be SECRET/KEY"


def _about_settings(job: JobFile) -> Iterator[str]:
    for name in sorted(job.settings):
        table, _, key = name.partition("_")
        if table in _TABLES and name in SETTINGS:
            yield f"settings.{name} is {key} in [{table}]; move it there"
        if name in DECIDED_SETTINGS:
            yield f"settings.{name} follows from the rest of the file; take it out"
    counts = {"nodes": job.nodes.count, "nproc_per_node": job.ranks}
    limit = {"join_limit_s": job.join_limit_s}
    _check_settings({**job.settings, **job.table_settings, **counts, **limit})
    if job.join_limit_s < 1:
        yield f"join_limit_s must be at least 1, not {job.join_limit_s}"


def _check_settings(settings: Mapping[str, Any]) -> None:
    """By the program's own rules. Raises ConfigError."""
    for name in sorted(settings):
        if name not in SETTINGS:
            raise ConfigError(f"settings.{name} is no setting")
    load_config(Path(os.devnull), {}, settings)
