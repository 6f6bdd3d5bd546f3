"""A device without one: a double of the module `torch.cuda` with the manners of a GPU.

    cuda = FakeCuda()
    with cuda.held():            # what is queued meanwhile does not end, and so no event behind it
        copier.start(...)
    cuda.lose_context(700)       # from now on every call fails with this error
    cuda.pinned_bytes_max = 0    # registration of host memory fails
    with cuda.captured():        # a graph, in the mode that torch.cuda.graph captures in
        ...

Owns: streams and events in their order, contexts by thread, pinned memory, the allocator's
account, sticky errors, what was asked of it (`calls`). Does not own: kernels; tensors are the
CPU's, and what torch does to them is done at once, whatever a stream says.

Invariants: an event has passed when all that was queued on its stream before it has, and all that
the stream waited for. Nothing that the loop may call waits; `synchronize` is counted, for it must
not be called there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

# Numbers of cudaError, and the words of cudaGetErrorString, which torch puts behind "CUDA error: ".
ERRORS = {
    1: "invalid argument",
    2: "out of memory",
    214: "uncorrectable ECC error encountered",
    700: "an illegal memory access was encountered",
    710: "device-side assert triggered",
    900: "operation not permitted when stream is capturing",
}
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
NEVER = 1 << 30


def accelerator_error(code: int) -> Exception:
    """As torch makes one: its message, and the number beside it."""
    error = torch.AcceleratorError(
        f"CUDA error: {ERRORS[code]}\nSearch for `{code}' in the CUDA documentation\n"
        "CUDA kernel errors might be asynchronously reported at some other API call"
    )
    error.error_code = code  # type: ignore[attr-defined]  # torch sets it so
    return error


@dataclass(slots=True, eq=False)
class Work:
    """One thing on a stream. It ends behind what is before it, after `looks_left` more looks."""

    before: list[Work]
    looks_left: int

    def has_ended(self) -> bool:
        if not all(work.has_ended() for work in self.before):
            return False
        self.before = []
        if self.looks_left > 0:
            self.looks_left -= 1 if self.looks_left < NEVER else 0
            return False
        return True


class FakeStream:
    """A queue of work; `FakeCuda.held` and `launch` say when it ends."""

    def __init__(self, cuda: FakeCuda, name: str = "side stream") -> None:
        self._cuda, self.name = cuda, name
        self._last: Work | None = None
        self._waits: list[Work] = []

    def queue(self, looks: int = 0) -> Work:
        before = [*self._waits, *([] if self._last is None else [self._last])]
        work = Work(before, NEVER if self._cuda.is_holding else looks)
        self._cuda.queued.append(work)
        self._last, self._waits = work, []
        return work

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.touched(f"{self.name} waits for {other.name}")
        if other._last is not None:
            self._waits.append(other._last)

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.touched(f"{self.name} waits for an event")
        if event.work is not None:
            self._waits.append(event.work)

    def query(self) -> bool:
        self._cuda.asked()
        return self._last is None or self._last.has_ended()

    def synchronize(self) -> None:
        self._cuda.touched("stream synchronized")
        while not self.query():
            assert not self._cuda.is_holding, "a stream that never ends was waited for"


class FakeEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.work: Work | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        self._cuda.touched(f"event recorded on {stream.name}")
        self.work = stream.queue()

    def query(self) -> bool:
        self._cuda.asked()
        return self.work is None or self.work.has_ended()

    def synchronize(self) -> None:
        self._cuda.touched("event synchronized")
        while not self.query():
            assert not self._cuda.is_holding, "an event that never comes was waited for"

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds; there are no clocks here."""
        self._cuda.touched()
        return 1.0


@dataclass
class FakeCuda:
    """See the module."""

    device_count_: int = 8
    total_bytes: int = 1 << 30
    pinned_bytes_max: int = 1 << 40
    calls: list[str] = field(default_factory=list)
    contexts: set[int] = field(default_factory=set)  # the devices that some thread touched
    pinned: dict[int, int] = field(default_factory=dict)  # bytes by address
    queued: list[Work] = field(default_factory=list)
    cached_bytes: int = 0  # kept by the allocator, in use by nobody
    used_bytes: int = 0
    is_available_: bool = True
    is_holding: bool = False
    device_syncs: int = 0
    lost: int | None = None
    is_capturing: bool = False

    def __post_init__(self) -> None:
        self._by_thread = threading.local()
        self._default = FakeStream(self, "the current one")
        self._generator = torch.Generator()
        self._initialized = False

    # --- what a test does to it ------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is queued within does not end before the block does."""
        first, self.is_holding = len(self.queued), True
        try:
            yield
        finally:
            self.is_holding = False
            for work in self.queued[first:]:
                work.looks_left = 0

    def launch(self, looks: int = 0) -> None:
        """A kernel on the current stream, which ends after so many looks at something behind it."""
        self.touched()
        self.current_stream().queue(looks)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """A capture, which a question of any thread but a relaxed one ends."""
        self.is_capturing = True
        yield
        assert self.is_capturing, "the capture was spoiled"
        self.is_capturing = False

    def relax(self) -> None:
        """As cuThreadExchangeStreamCaptureMode does for the calling thread."""
        self._by_thread.is_relaxed = True

    def asked(self) -> None:
        """Whether something has ended."""
        self.touched()
        if self.is_capturing and not getattr(self._by_thread, "is_relaxed", False):
            self.is_capturing = False
            raise accelerator_error(900)

    def lose_context(self, code: int) -> None:
        """A sticky error: it shows at whatever is called next, and ever after."""
        self.lost = code

    def touched(self, call: str = "") -> None:
        """Every call of the runtime: makes a context on the thread's device, tells what broke."""
        self._initialized = True
        self.contexts.add(self.current_device())
        if call:
            self.calls.append(call)
        if self.lost is not None:
            raise accelerator_error(self.lost)

    # --- torch.cuda ------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return self.is_available_

    def is_initialized(self) -> bool:
        return self._initialized

    def init(self) -> None:
        self.touched()

    def device_count(self) -> int:
        return self.device_count_

    def current_device(self) -> int:
        return getattr(self._by_thread, "device", 0)

    def set_device(self, device: int | torch.device) -> None:
        self._by_thread.device = device if isinstance(device, int) else device.index or 0
        self.touched()

    def get_device_name(self, device: Any = None) -> str:
        return "a device without one"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(name=self.get_device_name(), total_memory=self.total_bytes)

    def Stream(self, device: Any = None) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self)

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self)

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._by_thread, "stream", self._default)

    def default_stream(self, device: Any = None) -> FakeStream:
        return self._default

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._by_thread.stream = self.current_stream(), stream
        self.calls.append(f"on the {stream.name}")
        try:
            yield
        finally:
            self._by_thread.stream = before
            self.calls.append("back")

    def synchronize(self, device: Any = None) -> None:
        self.device_syncs += 1
        self.touched("device synchronized")
        assert not any(w.looks_left >= NEVER for w in self.queued), "what never ends was waited for"

    def _sleep(self, cycles: int) -> None:
        """A kernel that takes its time: three looks."""
        self.launch(looks=3)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self.touched()
        return self.total_bytes - self.used_bytes - self.cached_bytes, self.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self.used_bytes

    def memory_reserved(self, device: Any = None) -> int:
        return self.used_bytes + self.cached_bytes

    def empty_cache(self) -> None:
        self.touched("cache emptied")
        self.cached_bytes = 0

    def take_bytes(self, size_bytes: int) -> None:
        """What a tensor of that size takes; OutOfMemoryError where it is not there."""
        self.touched()
        if self.used_bytes + size_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size_bytes} bytes"
            )
        self.used_bytes += size_bytes

    def give_bytes(self, size_bytes: int) -> None:
        """A tensor is gone: the allocator keeps its memory."""
        self.used_bytes -= size_bytes
        self.cached_bytes += size_bytes

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        self.touched()
        return self._generator.get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        self.touched()
        self._generator.set_state(new_state)

    def draw(self) -> float:
        """A number of the device's generator."""
        return float(torch.rand((), generator=self._generator))

    # --- the runtime ------------------------------------------------------------------------------

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(  # noqa: N802 - CUDA's name
        self, pointer: int, size_bytes: int, flags: int
    ) -> int:
        if (code := self._answered(f"{size_bytes} bytes pinned")) != 0:
            return code
        for address, registered in self.pinned.items():
            if pointer < address + registered and address < pointer + size_bytes:
                return ALREADY_REGISTERED
        if sum(self.pinned.values()) + size_bytes > self.pinned_bytes_max:
            return 2
        self.pinned[pointer] = size_bytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802 - CUDA's name
        if (code := self._answered("unpinned")) != 0:
            return code
        return 0 if self.pinned.pop(pointer, None) is not None else NOT_REGISTERED

    def _answered(self, call: str) -> int:
        """The runtime's own functions return their error and raise nothing."""
        try:
            self.touched(call)
        except torch.AcceleratorError:
            assert self.lost is not None, "nothing else raises"
            return self.lost
        return 0
