"""What is pending: collectives whose tensors hold garbage, and the kernels that wait for them.

Owns: one collective from its launch to its end; what plays the device's stream order on a CPU: a
kernel that reads or writes a tensor of a pending collective holds until that has ended. Does not
own: the threads that run collectives (`group`), abort and watchdog (`device`).

Invariants: the host never waits for a collective by itself, `wait()` included; a collective that
was aborted ends without an exception and leaves garbage; nothing is written into a tensor behind
the end of its collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

GARBAGE = 77  # plausible to every kernel, and to no digest
Launch = Callable[[Any, list[Tensor], list[Tensor]], Any]
"""`(group of Gloo's, outputs, inputs)` -> its work."""

_guard = threading.Lock()
_pending: dict[int, list[Work]] = {}  # by storage
_HOST_READS = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.item}
_inside = threading.local()
_ATEN = torch.ops.aten
_READ_NOTHING = {
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_zeros.default,
    _ATEN.zeros_like.default,
}


class Work(dist._Work):
    """One collective. Its outputs are garbage until it has ended, and after an abort for ever."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        launch: Launch,
        *,
        blocks_host: bool = False,
    ) -> None:
        """`outputs` and `inputs`: the same list where it works in place."""
        super().__init__()
        self.name = name
        self.blocks_host = blocks_host  # as NCCL's barrier does
        self.raises: Callable[[], str | None] = lambda: None  # where a wait is a blocking one
        self.began_s = time.monotonic()
        self.is_sound = False
        self._in_place = outputs is inputs
        self._outputs, self._inputs, self._launch = list(outputs), list(inputs), launch
        self._ended = threading.Event()
        self._given: list[Tensor] | None = None
        touched = [*self._outputs, *self._inputs]
        self._after = works_on(touched)
        if not self._after:
            self._take()
        with _guard:
            for key in {_key(tensor) for tensor in touched}:
                _pending.setdefault(key, []).append(self)

    # --- torch's side ----------------------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Only the stream waits; the host goes on at once."""
        if self.blocks_host:
            self.host_wait()
        if (reason := self.raises()) is not None:
            raise dist.DistBackendError(reason)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set()  # NCCL does not know of garbage either

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        """Complete at once, as CUDA's: what hangs on it is queued on the stream."""
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    # --- the device's side -----------------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Whether its stream is past it."""
        return self._ended.is_set()

    def host_wait(self, limit_s: float | None = None) -> bool:
        """The host waits for the device."""
        return self._ended.wait(limit_s)

    @torch.no_grad()
    def execute(self, gloo: Callable[[], Any], pass_on: Callable[[Work], object]) -> None:
        """In a stream's thread. Raises RuntimeError where a peer is gone.

        `pass_on` returns when the results may be seen; the peers have theirs by then.
        """
        for before in self._after:
            before.host_wait()
        if self._given is None:
            self._take()
        assert self._given is not None, "taken above"
        outputs = self._given
        if not self._in_place:
            outputs = [torch.empty_like(tensor) for tensor in self._outputs]
        if not self._ended.is_set():
            self._launch(gloo(), outputs, self._given).wait()
            pass_on(self)
            self.end(outputs)

    def end(self, results: list[Tensor] | None = None) -> None:
        """Once; without results: what its tensors hold by now is what they keep."""
        with _guard:
            if self._ended.is_set():
                return
            for tensor, result in zip(self._outputs, results or (), strict=False):
                if tensor.untyped_storage().size():
                    tensor.data.copy_(result)  # by `data`: a device's writes raise no version
            self.is_sound = results is not None
            for key in [key for key, works in _pending.items() if self in works]:
                _pending[key].remove(self)
                if not _pending[key]:
                    del _pending[key]
            self._outputs, self._inputs, self._given = self._outputs, [], None
            self._after = []
            self._ended.set()

    @torch.no_grad()
    def _take(self) -> None:
        """The inputs as they are by now; from here on the outputs are garbage."""
        given = [tensor.data.clone() for tensor in self._inputs]
        for tensor in self._outputs:
            tensor.data.fill_(GARBAGE if tensor.dtype is not torch.bool else 1)
        self._given = given


def works_on(tensors: Iterable[Tensor]) -> list[Work]:
    """The pending collectives that these tensors belong to."""
    if not _pending:
        return []
    keys = {_key(tensor) for tensor in tensors}
    with _guard:
        return [work for key in keys for work in _pending.get(key, ())]


def pending_works() -> list[Work]:
    """Everything that has been launched and has not ended."""
    with _guard:
        return [work for works in _pending.values() for work in works]


def synchronize() -> None:
    """The host waits for everything, as `torch.cuda.synchronize`."""
    for work in pending_works():
        work.host_wait()


def _key(tensor: Tensor) -> int:
    return int(_local(tensor).untyped_storage()._cdata)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Kernels(TorchDispatchMode):
    """Holds each kernel of this thread until the collectives that it depends on have ended."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes by here again
        if _pending and not func.is_view and func not in _READ_NOTHING:
            for work in works_on(_tensors_in((args, kwargs))):
                work.host_wait()
        was, _inside.handler = getattr(_inside, "handler", False), True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _inside.handler = was


class HostReads(TorchFunctionMode):
    """Holds the host where it reads a tensor's bytes, as a copy from a device does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOST_READS:
            for work in works_on(_tensors_in((args, kwargs))):
                work.host_wait()
        return func(*args, **(kwargs or {}))


def watch_this_thread() -> None:
    """From now on the kernels of the calling thread keep the order of the streams."""
    if getattr(_inside, "handler", False):
        return  # launched by a kernel that is watched already; its mode is off the stack meanwhile
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, Kernels) for mode in stack):
        _python_dispatch._push_mode(Kernels())
        torch._C._push_on_torch_function_stack(HostReads())


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
