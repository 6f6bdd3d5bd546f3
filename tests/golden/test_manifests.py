"""Job files as YAML, byte for byte; the validator finds nothing in them, and their command lines
are the program's own.

    REGENERATE_TRANSCRIPTS=1 .venv/bin/pytest tests/golden
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from architecture.source_tree import ROOT
from stepfast.cli.parser import parse
from stepfast.config import SETTINGS, load_config, parse_text
from stepfast.k8s.job_reader import read_job_file
from stepfast.k8s.manifest import manifest
from stepfast.k8s.profiles import KINDS, profile_of
from stepfast.k8s.render import as_yaml
from stepfast.k8s.target import Target
from stepfast.k8s.validate.schemas import Schemas
from stepfast.k8s.validate.validate import validate

HERE = Path(__file__).parent / "k8s"
JOBS = {"job": ROOT / "examples" / "job.toml", "gpu": HERE / "gpu.toml"}
TARGETS = {"1.33": Target(kubernetes=(1, 33)), "1.35": Target(kubernetes=(1, 35))}
CASES = [(job, kind, version) for job in JOBS for kind in KINDS for version in TARGETS]
VARIABLES = {"JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.7"}
ALIEN = {  # another machine, user, place and time, as far as the environment says so
    "HOME": "/nonexistent",
    "HOSTNAME": "elsewhere",
    "LANG": "tr_TR.UTF-8",
    "PATH": os.defpath,
    "PYTHONHASHSEED": "7",
    "PYTHONPATH": str(ROOT / "src"),
    "STEPFAST_NODES": "99",
    "TZ": "Pacific/Kiritimati",
    "USER": "nobody",
}

every_case = pytest.mark.parametrize(("job", "kind", "version"), CASES)


def path_of(job: str, kind: str, version: str) -> Path:
    return HERE / f"{job}-{kind}-{profile_of(kind, version).name}.yaml"


@cache
def rendered(job: str, kind: str, version: str) -> str:
    return as_yaml(manifest(read_job_file(JOBS[job]), profile_of(kind, version)))


@cache
def schemas() -> Schemas:
    return Schemas()


def containers_in(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in containers_in(item)]
    if not isinstance(node, dict):
        return []
    own = node.get("containers", [])
    return own + [found for value in node.values() for found in containers_in(value)]


def as_value(name: str, text: str | list[str]) -> Any:
    return tuple(text) if isinstance(text, list) else parse_text(name, text)


def as_the_kubelet_expands(word: str, container: dict[str, Any]) -> str:
    """`$(NAME)` of a variable of the container; `$$(` is a plain `$(`."""
    known = {entry["name"] for entry in container["env"]}

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("$$"):
            return match[0][1:]
        assert match[1] in known, f"the container has no variable {match[1]}"
        return VARIABLES[match[1]]

    return re.sub(r"\$?\$\((\w+)\)", value, word)


@every_case
def test_the_manifest_is_as_it_was(job: str, kind: str, version: str):
    path = path_of(job, kind, version)
    found = rendered(job, kind, version)
    if os.environ.get("REGENERATE_TRANSCRIPTS"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


@every_case
def test_the_validator_finds_nothing(job: str, kind: str, version: str):
    files = {"job.yaml": rendered(job, kind, version).encode()}
    report = validate(files, TARGETS[version], schemas=schemas())
    assert not report.findings, report.text()
    unchecked = {entry.object.partition("/")[0] for entry in report.unchecked}
    assert unchecked <= {"PodMonitor"}


@every_case
def test_every_command_line_is_the_programs_own(job: str, kind: str, version: str):
    containers = containers_in(list(yaml.safe_load_all(rendered(job, kind, version))))
    assert sorted(c["command"][1] for c in containers) == ["agent", "coordinator"]
    for container in containers:
        words = [as_the_kubelet_expands(word, container) for word in container["command"]]
        assert words[0] == "stepfast"
        options = parse(words[1:])
        given = {name: getattr(options, name) for name in SETTINGS if hasattr(options, name)}
        load_config(Path(os.devnull), {}, {name: as_value(name, given[name]) for name in given})
        if options.command == "agent":
            assert options.node == 1
            assert options.script_args == read_job_file(JOBS[job]).args


@pytest.mark.parametrize(
    ("written", "instead", "rule"),
    [
        ("=llama-debug-coord-0-0.llama-debug:", "=llama-debug-coord-0.llama-debug:", "addressing"),
        ("=llama-debug-coord-0-0.llama-debug:", "=10.0.0.9:", "addressing"),
        ("sizeLimit: 432Mi", "sizeLimit: 431Mi", "memory-volumes"),
        ("--memory-dir=/snapshots", "--memory-dir=/dev/shm/snapshots", "memory-volumes"),
        ("--checkpoints=/checkpoints", "--checkpoints=/elsewhere", "storage"),
        ("terminationGracePeriodSeconds: 100", "terminationGracePeriodSeconds: 70", "termination"),
        ("name: metrics", "name: numbers", "observability"),
        ("minAvailable: 1", "minAvailable: 2", "disruption"),
        ("- 85\n", "- 86\n", "exit-codes"),
    ],
)
def test_the_validator_reads_what_is_rendered(written: str, instead: str, rule: str):
    text = rendered("job", "jobset", "1.35")
    assert written in text
    report = validate({"job.yaml": text.replace(written, instead).encode()}, TARGETS["1.35"])
    assert rule in {finding.rule for finding in report.findings}


def test_another_machine_renders_the_same(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "stepfast", "k8s", "render", str(JOBS["gpu"])],
        env=ALIEN,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == rendered("gpu", "jobset", "1.35")
    assert not list(tmp_path.iterdir())
