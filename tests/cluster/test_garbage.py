"""Garbage that an abort or a broken communicator leaves on one rank is never resumed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.conftest import Reference
from cluster.harness import SCRIPTS, assert_survivors_kept, over_nccl_like, run_job

GARBLED = SCRIPTS / "garbled.py"
ARGS = ("--steps", 16)


@pytest.mark.parametrize(
    ("how", "rule", "kind"),
    [("aborted", "flag", "exception"), ("broken", "error", "collective")],
)
@pytest.mark.parametrize("has_rule", [True, False])
def test_garbage_is_resumed_from_only_where_the_rule_is_taken_away(
    how: str, rule: str, kind: str, has_rule: bool, tmp_path: Path, reference_digest: Reference
):
    """The peer holds the step, so it would be the common one; over a whole job, by its digest."""
    without = () if has_rule else ("--without", rule)
    script = over_nccl_like(GARBLED, *ARGS, "--how", how, "--marks", tmp_path, *without)
    job = run_job(tmp_path, *script)
    summary = job.summary()
    kinds = [recovery["kind"] for recovery in summary["recoveries"]]
    assert (
        kinds == [kind] or not has_rule
    )  # without it the error shows later, in one way or another
    assert_survivors_kept(summary)
    reference = reference_digest(GARBLED, *ARGS, layout=(1, 2))
    assert (summary["final_digest"] == reference) == has_rule
    # As NCCL's flight recorder has it: what was launched, written down before the abort.
    logs = job.directory / "logs"
    for rank in (0, 1):
        trace = json.loads((logs / f"rank-{rank}-gen-1.trace.json").read_bytes())
        assert trace["is_aborting"] is False
        assert trace["entries"][0]["launched"] > 0
    assert not list(logs.glob("*-gen-2.trace.json"))


def test_a_setting_that_stands_against_recovery_is_refused_with_the_reason(tmp_path: Path):
    """Only stepfast aborts; who wants torch's watchdog to end ranks hears why that cannot be."""
    job = run_job(
        tmp_path,
        *over_nccl_like(GARBLED, *ARGS),
        environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        expected=78,
    )
    said = "TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog then kills what could go on"
    assert said in job.console
    assert "unset TORCH_NCCL_ASYNC_ERROR_HANDLING" in job.console
