"""The GPU tier's code, executed over the double of `torch.cuda`: its numbers mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.device import FakeCuda
from gpu.bench import Bench, Claim, NotRun, Outcome, Status, on_this_machine, report_of
from gpu.claims import CLAIMS

IN_PROCESS = ("staging stall", "pinned memory given back", "progress is the device's")


def bench(directory: Path, cuda: Any = None) -> Bench:
    return Bench(
        cuda=cuda or FakeCuda(),
        device=torch.device("cpu"),
        directory=directory,
        state_bytes=1 << 16,
        turns=3,
        recoveries=2,
    )


def claim(name: str) -> Claim:
    (found,) = [c for c in CLAIMS if c.name == name]
    return found


@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_claim_is_measured_without_waiting_for_the_device(name: str, tmp_path: Path):
    cuda = FakeCuda()
    row = claim(name).run(bench(tmp_path, cuda))
    timed = {Status.PASS, Status.FAIL} if name == "staging stall" else {Status.PASS}
    assert row["status"] in timed and row["numbers"], row
    assert cuda.device_syncs == 0


def test_pinned_memory_that_stays_registered_is_found(tmp_path: Path):
    class Leaky(FakeCuda):
        def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - CUDA's name
            return 0

    row = claim("pinned memory given back").run(bench(tmp_path, Leaky()))
    assert row["status"] == Status.FAIL


def test_a_host_that_waits_for_its_device_is_found(tmp_path: Path):
    class Slow(FakeCuda):
        def _sleep(self, cycles: int) -> None:
            """Over when it returns, as with CUDA_LAUNCH_BLOCKING."""

    row = claim("progress is the device's").run(bench(tmp_path, Slow()))
    assert row["status"] == Status.FAIL


def measured(what: Any) -> dict[str, Any]:
    def measure(at: Bench) -> Outcome:
        if isinstance(what, BaseException):
            raise what
        return what

    made = Claim(name="a claim", says="x", measure=measure, gpus=2)
    return made.run(bench(Path(), FakeCuda(device_count_=2)))


def test_a_row_says_what_became_of_its_claim():
    assert measured(Outcome(holds=True, reason="fine", numbers={"n": 1})) == {
        "name": "a claim",
        "status": "PASS",
        "reason": "fine",
        "numbers": {"n": 1},
    }
    assert measured(Outcome(holds=False, reason="slow"))["status"] == "FAIL"
    told = measured(NotRun("no kernel"))
    assert (told["status"], told["reason"]) == ("NOT RUN", "no kernel")
    told = measured(torch.AcceleratorError("CUDA error"))
    assert (told["status"], told["reason"]) == ("FAIL", "AcceleratorError: CUDA error")


def test_without_a_gpu_or_with_too_few_nothing_runs_and_the_reason_is_told(tmp_path: Path):
    two = claim("NCCL abort with peers")
    row = two.run(bench(tmp_path, FakeCuda(device_count_=1)))
    assert (row["status"], row["reason"]) == ("NOT RUN", "needs 2 GPUs, and there is 1")
    here, why_not = on_this_machine(tmp_path)
    if here is None:
        rows = [c.run(None, why_not) for c in CLAIMS]
        assert {row["status"] for row in rows} == {"NOT RUN"} and why_not
        machine = report_of(rows)["machine"]
        assert machine["gpus"] == [] and machine["torch"] == torch.__version__
