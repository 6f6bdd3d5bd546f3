"""`tiny` in which rank 1 fails while rank 0's main thread is somewhere that is hard to leave."""

from __future__ import annotations

import ctypes
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import tiny
import torch

import stepfast

LONG_S = 30.0


class SlowExit:
    def __enter__(self) -> None:
        return

    def __exit__(self, *ending: object) -> None:
        time.sleep(LONG_S)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def receive() -> None:
    ours, theirs = socket.socketpair()
    ours.recv(1)
    theirs.close()


def swallow_errors() -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        try:
            time.sleep(0.01)
            raise ValueError("as always")
        except Exception:  # noqa: BLE001 - what scripts do
            pass


def slow_finally() -> None:
    try:
        pass
    finally:
        time.sleep(LONG_S)


def slow_exit() -> None:
    with SlowExit():
        pass


def compute() -> None:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        torch.randn(64, 64).mm(torch.randn(64, 64))


def slow_import() -> None:
    directory = Path(sys.argv[1])
    (directory / "slow_module.py").write_text(f"import time\ntime.sleep({LONG_S})\n")
    sys.path.insert(0, str(directory))
    import slow_module  # type: ignore[import-not-found]  # noqa: F401 - made here


def slow_c_call() -> None:
    library = ctypes.CDLL(None)
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        library.usleep(900_000)


PLACES: dict[str, Callable[[], Any]] = {
    "sleep": lambda: time.sleep(LONG_S),
    "a lock": lock,
    "a queue": lambda: Queue[int]().get(),
    "a socket": receive,
    "a subprocess": lambda: subprocess.run(["sleep", str(LONG_S)], check=True),
    "except Exception": swallow_errors,
    "finally": slow_finally,
    "the exit of a with block": slow_exit,
    "torch": compute,
    "an import": slow_import,
    "a slow C call": slow_c_call,
}


@stepfast.resilient
def train(run: stepfast.Run, marks: str) -> None:
    torch.set_num_threads(1)
    is_clean = torch.is_grad_enabled() and sys.exc_info()[0] is None
    with open(f"{marks}/entered-{run.rank}", "a") as file:
        file.write("clean\n" if is_clean else "grad mode or an exception was left behind\n")
    state = run.once(tiny.build)
    for step in run.steps(len(PLACES) * 2 + 1):
        tiny.turn(run, state, step)
        # From the second on: before the job's first step it would be a bug of the user's.
        if step < 2 or step % 2 or not tiny.once_ever(marks, f"{run.rank}-{step}"):
            continue
        name, place = list(PLACES.items())[step // 2 - 1]
        if run.rank == 0:
            with torch.no_grad():
                place()
        else:
            time.sleep(0.3)  # rank 0 is there by then
            raise RuntimeError(f"while rank 0 is in {name}")


if __name__ == "__main__":
    Path(sys.argv[1], "places").write_text(json.dumps(list(PLACES)))
    train(sys.argv[1])
