"""Forking from the zygote: whether it may, and how the child comes to belong to the agent.

Owns: the check for threads and CUDA, the double fork. Does not own: what the child becomes
(`train.birth`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from stepfast.runtime.descendants import ProcessId, read_process
from stepfast.train import birth


def fork_twice(child: Callable[[], NoReturn]) -> ProcessId:
    """Run `child` in a process whose parent is this process's reaper; raises OSError where a fork
    fails.

    The process between reports the start time: only for its own child can it be sure that the pid
    is not reaped.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reader)
        _fork_and_report(child, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        report = pipe.read()
    os.waitpid(between, 0)
    if not report:
        raise OSError("the process between the zygote and the new one ended without a report")
    pid, start_time_ticks = report.split()
    return ProcessId(int(pid), int(start_time_ticks))


def _fork_and_report(child: Callable[[], NoReturn], writer: int) -> NoReturn:
    try:
        between = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            birth.wait_for_adoption(between)
            child()
        entry = read_process(pid)
        assert entry is not None, "an unreaped child has an entry"
        os.write(writer, f"{pid} {entry.id.start_time_ticks}".encode())
    finally:
        os._exit(0)


def harm_to_forks() -> str:
    """What forbids forking from this process now; empty where nothing does."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"starts {threads - 1} thread(s)"
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return "initialises CUDA"
    # Not every library reaches CUDA through torch; the driver's memory device is opened by cuInit
    # alone.
    if any(_is_cuda_memory_device(name) for name in os.listdir("/proc/self/fd")):
        return "initialises CUDA"
    return ""


def _is_cuda_memory_device(descriptor_name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor_name}").startswith("/dev/nvidia-uvm")
    except OSError:
        return False
