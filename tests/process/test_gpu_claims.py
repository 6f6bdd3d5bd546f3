"""The GPU tier's code that starts processes, executed over the double, and jobs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.device import FakeCuda
from gpu.bench import Bench, Status
from gpu.claims import CLAIMS

PROCESSES = (
    "sticky errors are told",
    "an uncorrectable ECC error is told",
    "SIGKILL beside live contexts",
    "fork before CUDA",
    "a node looked at",
    "NCCL abort and re-init",
    "NCCL abort with peers",
    "CUDA context kept",
    "a sticky error costs one process",
    "device memory is flat",
    "resume is bitwise",
)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_claim_is_measured(name: str, tmp_path: Path):
    (claim,) = [c for c in CLAIMS if c.name == name]
    cuda = FakeCuda(device_count_=claim.gpus)
    bench = Bench(cuda=cuda, device=torch.device("cpu"), directory=tmp_path, turns=3, recoveries=3)
    row = claim.run(bench)
    wanted = Status.NOT_RUN if "ECC" in name else Status.PASS
    assert row["status"] == wanted, row
    assert row["reason"]
