"""`stepfast doctor` as a whole: its throw-away process, its exit code, and that nothing stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepfast.cli.doctor import examined
from stepfast.cli.main import main


def test_an_unhealthy_machine_ends_with_1_and_a_tried_one_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("import msgspec, not_installed_anywhere\nprint('never run')\n")
    secret = "hf_0123456789abcdefghijklmnopqrstuv"
    monkeypatch.setenv("TORCH_HUB_SIGN", secret)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor", "--json", "--state-bytes", str(1 << 50), "train.py"]) == 1
    said = capsys.readouterr().out
    assert secret not in said and "never run" not in said
    found = {f["check"]: f for f in json.loads(said)}
    assert found["memory"]["verdict"] == "unhealthy"
    assert found["uses track"]["verdict"] == "unhealthy"
    assert found["torch loads"]["verdict"] in ("healthy", "unknown")
    assert found["checkpoint store"]["verdict"] == "healthy"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"], "nothing was made"


def test_an_examination_has_a_time_limit():
    found, why = examined(None, {}, limit_s=0.001)
    assert found is None
    assert "not within" in why
