"""The device of a rank: whose it is, how far it is behind the host, what an interrupt leaves on it.

Owns: the calls of CUDA that no tensor makes. Does not own: copies into slots
(`checkpoint.tensors.copier`), NCCL (`train.torch_groups`), what an error means (`device_errors`).

Invariants: nothing here waits for the device but `settle`, which is bounded and never called in the
loop. No thread touches CUDA before it has entered the device: the runtime would make a context on
the first one instead, half a gigabyte on a stranger's GPU. A thread that only looks spoils no graph
that the training thread captures.

Never run: no machine with a GPU was at hand. The calls are tested with a double in the place of
`torch.cuda` (tests/fakes/device.py).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from stepfast.core.quantities import counted
from stepfast.errors import ConfigError
from stepfast.runtime.ports import Accelerator, Mark

SETTLE_LIMIT_S: Final = 5.0
"""How long a device may take for what is queued on it, once its groups were aborted. Too small
replaces a process whose last kernels are long; bigger than the deadline of interrupts is no use.
"""
_POLL_S: Final = 0.001
_SYMMETRIC_MEMORY: Final = "torch.distributed._symmetric_memory"
# Libraries that keep NVSHMEM's heap, which no part of a world can leave and enter again.
_NVSHMEM_MODULES: Final = ("nvshmem.core", "deep_ep")
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def stand_aside_of_captures() -> None:
    """The calling thread's questions to events and streams spoil no capture of another thread.

    Else they do: under the mode that `torch.cuda.graph` captures in, a question from any thread
    fails and ends the capture (CUDA's cuThreadExchangeStreamCaptureMode). Asked of the driver, for
    torch has no name for it. Never run.
    """
    with suppress(OSError, AttributeError):  # without a driver there is nothing to spoil
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def device_of(device_type: str, local_rank: int, cuda: Any = torch.cuda) -> Accelerator:
    """The device of this rank. ConfigError where there is none of that type."""
    if device_type == "cpu":
        return NoAccelerator()
    if not cuda.is_available():
        raise ConfigError("device cuda: torch sees no CUDA device here; use --device cpu")
    count = cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"device cuda: rank {local_rank} of this node has no GPU of its own, for torch sees"
            f" {count}; run one rank for each, --nproc-per-node {count}"
        )
    return CudaDevice(local_rank, cuda)


class NoAccelerator:
    """The CPU: what the host has done is done. See `Accelerator`."""

    runs_behind = False

    def enter(self) -> None:
        """Every thread is there."""

    def mark(self) -> Mark:
        """Passed when it is made."""
        return _PASSED

    def is_busy(self) -> bool:
        """Never behind the host."""
        return False

    def settle(self, limit_s: float) -> str | None:
        """Nothing to wait for."""
        return None

    def obstacle(self) -> str | None:
        """Nothing is bound to a device."""
        return None

    def free_unused(self) -> None:
        """The allocator of the CPU keeps nothing for itself that is worth a call."""


class _Passed:
    def query(self) -> bool:
        return True


_PASSED: Final = _Passed()


class CudaDevice:
    """One GPU. See `Accelerator`. Never run, as the module says."""

    runs_behind = True

    def __init__(
        self,
        index: int,
        cuda: Any = torch.cuda,
        stand_aside: Callable[[], object] = stand_aside_of_captures,
    ) -> None:
        """`cuda`: the module `torch.cuda`, or a double of it. Touches nothing yet."""
        self.index = index
        self._cuda, self._stand_aside = cuda, stand_aside
        self._entered = threading.local()
        self._stream: Any = None  # on which the training queues its work

    def enter(self) -> None:
        """See `Accelerator`. The first time in a process it makes the CUDA context: a second."""
        if not getattr(self._entered, "is_done", False):
            self._cuda.set_device(self.index)
            if threading.current_thread() is not threading.main_thread():
                self._stand_aside()
            self._entered.is_done = True

    def mark(self) -> Mark:
        """See `Accelerator`. One event, some microseconds; of the thread that trains."""
        self.enter()
        self._stream = self._cuda.current_stream()
        event: Mark = self._cuda.Event()
        event.record(self._stream)  # type: ignore[attr-defined]  # an event is more than a mark
        return event

    def is_busy(self) -> bool:
        """See `Accelerator`. Asks the stream that trained last, and queues nothing on it."""
        if self._stream is None:
            return False
        self.enter()
        return not self._stream.query()

    def settle(self, limit_s: float) -> str | None:
        """See `Accelerator`. Polled, for the driver's own wait has no limit."""
        deadline_s = time.monotonic() + limit_s
        try:
            while self.is_busy():
                if time.monotonic() >= deadline_s:
                    return f"the device did not end what was queued on it within {limit_s:g} s"
                time.sleep(_POLL_S)
        except RuntimeError as error:
            return f"the device is broken: {first_line(error)}"
        return None

    def obstacle(self) -> str | None:
        """See `Accelerator`. Seen are graphs that torch captured (torch.compile's too), torch's
        symmetric memory, and libraries known to use NVSHMEM. Not seen are graphs that a library
        captured by itself, and NVSHMEM inside of an extension of the user's own.
        """
        graphs = self._graph_count()
        if graphs:
            held = counted(graphs, "CUDA graph")
            return f"{held} with communicators and addresses of the generation before"
        symmetric = sys.modules.get(_SYMMETRIC_MEMORY)
        if symmetric is not None and getattr(symmetric, "_group_name_to_store", None):
            return "symmetric memory is bound to the processes of the generation before"
        for name in _NVSHMEM_MODULES:
            if name in sys.modules:
                return f"NVSHMEM ({name}) cannot leave one world and enter another"
        return None

    def _graph_count(self) -> int:
        graph_type = getattr(self._cuda, "CUDAGraph", None)
        if graph_type is None:
            return 0
        # By type and not `isinstance`, which asks the object itself and so runs foreign code.
        return sum(issubclass(type(thing), graph_type) for thing in gc.get_objects())

    def free_unused(self) -> None:
        """See `Accelerator`. Waits for the device, so `settle` comes first."""
        self._cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """What an error of CUDA says before its advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
