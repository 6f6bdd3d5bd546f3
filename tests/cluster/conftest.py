"""What the tests of whole jobs share: digests of jobs without faults, once for each session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.harness import run_job

Reference = Callable[..., str]


@pytest.fixture(scope="session")
def reference_digest(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """`reference_digest(script, *args, layout=(nodes, ranks))`: of that job without faults."""
    known: dict[tuple[object, ...], str] = {}

    def digest(script: Path, *script_args: object, layout: tuple[int, int]) -> str:
        key = (script, script_args, layout)
        if key not in known:
            directory = tmp_path_factory.mktemp("reference")
            job = run_job(directory, script, *script_args, layout=layout)
            assert job.summary()["recoveries"] == []
            known[key] = job.summary()["final_digest"]
        return known[key]

    return digest
