"""The gate before a join: real processes that look, hang, crash and flood."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stepfast.agent.bounded import run_bounded
from stepfast.agent.gate import JOIN, REFUSE, REJOIN, Checks, Gate, Look, refusal_of
from stepfast.health.look import NO_GPUS
from stepfast.health.verdicts import Verdict
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.descendants import ProcessTable
from unit.test_health_efa import adapter

STAND_IN = Path(__file__).parents[1] / "fakes" / "nvml"


class Machine:
    """A root with what a look finds below it, and a driver in NVIDIA's place."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        (root / "dev").mkdir()
        (root / "sys").mkdir()
        self._file = root / "machine.json"
        monkeypatch.setenv("NVML_STAND_IN", str(self._file))
        known = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}{os.pathsep}{known}")

    def gpus(self, *gpus: dict[str, Any], **driver: Any) -> None:
        (self.root / "dev" / "nvidiactl").touch()
        for number in range(len(gpus)):
            (self.root / "dev" / f"nvidia{number}").touch()
        self._file.write_text(json.dumps({"gpus": gpus, **driver}))

    def looked(self, occasion: str = JOIN, **checks: Any) -> Look | None:
        gate = Gate(Checks(root=self.root, **checks), SystemClock())
        return asyncio.run(gate.look(occasion))

    def verdicts(self, **checks: Any) -> dict[str, Verdict]:
        seen = self.looked(**checks)
        return {} if seen is None else {f.check: f.verdict for f in seen.findings}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def below() -> set[int]:
    return {e.id.pid for e in ProcessTable.read().descendants(os.getpid()) if not e.ended}


def test_a_machine_with_nothing_to_look_at_starts_no_process(machine: Machine):
    assert machine.looked() is None


def test_a_machine_that_is_well_is_healthy(machine: Machine):
    machine.gpus(*[{}] * 8)
    for number in range(4):
        adapter(machine.root / "sys", f"rdmap{number}s0")
    seen = machine.looked(gpus=8, efas=4, command=("true",))
    assert seen is not None and seen.verdict is Verdict.HEALTHY
    assert [f.check for f in seen.findings] == [
        "efa count", "efa counters", "gpu driver", "gpu count", "gpu recovery action",
        "gpu remapped rows", "gpu ecc", "gpu sram", "gpu nvlink", "gpu fabric", "health check",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "check"),
    [
        ({"recovery": 1}, "gpu recovery action"),
        ({"remapped": [0, 1, 1, 0]}, "gpu remapped rows"),
        ({"uncorrected": 3}, "gpu ecc"),
        ({"sram": 1}, "gpu sram"),
        ({"links": [1] * 17 + [0]}, "gpu nvlink"),
        ({"fabric": [3, 5]}, "gpu fabric"),
        ({"remapped": {"error": 16}}, "gpu remapped rows"),
    ],
)
def test_a_gpu_that_is_not_well_is_found(machine: Machine, gpu: dict[str, Any], check: str):
    machine.gpus({}, gpu)
    found = machine.verdicts()
    assert [c for c, verdict in found.items() if verdict is Verdict.UNHEALTHY] == [check]


def test_a_lost_gpu_fails_every_check_of_it_and_a_driver_that_is_not_loaded_the_first(
    machine: Machine,
):
    machine.gpus({}, {"lost": 15})
    found = machine.verdicts()
    assert sum(verdict is Verdict.UNHEALTHY for verdict in found.values()) == 6
    machine.gpus({}, errors={"nvmlInit": 9})
    assert machine.verdicts() == {"gpu driver": Verdict.UNHEALTHY}
    machine.gpus({}, errors={"nvmlInit": 12})
    assert machine.verdicts() == {"gpu driver": Verdict.UNKNOWN}, "only its library is missing"


def test_a_driver_without_some_answers_leaves_those_unknown(machine: Machine):
    nothing = {"error": 3}
    machine.gpus(dict.fromkeys(("recovery", "remapped", "ecc", "sram", "fabric"), nothing))
    found = machine.verdicts()
    assert {c for c, verdict in found.items() if verdict is Verdict.UNKNOWN} == {
        "gpu recovery action", "gpu remapped rows", "gpu ecc", "gpu sram", "gpu fabric",
    }  # fmt: skip
    assert Verdict.UNHEALTHY not in found.values()


def test_gpus_that_are_expected_and_a_binding_that_is_not_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    machine.gpus({})
    assert machine.verdicts(gpus=2)["gpu count"] is Verdict.UNHEALTHY
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pynvml.py").write_text("raise ImportError('none')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'empty'}{os.pathsep}{os.environ['PYTHONPATH']}")
    assert machine.verdicts(gpus=2) == {"gpu driver": Verdict.UNKNOWN}


def test_a_driver_that_hangs_is_not_waited_for_and_is_no_healthy_one(machine: Machine):
    machine.gpus({}, {}, hang="nvmlDeviceGetRemappedRows")
    before, began = below(), time.monotonic()
    seen = machine.looked(limit_s=2.0)
    assert seen is not None and time.monotonic() - began < 6.0
    assert seen.verdict is Verdict.UNHEALTHY
    (stuck,) = seen.of(Verdict.UNHEALTHY)
    assert stuck.evidence == "no answer within 2 s, looking at GPU 0"
    assert below() <= before


def test_who_was_here_and_does_not_answer_in_time_is_unknown(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stepfast.agent.gate._REJOIN_LIMIT_S", 1.0)
    seen = machine.looked(REJOIN, command=("sleep", "60"))
    assert seen is not None and seen.verdict is Verdict.UNKNOWN
    seen = machine.looked(JOIN, command=("sleep", "60"), limit_s=0.5)
    assert seen is not None and seen.verdict is Verdict.UNHEALTHY
    assert "did not end within 0.5 s, and was killed" in refusal_of(seen)


def test_a_driver_that_crashes_takes_its_own_process_alone(machine: Machine):
    machine.gpus({}, crash="nvmlDeviceGetHandleByIndex")
    seen = machine.looked()
    assert seen is not None and seen.verdict is Verdict.UNKNOWN
    assert [f.check for f in seen.of(Verdict.HEALTHY)] == ["gpu driver", "gpu count"]
    assert "signal 11, at GPU 0" in seen.of(Verdict.UNKNOWN)[0].evidence


def test_gpus_are_not_looked_at_for_a_job_on_the_cpu(machine: Machine):
    machine.gpus({"recovery": 1})
    assert machine.looked(gpus=NO_GPUS) is None
    adapter(machine.root / "sys", "rdmap0s0")
    assert set(machine.verdicts(gpus=NO_GPUS)) == {"efa count", "efa counters"}


def test_an_unknown_node_is_admitted_or_refused_as_the_policy_says(machine: Machine):
    machine.gpus({"recovery": {"error": 3}})
    seen = machine.looked()
    assert seen is not None and seen.verdict is Verdict.UNKNOWN
    clock = SystemClock()
    assert Gate(Checks(), clock).admits(seen)
    strict = Gate(Checks(unknown=REFUSE), clock)
    assert not strict.admits(seen)
    assert "set health_unknown to admit" in refusal_of(seen)
    machine.gpus({})
    well = machine.looked()
    assert well is not None and strict.admits(well)


def test_a_command_may_leave_children_with_its_pipes_and_flood_them(tmp_path: Path):
    before = below()

    async def ended(script: str, limit_s: float) -> Any:
        return await run_bounded(("sh", "-c", script), limit_s)

    began = time.monotonic()
    done = asyncio.run(ended("sleep 60 & echo here; echo there >&2; exit 3", 30.0))
    assert (done.exit_code, done.output, done.errors) == (3, b"here\n", b"there\n")
    flood = asyncio.run(ended("yes", 0.5))
    assert flood.exit_code is None and 0 < len(flood.output) <= 1 << 18
    assert time.monotonic() - began < 8.0
    assert below() <= before


def test_a_look_that_is_given_up_leaves_nothing(tmp_path: Path):
    before = below()

    async def given_up() -> None:
        work = asyncio.create_task(run_bounded(("sleep", "60"), 60.0))
        await asyncio.sleep(0.3)
        assert below() - before
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(given_up())
    assert below() <= before
