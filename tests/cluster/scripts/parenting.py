"""`tiny` whose rank 1 starts helpers that want to outlive it; its replacement looks for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tiny
import torch

import stepfast

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def start_family() -> list[int]:
    """One that ignores SIGTERM, one in a session of its own, one behind a double fork."""
    polite = [sys.executable, "-c", STUBBORN]
    pids = [subprocess.Popen(polite).pid, subprocess.Popen(polite, start_new_session=True).pid]
    reading, writing = os.pipe()
    if (middle := os.fork()) == 0:
        if (grandchild := os.fork()) == 0:
            os.setsid()
            time.sleep(600)
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    return [*pids, int(os.read(reading, 16))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@stepfast.resilient
def train(run: stepfast.Run, marks: str) -> None:
    torch.set_num_threads(1)
    family = Path(marks, "family")
    if run.rank == 1 and family.exists():
        left = [pid for pid in map(int, family.read_text().split()) if is_alive(pid)]
        Path(marks, "left").write_text(repr(left))
    state = run.once(tiny.build)
    for step in run.steps(40):
        if run.rank == 1 and step == 10 and tiny.once_ever(marks, "started"):
            family.write_text(" ".join(map(str, start_family())))
            os.kill(os.getpid(), signal.SIGKILL)
        tiny.turn(run, state, step)


if __name__ == "__main__":
    train(sys.argv[1])
