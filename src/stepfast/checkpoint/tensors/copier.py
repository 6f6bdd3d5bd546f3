"""Copying tensors into a slot beside the training: one thread on a CPU, one stream on CUDA.

Owns: the copies, and when their bytes are in place. Does not own: which tensors are copied and
whether they changed meanwhile (`staging`), the slot and its seal.

Invariants:
- A copy that has ended writes no more, whether whole, cancelled or failed; `wait` says which.
- The memory that is read stays alive until then, whatever becomes of the tensors.
- The thread holds no lock that anybody else takes, and never keeps the process alive: a process
  forked meanwhile has no such thread and no trace of it.
"""

from __future__ import annotations

import _thread
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.nn import Parameter

from stepfast.checkpoint.arena import Slot
from stepfast.checkpoint.capture import COPY_ERRORS
from stepfast.errors import OperatingError

PIECE_BYTES = 8 << 20
"""A cancelled copy ends behind the present piece: about a millisecond. Smaller pieces only take the
interpreter's lock more often.
"""
SMALL_BYTES = 128 << 10
"""Tensors up to this size are copied many in one call. torch copies so few elements of any dtype in
the calling thread, without its pool.
"""
HEAD_START_S_PER_BYTE = 1 / 50e9
HEAD_START_S_MAX = 0.003
"""The training goes ahead of a copy by a tenth of what that will take. The node's ranks are at the
same boundary at the same time, and the first one's copy takes the core that another is there on:
without this, a third of the boundaries take twice as long (two ranks on two cores, 0.3 GB each).
"""
_POLL_S = 0.0005
# Of cudaError, what a registration of host memory fails by: invalid value, memory, already done,
# not permitted, not supported.
_OF_PINNING = (1, 2, 712, 800, 801)
_AT_ONE_GO = 1 << 62


class Copying(Protocol):
    """Copies that are under way."""

    @property
    def stands_after_abort(self) -> bool:
        """Whether what was copied is sound though the groups were aborted meanwhile."""

    @property
    def own_s(self) -> float:
        """Processor time that the copying took beside the training, once it has ended."""

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within the limit. Raises what stopped it before it was whole."""

    def cancel(self) -> None:
        """Stop soon. It has ended when `wait` says so."""


Pairs = tuple[list[Tensor], list[Tensor]]  # targets, views of a slot; sources
AtEnd = Callable[[], object]


def _nothing() -> None:
    pass


class Copier(Protocol):
    """Starts copies of tensors of one kind of device into slots."""

    calls_at_end: bool

    def start(self, slot: Slot, now: Pairs, later: Pairs, at_end: AtEnd = _nothing) -> Copying:
        """Copy as they are what may change as soon as this returns, `now`, and what nobody else
        changes, resizes or frees before the copy has ended, `later`.

        A copy that `calls_at_end` does so beside the training, when it is whole, before it ends.
        """


# ------------------------------------------------------------------------------------------ a CPU


class ThreadCopier:
    """Copies of CPU tensors, each by a thread of its own that ends with it.

    Not one that waits for the next copy: when it is woken, the kernel lets it have the core of the
    training at once, and holds the boundary for milliseconds.

    One thread copies 5 GB/s and more, so a pool would win little and take cores from the training:
    large contiguous tensors go by memmove, which knows no pool.
    """

    calls_at_end = True

    def start(self, slot: Slot, now: Pairs, later: Pairs, at_end: AtEnd = _nothing) -> Copying:
        """See `Copier`. Raises OperatingError where no thread can be had."""
        copy_few(*now)
        if not later[0]:
            return Copied()
        head_start_s = min(HEAD_START_S_MAX, slot.layout.file_bytes * HEAD_START_S_PER_BYTE)
        copying = ThreadCopying(*later, at_end, head_start_s)
        try:
            # Not threading.Thread: its start waits for the thread's first lines, its end is joined.
            _thread.start_new_thread(copying.run, ())
        except RuntimeError as error:
            raise OperatingError(f"no thread to copy a snapshot with: {error}") from error
        return copying


class Copied:
    """See `Copying`: there was nothing left to do."""

    stands_after_abort = True
    own_s = 0.0

    def wait(self, limit_s: float) -> bool:
        """See `Copying`."""
        return True

    def cancel(self) -> None:
        """It has ended."""


class ThreadCopying:
    """See `Copying`."""

    stands_after_abort = True  # a boundary is reached behind every collective of its step

    def __init__(
        self,
        targets: list[Tensor],
        sources: list[Tensor],
        at_end: AtEnd = _nothing,
        head_start_s: float = 0.0,
    ) -> None:
        self.own_s, self._head_start_s = 0.0, head_start_s
        self._targets, self._sources, self._at_end = targets, sources, at_end
        self._cancelled = False
        self._error: Exception | None = None
        # Held until it has ended; a tenth of what an Event costs.
        self._running = _thread.allocate_lock()
        self._running.acquire()

    def wait(self, limit_s: float) -> bool:
        """See `Copying`."""
        if not self._running.acquire(timeout=limit_s):
            return False
        self._running.release()  # for whoever asks next
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """See `Copying`."""
        self._cancelled = True

    def run(self) -> None:
        """Copy; it has ended when this returns, whatever happened."""
        time.sleep(self._head_start_s)
        try:
            for piece in pieces(self._targets, self._sources):
                if self._cancelled:
                    break
                piece()
            else:
                self._at_end()
        except COPY_ERRORS as error:
            self._error = error
        finally:
            # The thread outlives its last line.
            self._targets, self._sources, self._at_end = [], [], _nothing
            self.own_s = time.thread_time()
            self._running.release()


def pieces(
    targets: Sequence[Tensor], sources: Sequence[Tensor], piece_bytes: int = PIECE_BYTES
) -> Iterator[Callable[[], object]]:
    """Calls that copy `sources` into `targets` together, each of them some `piece_bytes` at most.

    Only a tensor that is not contiguous is one piece whatever its size.
    """
    few: tuple[list[Tensor], list[Tensor]] = ([], [])
    few_bytes = 0
    for target, source in zip(targets, sources, strict=True):
        size_bytes = target.numel() * target.element_size()
        if size_bytes > SMALL_BYTES:
            yield from _pieces_of(target, source, size_bytes, piece_bytes)
            continue
        few[0].append(target)
        few[1].append(source)
        few_bytes += size_bytes
        if few_bytes > PIECE_BYTES:
            yield partial(torch._foreach_copy_, *few)
            few, few_bytes = ([], []), 0
    if few[0]:
        yield partial(torch._foreach_copy_, *few)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy `sources` into `targets` in the calling thread, on whatever devices they are.

    A tensor in the processor's memory goes by memmove, at one go: from a size on that libc knows,
    it then passes the caches by and takes half the time.
    """
    for piece in pieces(targets, sources, _AT_ONE_GO):
        piece()
    count_as_changed(targets)


def copy_few(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy `sources`, if there are any, into `targets` by one call of torch's."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def count_as_changed(tensors: Sequence[Tensor]) -> None:
    """Raise the versions of tensors whose memory was written to behind torch's back: whoever kept
    one for a backward must notice.
    """
    changed = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(changed)


def _pieces_of(
    target: Tensor, source: Tensor, size_bytes: int, piece_bytes: int
) -> Iterator[Callable[[], object]]:
    is_same = source.shape == target.shape and source.dtype == target.dtype
    if not is_same or not is_plain(target) or not is_plain(source):
        yield partial(target.copy_, source)
        return
    to, start = target.data_ptr(), source.data_ptr()
    for at in range(0, size_bytes, piece_bytes):
        yield partial(ctypes.memmove, to + at, start + at, min(piece_bytes, size_bytes - at))


def is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are its elements, in their order, in the processor's memory."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# ------------------------------------------------------------------------------------------- CUDA


class StreamCopier:
    """Copies of CUDA tensors, on a side stream behind the work that is queued when they start.

    Never run: no machine with a GPU was at hand. Its calls and their order are tested with doubles
    in the place of `torch.cuda` alone. The slot's memory is registered as pinned when it is first
    used; without that each copy would hold the host. Nothing waits for the whole device.
    """

    calls_at_end = False  # the host hears of the end at the fence

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda`: the module `torch.cuda`, or a double of it."""
        self._cuda = cuda
        self._stream: Any = None
        self._pinned: WeakKeyDictionary[Slot, finalize[..., Any]] = WeakKeyDictionary()

    def start(
        self, slot: Slot, now: Pairs, later: Pairs, at_end: AtEnd = _nothing
    ) -> StreamCopying:
        """See `Copier`. Raises OperatingError where the slot's memory cannot be pinned, and
        RuntimeError where the device is broken.

        What is copied `now` is queued where the training is, before whatever may change it: the
        host does not wait for it.
        """
        if self._stream is None:
            self._stream = self._cuda.Stream()
        if slot not in self._pinned:
            self._pinned[slot] = self._pin(slot)
        copy_few(*now, non_blocking=True)
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            copy_few(*later, non_blocking=True)
            done = self._cuda.Event()
            done.record(self._stream)
        return StreamCopying(done, now, later)

    def _pin(self, slot: Slot) -> finalize[..., Any]:
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        driver, address = self._cuda.cudart(), memory.data_ptr()
        code = int(driver.cudaHostRegister(address, memory.numel(), 0))
        if code != 0 and code not in _OF_PINNING:  # of an earlier call's, and shown by this one
            raise RuntimeError(f"CUDA error: {code}, met when {slot.path} was to be pinned")
        if code != 0:
            raise OperatingError(
                f"{slot.path}: CUDA refused to pin {memory.numel()} bytes (error {code});"
                " raise the limit of locked memory (ulimit -l), or give the node more of it"
            )
        # Runs while the slot still holds its mapping. At the process's end the driver does it.
        undo = finalize(slot, driver.cudaHostUnregister, address)
        undo.atexit = False
        return undo


class StreamCopying:
    """See `Copying`. The host waits for the event of its last copy, while the device goes on with
    what is queued behind. Never run, like `StreamCopier`.
    """

    # The host is ahead of the device: what it copies may come out of a collective that was aborted.
    stands_after_abort = False
    own_s = 0.0

    def __init__(self, done: Any, *pairs: Pairs) -> None:
        self._done = done
        self._alive = pairs

    def wait(self, limit_s: float) -> bool:
        """See `Copying`. Polled, for the driver's own wait has no limit."""
        deadline_s = time.monotonic() + limit_s
        while not self._done.query():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def cancel(self) -> None:
        """What is queued on a stream cannot be taken back; it only has to end."""
