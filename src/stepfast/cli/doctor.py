"""`stepfast doctor`: looks at this machine, and at a script, before anything is trained.

Owns: gathering what the checks judge (limits, files, the environment that it is given), the output.
Does not own: the judgement (`health`). Invariants: nothing stays of what was tried; this process
never loads torch. Exit codes: 0; 1 where something is unhealthy.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import msgspec

import stepfast
from stepfast.checkpoint.arena import SLOTS_TO_WRITE, SLOTS_WITH_OVERLAP, free_bytes
from stepfast.checkpoint.catalog import survey
from stepfast.checkpoint.manifest import checkpoint_name
from stepfast.checkpoint.store import open_store
from stepfast.cli.tables import aligned
from stepfast.config import JobConfig
from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, StepfastError
from stepfast.health import (
    accelerator,
    kernel,
    limits,
    memory,
    network,
    script,
    storage,
    versions,
)
from stepfast.health.verdicts import Finding, Verdict, unhealthy
from stepfast.train.examine import Examined

EXAMINE_LIMIT_S = 120.0  # a cold disk: torch alone may take a minute
_SMI_LIMIT_S = 10.0
_JOBS_PLACE = "stepfast-jobs"  # where a job gets its directory that was given none
_COLOURS = {Verdict.HEALTHY: "32", Verdict.UNHEALTHY: "31", Verdict.UNKNOWN: "33"}


def run_doctor(
    options: argparse.Namespace, config: JobConfig, environment: Mapping[str, str]
) -> int:
    """Check everything and say it; the exit code."""
    findings = [
        *_of_versions(options.script, environment),
        *_of_limits(config),
        *_of_memory(config, options.state_bytes),
        *_of_storage(config),
        *_of_accelerators(config, environment),
        *_of_network(),
    ]
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(findings), indent=1).decode()
        sys.stdout.write(f"{text}\n")
    else:
        sys.stdout.write("\n".join(lines_of(findings, coloured=sys.stdout.isatty())) + "\n")
    is_unhealthy = any(f.verdict is Verdict.UNHEALTHY for f in findings)
    return EXIT_TRY_AGAIN if is_unhealthy else EXIT_FINISHED


def lines_of(findings: list[Finding], *, coloured: bool) -> list[str]:
    """One line for each finding, what to change below it, and the sum."""
    rows = aligned([(f.verdict.value, f.check, f.evidence) for f in findings], indent="")
    lines: list[str] = []
    for finding, row in zip(findings, rows, strict=True):
        word = finding.verdict.value
        mark = f"\x1b[{_COLOURS[finding.verdict]}m{word}\x1b[0m" if coloured else word
        lines.append(mark + row.removeprefix(word))
        if finding.change:
            lines.append(f"           change: {finding.change}")
    counts = {v: sum(f.verdict is v for f in findings) for v in Verdict}
    return [*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]


# --- gathering ------------------------------------------------------------------------------------


def _of_versions(path: str | None, environment: Mapping[str, str]) -> list[Finding]:
    installed = _installed("torch")
    findings = [
        versions.python_version(sys.version_info[:3]),
        versions.stepfast_version(stepfast.__version__, _installed("stepfast")),
        versions.torch_version(installed),
    ]
    tree = None
    if path is not None:
        readable, tree = script.reads(Path(path))
        findings.append(readable)
    seen, why = None, ""
    if installed is not None:
        seen, why = examined(path if tree is not None else None, environment)
        findings.append(
            versions.torch_loads(seen.torch_version, seen.torch_obstacle, seen.failure)
            if seen is not None
            else versions.torch_loads(None, None, why)
        )
    if path is not None and tree is not None:
        findings += script.uses(tree, Path(path).resolve().parent)
        failed = None if seen is None else seen.failed
        count = 0 if seen is None else len(seen.imports)
        findings.append(script.imports(failed, count, why))
    return findings


def examined(
    path: str | None, environment: Mapping[str, str], limit_s: float = EXAMINE_LIMIT_S
) -> tuple[Examined | None, str]:
    """What a throw-away process found, or why it found nothing."""
    command = [sys.executable, "-P", "-m", "stepfast.train.examine"]
    try:
        done = subprocess.run(
            [*command, *([path] if path is not None else [])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"not within {limit_s:g} s"
    try:
        return msgspec.json.decode(done.stdout, type=Examined), ""
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return None, " ".join(last) or f"the process ended with {done.returncode}"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _of_limits(config: JobConfig) -> list[Finding]:
    ranks = config.nproc_per_node
    cores = len(os.sched_getaffinity(0))
    now = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(now))
    return [
        limits.open_files(_soft(resource.RLIMIT_NOFILE), ranks),
        limits.processes(_soft(resource.RLIMIT_NPROC), ranks),
        limits.locked_memory(_soft(resource.RLIMIT_MEMLOCK), has_gpu=bool(_devices())),
        limits.core_files(
            _soft(resource.RLIMIT_CORE), _text_of("/proc/sys/kernel/core_pattern").strip()
        ),
        limits.cores(cores, ranks),
        *kernel.facilities(kernel.real_tries()),
        kernel.confinement(
            _text_of("/proc/self/status"), _text_of("/proc/sys/kernel/yama/ptrace_scope") or None
        ),
        kernel.wall_clock(now, text),
    ]


def _soft(number: int) -> int:
    soft, _ = resource.getrlimit(number)
    return limits.NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _of_memory(config: JobConfig, state_bytes: int) -> list[Finding]:
    path = Path(config.memory_dir)
    kind = memory.file_system_of(path, _text_of("/proc/self/mountinfo"))
    directory = memory.memory_directory(path, kind)
    if directory.verdict is Verdict.UNHEALTHY and not path.is_dir():
        return [directory]
    slots = SLOTS_WITH_OVERLAP + (0 if config.checkpoints == "none" else SLOTS_TO_WRITE)
    available = memory.available_bytes(
        _text_of("/proc/meminfo"),
        _text_of("/sys/fs/cgroup/memory.max"),
        _text_of("/sys/fs/cgroup/memory.current"),
    )
    room = memory.room(
        state_bytes=state_bytes,
        ranks=config.nproc_per_node,
        slots_per_rank=slots,
        free_bytes=free_bytes(path),
        available_bytes=available,
    )
    return [directory, room]


def _of_storage(config: JobConfig) -> list[Finding]:
    job_dir = Path(config.job_dir or _JOBS_PLACE).resolve()
    findings = [storage.job_directory(job_dir)]
    if config.checkpoints == "none":
        return findings
    url = config.checkpoints or str(job_dir / "checkpoints")
    with _unmade(url):
        try:
            store = open_store(url)
            findings += storage.checkpoint_store(store, time.monotonic)
            unfinished = [checkpoint_name(s.step, s.generation) for s in survey(store).unfinished]
            findings.append(storage.leftovers(unfinished))
        except (OSError, StepfastError) as error:
            findings.append(unhealthy("checkpoint store", str(error), "choose another place"))
    return findings


@contextmanager
def _unmade(url: str) -> Iterator[None]:
    """Directories that a store makes for the first file are taken away again."""
    path = Path(url.removeprefix("file://")).absolute()
    is_path = "://" not in url or url.startswith("file://")
    missing = [p for p in (path, *path.parents) if not p.exists()] if is_path else []
    try:
        yield
    finally:
        for directory in missing:
            try:
                directory.rmdir()
            except OSError:
                break  # not made, or somebody uses it by now


def _of_accelerators(config: JobConfig, environment: Mapping[str, str]) -> list[Finding]:
    devices = _devices()
    ranks = config.nproc_per_node
    names = _smi_names() if devices else None
    interfaces = [name for _, name in socket.if_nameindex()]
    return [
        accelerator.gpus(devices, names, ranks),
        *accelerator.environment(
            environment, interfaces=interfaces, has_gpu=bool(devices), ranks=ranks
        ),
    ]


def _devices() -> list[str]:
    return sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))


def _smi_names() -> list[str] | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _of_network() -> list[Finding]:
    host = socket.gethostname()
    return [
        network.loopback_name(lambda: socket.gethostbyaddr("127.0.0.1")[0]),
        network.own_name(host, lambda: socket.gethostbyname(host)),
    ]
