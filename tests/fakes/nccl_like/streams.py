"""Side streams beside the groups, with the face of `torch.cuda`: what is queued runs later.

Owns: a thread for each stream, events. Does not own: the main stream, whose kernels run in the
host's thread and wait for collectives there (`works`).

Unlike a double that records calls, the bytes really come late: what reads them before the event
has passed finds what was there before.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.nccl_like.works import pending_works

MAIN = "the main stream"


class Stream:
    """Runs what is queued, in order, unless it is held."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._open = threading.Event()
        self._open.set()
        threading.Thread(target=self._run, name="side-stream", daemon=True).start()

    def queue(self, call: Callable[[], object]) -> None:
        self._queue.put(call)

    def hold(self) -> None:
        """A test's hand: nothing runs until `release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def wait_stream(self, other: str) -> None:
        """What is queued from now on runs behind the collectives that are pending by now."""
        for work in pending_works():
            self.queue(work.host_wait)

    def synchronize(self) -> None:
        """The host waits."""
        done = Event()
        done.record(self)
        done.synchronize()

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                call = self._queue.get()
                self._open.wait()
                call()


class Event:
    """Passed when everything that was queued before it has run."""

    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.queue(self._passed.set)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()


class _On(TorchDispatchMode):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        assert func is torch.ops.aten._foreach_copy_.default, f"nobody queues {func}"
        self._stream.queue(partial(func, *args, **(kwargs or {})))


class Cuda:
    """What `StreamCopier` asks of `torch.cuda`."""

    Event = Event

    def __init__(self) -> None:
        self.side = Stream()

    def Stream(self) -> Stream:  # noqa: N802 - torch's name
        return self.side

    def current_stream(self) -> str:
        return MAIN

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _On(stream):
            yield

    def cudart(self) -> Any:
        nothing = lambda *arguments: 0  # noqa: E731 - both calls succeed
        return SimpleNamespace(cudaHostRegister=nothing, cudaHostUnregister=nothing)
