"""Every setting of a job: frozen, units in names, checked once. `stepfast.toml` < environment <
flags.

Each field says what it is, its unit, what too small and too big cost, and where its default comes
from. Unknown keys are refused by name. The environment and the command line are read at the door
(`cli`), never here.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from stepfast.errors import ConfigError

ENVIRONMENT_PREFIX = "STEPFAST_"
FILE_NAME = "stepfast.toml"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # part of a directory's name
_RANKS_MAX = 4096  # more than any one job here was simulated with


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The settings of one job, whichever process reads them."""

    nodes: int = _setting(1, "how many nodes the job has")
    nproc_per_node: int = _setting(1, "ranks on each node")
    job_dir: str = _setting(
        "", "where events, logs and the summary go (default: a new one in ./stepfast-jobs)"
    )
    job_id: str = _setting(
        "",
        "what the job is called, in its checkpoints and in memory; give it where the job directory"
        " may be lost, as in a pod (default: made up once, and kept in the job directory)",
    )
    summary: str = _setting("", "also copy summary.json to this file")
    recovery: str = _setting(
        "on",
        "on: recover; report: only record hangs, end at other faults; off: end at the first fault",
    )
    hang: str = _setting(
        "recover", "recover, or report: what is done about a rank without progress"
    )
    hang_floor_s: float | None = _setting(
        None,
        "a step may always take this long, seconds; too small: false alarms, too big: slow"
        " detection (default: 2 on CPU, 60 on CUDA)",
    )
    hang_ceiling_s: float = _setting(
        600.0, "no phase may take longer than this, seconds; first steps and unseen sections get it"
    )
    heartbeat_interval_s: float = _setting(
        0.5, "how often an agent says that it lives, seconds; bigger: a lost node is noticed later"
    )
    restarts_per_hour: int = _setting(
        30, "restart budget; time and every step never reached before refill it; 0: none"
    )
    snapshot_interval_steps: int = _setting(
        1, "a snapshot every so many steps; bigger: cheaper, and a fault costs more steps"
    )
    checkpoints: str = _setting(
        "",
        "where durable checkpoints go: a directory, s3://BUCKET/PREFIX, or none"
        " (default: checkpoints/ in the job directory)",
    )
    checkpoint_interval_steps: int = _setting(
        0, "make every so-many-th step durable; 0: not by steps; the last step always is"
    )
    checkpoint_interval_s: float = _setting(
        600.0,
        "make a step durable every so often, seconds; 0: not by time; too big: what is lost with a"
        " node's memory",
    )
    keep_checkpoints: int = _setting(
        2, "how many of the newest checkpoints are kept; 1 leaves none to fall back to"
    )
    keep_every_steps: int = _setting(
        0, "keep checkpoints of every so-many-th step for good; 0: none"
    )
    checkpoint_bytes_per_s: float | None = _setting(
        None,
        "each rank's limit on writing, bytes a second (default: what the store takes)",
    )
    checkpoint_metadata: tuple[str, ...] = _setting(
        (), "KEY=VALUE, kept in every checkpoint's manifest; may be repeated; no secrets"
    )
    on_damage: str = _setting(
        "fall-back", "fall-back, or stop: what is done where the newest checkpoint is damaged"
    )
    start_fresh: tuple[str, ...] = _setting(
        (),
        "a tracked object, or a part of one (model.head), that the checkpoint may lack: it then is"
        " as the script makes it; may be repeated",
    )
    device: str = _setting("auto", "cpu, cuda, or auto")
    memory_dir: str = _setting("/dev/shm", "a memory-backed directory for the snapshot slots")
    preload: tuple[str, ...] = _setting((), "more modules for the zygote to import")
    fault: tuple[str, ...] = _setting(
        (), "inject a fault: KIND@rank=R,step=S[,at=POINT][,for=SECONDS]; may be repeated"
    )
    listen: str = _setting("127.0.0.1:0", "HOST:PORT of the coordinator; port 0: any free one")
    host: str = _setting("127.0.0.1", "the address at which other nodes reach this node's store")
    token_file: str = _setting(
        "", "file with the token that agents must show; needed off loopback (or STEPFAST_TOKEN)"
    )
    join_limit_s: float = _setting(600.0, "how long nodes may take to join, seconds")
    metrics_port: int = _setting(
        0,
        "port of /metrics, /healthz and /livez, at the address of --listen or --host, for anybody"
        " who can reach it; 0: none",
    )
    slo_recovery_s: float | None = _setting(
        None,
        "no recovery shall take longer than this, seconds from its detection; one that does is an"
        " event and counted (default: no objective)",
    )
    slo_steps_lost: int | None = _setting(
        None, "no recovery shall cost more steps than this; as above (default: no objective)"
    )
    health_check: str = _setting(
        "",
        "a command that says whether this node is fit, by its exit code and JSON on its output; run"
        " without a shell before each join and rejoin",
    )
    health_unknown: str = _setting(
        "admit",
        "admit, or refuse: what is done with a node of which something could not be looked at",
    )
    health_gpus: int = _setting(
        0, "how many GPUs this node has; fewer: it is unfit; 0: as many as /dev has"
    )
    health_efas: int = _setting(
        0, "how many EFA adapters this node has; fewer: it is unfit; 0: as many as there are"
    )
    health_limit_s: float = _setting(
        30.0, "a health check may take this long, seconds; a node whose check takes longer is unfit"
    )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.nproc_per_node


CHOICES = {
    "recovery": ("off", "report", "on"),
    "hang": ("recover", "report"),
    "on_damage": ("fall-back", "stop"),
    "device": ("auto", "cpu", "cuda"),
    "health_unknown": ("admit", "refuse"),
}
_AT_LEAST = {
    "nodes": 1,
    "nproc_per_node": 1,
    "restarts_per_hour": 0,
    "snapshot_interval_steps": 1,
    "checkpoint_interval_steps": 0,
    "checkpoint_interval_s": 0,
    "keep_checkpoints": 1,
    "keep_every_steps": 0,
    "metrics_port": 0,
    "slo_steps_lost": 0,
    "health_gpus": 0,
    "health_efas": 0,
}
_TABLES = ("slo", "health")  # a key K of table T is the setting T_K
_PORT_MAX = 65535
SETTINGS = {f.name: f for f in fields(JobConfig)}


def load_config(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> JobConfig:
    """Merge file < environment < flags and check. Raises ConfigError with one line that says what
    to change.

    `file` None: `stepfast.toml` is read where it lies in the working directory. `flags`: only those
    that were given.
    """
    merged: dict[str, Any] = {}
    merged.update(_from_file(file))
    merged.update(_from_environment(environment))
    merged.update(flags)
    config = JobConfig(**{key: _checked(key, value) for key, value in merged.items()})
    _check_whole(config)
    return config


def _from_file(file: Path | None) -> dict[str, Any]:
    path = file if file is not None else Path(FILE_NAME)
    if file is None and not path.exists():
        return {}
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in _TABLES and isinstance(value, dict):
            found.update(_from_table(path, key, value))
        elif key not in SETTINGS:
            raise ConfigError(f"{path}: unknown key {key!r}{_suggestion(key)}")
        else:
            found[key] = value
    return found


def _from_table(path: Path, name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a table; they have its name in front."""
    known = {key.removeprefix(f"{name}_") for key in SETTINGS if key.startswith(f"{name}_")}
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(known))}"
            )
            raise ConfigError(f"{path}: unknown key {key!r} in [{name}]{hint}")
    return {f"{name}_{key}": value for key, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key == "token" or key.startswith("internal_"):
            continue
        if key not in SETTINGS:
            raise ConfigError(f"unknown variable {name} in the environment{_suggestion(key)}")
        found[key] = parse_text(key, text)
    return found


def parse_text(key: str, text: str) -> Any:
    """A setting's value from text (environment, flag). Raises ConfigError."""
    kind = str(SETTINGS[key].type)
    try:
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
        if kind.startswith("tuple"):
            return tuple(part for part in text.split(";") if part)
    except ValueError:
        raise ConfigError(f"{key}: {text!r} is not a number") from None
    return text


def _checked(key: str, value: Any) -> Any:
    kind = str(SETTINGS[key].type)
    if kind.startswith("tuple"):
        if isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"{key} must be a list of strings")
        return tuple(value)
    if kind.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ConfigError(f"{key} must be a number, not {value!r}")
        return None if value is None else float(value)
    if kind.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{key} must be a whole number, not {value!r}")
    if kind.startswith("str") and not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, not {value!r}")
    if key in CHOICES and value not in CHOICES[key]:
        raise ConfigError(f"{key} must be one of {', '.join(CHOICES[key])}, not {value!r}")
    if key in _AT_LEAST and value < _AT_LEAST[key]:
        raise ConfigError(f"{key} must be at least {_AT_LEAST[key]}, not {value}")
    return value


def _check_whole(config: JobConfig) -> None:
    if config.world_size > _RANKS_MAX:
        raise ConfigError(f"{config.world_size} ranks are more than the {_RANKS_MAX} supported")
    if config.job_id and _JOB_ID.fullmatch(config.job_id) is None:
        raise ConfigError(
            f"job_id {config.job_id!r} must be letters, digits, '.', '_' and '-', at most 63"
        )
    split_address(config.listen)
    if config.metrics_port > _PORT_MAX:
        raise ConfigError(f"metrics_port must be at most {_PORT_MAX}, not {config.metrics_port}")
    for key in ("slo_recovery_s", "health_limit_s"):
        seconds = getattr(config, key)
        if seconds is not None and not seconds > 0:
            raise ConfigError(f"{key} must be above 0, not {seconds:g}")
    metadata_of(config)
    rate = config.checkpoint_bytes_per_s
    if rate is not None and not rate > 0:
        raise ConfigError(f"checkpoint_bytes_per_s must be above 0, not {rate:g}; or leave it out")
    every, between = config.checkpoint_interval_steps, config.snapshot_interval_steps
    if every % between:
        nearest = every - every % between or between
        raise ConfigError(
            f"checkpoint_interval_steps {every} is no multiple of snapshot_interval_steps"
            f" {between}: only a snapshot can be made durable; choose {nearest}"
        )


def metadata_of(config: JobConfig) -> dict[str, str]:
    """`checkpoint_metadata` by key. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in config.checkpoint_metadata:
        key, equals, value = text.partition("=")
        if not equals or not key or key in found:
            raise ConfigError(f"checkpoint_metadata: {text!r} is not KEY=VALUE with a new key")
        found[key] = value
    return found


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, [IPv6]:PORT. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def _suggestion(key: str) -> str:
    close = difflib.get_close_matches(key, SETTINGS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
