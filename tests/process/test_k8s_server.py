"""`stepfast k8s validate --server`, against programs that answer as kubectl does."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfast.errors import OperatingError
from stepfast.k8s.validate.server import dry_run

FILE = Path("job.yaml")


def program(directory: Path, text: str) -> str:
    path = directory / "kubectl"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_server_is_asked_strictly_and_its_refusals_are_findings(tmp_path: Path):
    told = tmp_path / "told"
    refusing = program(tmp_path, f'echo "$@" > {told}; echo "strict decoding error" >&2; exit 1')
    (finding,) = dry_run([FILE], kubectl=refusing, context="here")
    assert finding.rule == "server"
    assert finding.reason == "strict decoding error"
    words = told.read_text().split()
    assert words[:4] == ["--context=here", "apply", "--dry-run=server", "--validate=strict"]


def test_a_server_that_cannot_be_asked_is_no_finding(tmp_path: Path):
    down = program(tmp_path, 'echo "dial tcp 10.0.0.1:443: connection refused" >&2; exit 1')
    with pytest.raises(OperatingError, match="cannot be asked"):
        dry_run([FILE], kubectl=down)
    with pytest.raises(OperatingError, match="on the PATH"):
        dry_run([FILE], kubectl=str(tmp_path / "absent"))
