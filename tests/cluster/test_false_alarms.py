"""Long but legal is not a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.harness import SCRIPTS, run_job
from stepfast.events import FaultSeen, StepLogged


@pytest.mark.timeout(400)
def test_five_thousand_steps_with_legal_pauses_need_no_recovery(tmp_path: Path):
    """Evaluations of 100 steps' time, a slow first step, a recompilation, a stalled loader."""
    job = run_job(tmp_path, SCRIPTS / "pausing.py", tmp_path, limit_s=380)
    summary = job.summary()
    step_s, total_s = (float(text) for text in (tmp_path / "rank-0").read_text().split())
    print(f"a step {step_s * 1e3:.2f} ms, all {total_s:.1f} s")
    assert summary["recoveries"] == []
    assert job.of_type(FaultSeen) == []
    assert job.notes("hang") == []
    assert summary["steps"] == 5000
    assert [event.step for event in job.of_type(StepLogged)] == list(range(5000))
