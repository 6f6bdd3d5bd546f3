"""docs/gpu-status.md is made of what is there now, and says no more than was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gpu_status
from architecture.source_tree import ROOT
from gpu.claims import CLAIMS


def test_the_page_is_fresh():
    written = (ROOT / "docs" / "gpu-status.md").read_text(encoding="utf-8")
    assert written == gpu_status.page(), "make gpu-status"


def test_each_claim_is_there_once_and_its_doubles_are_real():
    names = [claim.name for claim in CLAIMS]
    assert len(names) == len(set(names))
    for claim in CLAIMS:
        for test in claim.doubles:
            path, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), test


def report(status: str, written: str, gpus: tuple[str, ...] = ("H100",)) -> dict[str, Any]:
    machine = {"gpus": list(gpus), "driver": "580", "torch": "2.14.1", "nccl": "2.30"}
    rows = [{"name": "staging stall", "status": status, "reason": "slow", "numbers": {}}]
    return {"written": written, "machine": machine, "claims": rows}


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([], "never run"),
        ([report("NOT RUN", "2027-01-01", ())], "never run"),
        ([report("PASS", "2027-01-01T1")], "verified on 1 x H100 (driver 580, torch 2.14.1, "),
        ([report("PASS", "2027-01-01"), report("NOT RUN", "2027-02-01")], "verified on"),
        ([report("PASS", "2027-01-01"), report("FAIL", "2027-02-01")], "FAILED (slow) on"),
    ],
)
def test_a_claim_is_what_the_newest_report_that_ran_it_says(reports: list[Any], said: str):
    assert gpu_status.status_of("staging stall", reports).startswith(said)


def test_reports_of_the_tree_have_gpus_and_are_read_in_order(tmp_path: Path):
    for one in gpu_status.read_reports():
        assert one["machine"]["gpus"], "a report without a GPU says nothing"
    (tmp_path / "a.json").write_text('{"written": "2027-02"}')
    (tmp_path / "b.json").write_text('{"written": "2027-01"}')
    assert [r["written"] for r in gpu_status.read_reports(tmp_path)] == ["2027-01", "2027-02"]


def test_code_that_only_cuda_runs_says_that_it_never_was():
    """Until a report says otherwise; `torch.cuda` is touched in these files."""
    said = gpu_status.never_run()
    for path in ("train/device.py", "checkpoint/tensors/copier.py", "train/torch_groups.py"):
        assert f"src/stepfast/{path}" in said
