"""Copies beside the training and the ends of processes: killed at any instant, forked, left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepfast.checkpoint.arena import sealed_slots
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.tensors.local import over

WORKLOADS = Path(__file__).with_name("staging_workloads.py")


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def start(name: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKLOADS), name, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def assert_whole(directory: Path, begun: int) -> None:
    """Every number in a sealed slot is its step; the newest one is at most a step old."""
    held = sealed_slots(directory)
    assert held[-1].snapshot.step >= begun - 1
    for sealed in held:
        slot = open_sealed(sealed.path, sealed.snapshot)
        for name, entry in slot.layout.by_name.items():
            if not name.startswith("stepfast."):
                found = over(slot.view(entry), entry)
                assert torch.all(found == float(sealed.snapshot.step)), (sealed.snapshot, name)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_instant_leaves_whole_snapshots(memory: Path, seed: int) -> None:
    chance = random.Random(seed)
    with start("train_until_killed", memory) as process:
        assert process.stdout is not None
        for _ in range(chance.randrange(3, 9)):
            begun = int(process.stdout.readline())
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        more = process.stdout.read().split("\n")[:-1]
        assert_whole(memory, max([begun, *map(int, more)]))


@pytest.mark.parametrize(
    ("name", "said"),
    [("fork_while_copying", "done\n"), ("exit_while_copying", "copying True\n")],
)
def test_a_copy_neither_hangs_forked_workers_nor_keeps_its_process(
    memory: Path, name: str, said: str
) -> None:
    with start(name, memory) as process:
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, said)
