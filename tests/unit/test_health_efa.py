"""EFA adapters, read from trees of files as their driver makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepfast.health import efa
from stepfast.health.verdicts import Finding, Verdict

COUNTERS = {"keep_alive_rcvd": 7, "submitted_cmds": 90, "completed_cmds": 90, "cmds_err": 0,
            "no_completion_cmds": 0, "create_qp_err": 0, "reg_mr_err": 0}  # fmt: skip


def adapter(
    sys: Path, name: str, *, vendor: str = "0x1d0f", device: str = "0xefa2", **counters: Any
) -> Path:
    """One below `sys`, with a port that says it is active, as EFA's always do."""
    path = sys / "class" / "infiniband" / name
    (path / "hw_counters").mkdir(parents=True)
    (path / "ports" / "1").mkdir(parents=True)
    (path / "device").mkdir()
    (path / "device" / "vendor").write_text(f"{vendor}\n")
    (path / "device" / "device").write_text(f"{device}\n")
    (path / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    for key, number in {**COUNTERS, **counters}.items():
        (path / "hw_counters" / key).write_text(f"{number}\n")
    return path


def look(sys: Path, expected: int = 0) -> dict[str, Finding]:
    return {f.check: f for f in efa.judged(efa.read(sys), expected)}


def test_a_machine_without_adapters_has_nothing_to_say_unless_some_are_expected(tmp_path: Path):
    assert look(tmp_path) == {}
    assert look(tmp_path, 4)["efa count"].verdict is Verdict.UNHEALTHY
    assert "0 adapters, 4 expected" in look(tmp_path, 4)["efa count"].evidence


def test_adapters_that_are_all_there_and_answer_are_healthy(tmp_path: Path):
    for number in range(4):
        adapter(tmp_path, f"rdmap{number}s0", cmds_err=number)
    found = look(tmp_path, 4)
    assert {f.verdict for f in found.values()} == {Verdict.HEALTHY}
    assert found["efa counters"].evidence == "every command was answered; cmds_err 6"


def test_a_missing_adapter_is_told_by_the_count(tmp_path: Path):
    for number in range(3):
        adapter(tmp_path, f"rdmap{number}s0")
    assert look(tmp_path, 4)["efa count"].verdict is Verdict.UNHEALTHY
    assert look(tmp_path)["efa count"].verdict is Verdict.HEALTHY


def test_commands_without_an_answer_make_a_node_unfit_although_the_port_is_active(tmp_path: Path):
    for number in range(4):
        adapter(tmp_path, f"rdmap{number}s0", no_completion_cmds=int(number == 2))
    finding = look(tmp_path, 4)["efa counters"]
    assert finding.verdict is Verdict.UNHEALTHY
    assert "rdmap2s0" in finding.evidence and "rdmap1s0" not in finding.evidence


def test_counters_that_are_not_there_are_unknown(tmp_path: Path):
    adapter(tmp_path, "rdmap0s0")
    bare = adapter(tmp_path, "rdmap1s0")
    (bare / "hw_counters" / "no_completion_cmds").unlink()
    assert look(tmp_path)["efa counters"].verdict is Verdict.UNKNOWN
    for file in (bare / "hw_counters").iterdir():
        file.unlink()
    (bare / "hw_counters").rmdir()
    finding = look(tmp_path)["efa counters"]
    assert finding.verdict is Verdict.UNKNOWN and "rdmap1s0" in finding.evidence


def test_other_makers_adapters_are_none_of_efas(tmp_path: Path):
    adapter(tmp_path, "mlx5_0", vendor="0x15b3", device="0x101e", no_completion_cmds=3)
    assert look(tmp_path) == {}
