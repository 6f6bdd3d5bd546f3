"""Job files as YAML, byte for byte, and every command line in them parses.

REGENERATE_TRANSCRIPTS=1 .venv/bin/pytest tests/golden
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from architecture.source_tree import ROOT
from stepfast.cli.parser import parse
from stepfast.k8s.job_file import read_job_file
from stepfast.k8s.manifest import manifest
from stepfast.k8s.profiles import KINDS, profile_of
from stepfast.k8s.render import as_yaml

HERE = Path(__file__).parent / "k8s"
JOBS = {"job": ROOT / "examples" / "job.toml", "gpu": HERE / "gpu.toml"}
CASES = [(job, kind, version) for job in JOBS for kind in KINDS for version in ("1.33", "1.35")]


def rendered(job: str, kind: str, version: str) -> str:
    return as_yaml(manifest(read_job_file(JOBS[job]), profile_of(kind, version)))


def commands_in(node: object) -> list[list[str]]:
    if isinstance(node, list):
        return [found for item in node for found in commands_in(item)]
    if not isinstance(node, dict):
        return []
    own = [node["command"]] if "command" in node else []
    return own + [found for value in node.values() for found in commands_in(value)]


@pytest.mark.parametrize(("job", "kind", "version"), CASES)
def test_the_manifest_is_as_it_was(job: str, kind: str, version: str):
    path = HERE / f"{job}-{kind}-{profile_of(kind, version).name}.yaml"
    found = rendered(job, kind, version)
    if os.environ.get("REGENERATE_TRANSCRIPTS"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("job", "kind", "version"), CASES)
def test_every_command_line_parses(job: str, kind: str, version: str):
    commands = commands_in(list(yaml.safe_load_all(rendered(job, kind, version))))
    assert sorted(words[1] for words in commands) == ["agent", "coordinator"]
    for words in commands:
        assert words[0] == "stepfast"
        parse([re.sub(r"(?<!\$)\$\(\w+\)", "0", word) for word in words[1:]])
