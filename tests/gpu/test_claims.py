"""Each claim on the GPU of this machine; `gpu-report.json` says what was found, or why nothing was.

Never run on a GPU. Without one each claim is NOT RUN, with the reason, and that is a skip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu.bench import Status, on_this_machine, report_of, summary_lines
from gpu.claims import CLAIMS

REPORT = Path("gpu-report.json")
ROWS: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
@pytest.mark.timeout(1800)
def test_a_claim_holds(claim: Any, tmp_path: Path):
    bench, why_not = on_this_machine(tmp_path)
    row = ROWS[claim.name] = claim.run(bench, why_not)
    if row["status"] == Status.NOT_RUN:
        pytest.skip(f"NOT RUN: {row['reason']}")
    assert row["status"] == Status.PASS, row


def test_the_report_says_something_of_every_claim():
    """Behind the others, for the report is of this run."""
    rows = [
        ROWS.get(claim.name, claim.row(Status.NOT_RUN, "it was not asked for")) for claim in CLAIMS
    ]
    REPORT.write_text(json.dumps(report_of(rows), indent=2) + "\n", encoding="utf-8")
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    print("\n".join(summary_lines(report)))
    assert [row["name"] for row in report["claims"]] == [claim.name for claim in CLAIMS]
    assert all(row["reason"] for row in report["claims"])
    assert report["machine"]["torch"]
