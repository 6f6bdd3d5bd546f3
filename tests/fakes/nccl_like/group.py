"""A process group with NCCL's manners, over Gloo, for tensors of a CPU.

Owns: launching collectives in order, on a stream of the group's own; splitting. Does not own: what
pending means to kernels (`works`), abort and watchdog (`device`).

The communicator is made by the first collective, in the stream's thread. Python alone can make a
group of it: `register` puts it beside torch's own backends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from fakes.nccl_like.device import DEVICE, Settings
from fakes.nccl_like.works import Work, watch_this_thread
from stepfast.errors import Interrupted
from stepfast.train.watched_store import WatchedStore

NAME = "nccl_like"
_FOR_EVER = timedelta(days=1)  # Gloo's own limits are not to be met
_CLOSE_LIMIT_S = 5.0
_HOLD_POLL_S = 0.002
_LOOK_S = 0.002


def register() -> None:
    """Make the backend known to torch in this process."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> NcclLike:
    return NcclLike(store, rank, size, timeout)


class NcclLike(dist.ProcessGroup):
    """See the module."""

    supports_splitting = True
    supports_coalescing = False
    bound_device_id = None

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        parent: Work | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.settings = Settings.of(os.environ)
        self.is_aborting = False
        self.error: Any = ErrorType.SUCCESS
        self.said = ""
        self.is_known_broken = False
        self.is_holding = False  # a test's hand: peers have results that are not here yet
        self._rank, self._size, self._timeout = rank, size, timeout
        self._name, self._desc = "", ""
        self._store = store
        self._parent = parent
        self._launched: list[Work] = []
        self._launching = threading.Lock()  # the host's threads launch, others look and abort
        self._number = 0
        self._splits = 0
        self._gloo: Any = None
        self._watched: Any = None  # whoever makes one keeps it
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._connections = DEVICE.add(self)
        self._stream = threading.Thread(target=self._run, name="nccl-like", daemon=True)
        self._stream.start()

    # --- what torch and stepfast ask of a group ---------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815 - C++ looks for it

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 - C++ looks for it
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, description: str) -> None:
        self._desc = description

    def _get_backend(self, device: torch.device) -> NcclLike:
        if device.type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def get_error(self) -> Any:
        """What the communicator knows by now; the watchdog and exceptions come later."""
        return self.error

    # --- ends -------------------------------------------------------------------------------------

    def _group_start(self) -> None:
        DEVICE.start_together()

    def _group_end(self) -> None:
        DEVICE.end_together()

    def abort(self) -> None:
        """See `device`; no exception reaches whoever waits for this group's work."""
        DEVICE.abort(self)

    def shutdown(self) -> None:
        """Waits for what was launched, as long as nothing is stuck."""
        self._queue.put(None)
        self._stream.join(0.0 if self.is_aborting else _CLOSE_LIMIT_S)
        DEVICE.remove(self)

    def end_by_abort(self) -> None:
        """Everything pending ends as it is."""
        with self._launching:
            launched = list(self._launched)
        for work in launched:
            work.end()

    def fail(self, said: str = "unhandled system error") -> None:
        """A test's hand: it breaks. What is pending ends with garbage, and nobody is told yet."""
        self.error, self.said = ErrorType.COMM_ERROR, said
        self.end_by_abort()

    @property
    def is_busy(self) -> bool:
        """Whether something was launched and has not ended."""
        with self._launching:
            return any(not work.is_ended for work in self._launched)

    def overdue(self) -> Work | None:
        """The first work that is over the time limit."""
        now_s, limit_s = time.monotonic(), self._timeout.total_seconds()
        with self._launching:
            launched = list(self._launched)
        late = [w for w in launched if not w.is_ended and now_s - w.began_s > limit_s]
        return late[0] if late else None

    # --- splitting --------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> NcclLike | None:
        """Collective over all ranks of this group, those that are no members included."""
        arrived = self.barrier(wait=False)
        self._splits += 1
        ranks = sorted(new_ranks)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{ranks[0]}"
        store = dist.PrefixStore(f"{name}/", self._store)
        limit = timeout or self._timeout
        child = NcclLike(store, ranks.index(self._rank), len(ranks), limit, parent=arrived)
        child._set_group_name(name)
        child._set_group_desc(group_desc or f"{self._desc}:split")
        return child

    def comm_split_count(self) -> int:
        return self._splits

    # --- collectives ------------------------------------------------------------------------------

    def _start(
        self,
        name: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        launch: Any,
        **more: Any,
    ) -> Work:
        if self.is_aborting:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        if self.is_known_broken:
            raise dist.DistBackendError(f"NCCL error, seen late: {self.said}")
        watch_this_thread()
        work = Work(name, outputs, inputs, launch, **more)
        if self.settings.blocking_wait:
            work.blocks_host = True
            work.raises = lambda: None if work.is_sound else f"{name}: {self.said or 'aborted'}"
        with self._launching:
            self._number += 1
            self._launched = [w for w in self._launched if not w.is_ended] + [work]
        if self.is_aborting:  # meanwhile, by another thread
            work.end()
        self._queue.put(work)
        return work

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        return self._start(
            "broadcast", ts := list(tensors), ts, lambda g, o, i: g.broadcast(o, opts)
        )

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        return self._start(
            "allreduce", ts := list(tensors), ts, lambda g, o, i: g.allreduce(o, opts)
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Work:
        several = partial(_each, lambda g, t: g.allreduce([t], _reduce_options(opts)))
        return self._start("allreduce", ts := list(tensors), ts, several)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        return self._start("reduce", ts := list(tensors), ts, lambda g, o, i: g.reduce(o, opts))

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Work:
        outputs = list(output_lists[0])
        return self._start("allgather", outputs, list(inputs), lambda g, o, i: g.allgather([o], i))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        return self._start(
            "all_gather_single", [output], [given], lambda g, o, i: g._allgather_base(o[0], i[0])
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return works[-1]

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> Work:
        return self._start(
            "reduce_scatter_single",
            [output],
            [given],
            lambda g, o, i: g._reduce_scatter_base(o[0], i[0], opts),
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return [self.reduce_scatter_single(output, given, opts) for output, given in pairs][-1]

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Work:
        given = list(input_lists[0])
        return self._start(
            "reduce_scatter", list(outputs), given, lambda g, o, i: g.reduce_scatter(o, [i], opts)
        )

    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> Work:
        outputs = list(output_lists[0]) if output_lists else []
        return self._start(
            "gather", outputs, list(inputs), lambda g, o, i: g.gather([o] if o else [], i, opts)
        )

    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> Work:
        given = list(input_lists[0]) if input_lists else []
        return self._start(
            "scatter", list(outputs), given, lambda g, o, i: g.scatter(o, [i] if i else [], opts)
        )

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Work:
        def launch(gloo: Any, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
            return gloo.alltoall_base(outputs[0], inputs[0], output_sizes or [], input_sizes or [])

        return self._start("all_to_all_single", [output], [given], launch)

    def send(self, tensors: Any, to: int, tag: int) -> Work:
        return self._start("send", [], list(tensors), lambda g, o, i: g.send(i, to, tag))

    def recv(self, tensors: Any, source: int, tag: int) -> Work:
        return self._start("recv", list(tensors), [], lambda g, o, i: g.recv(o, source, tag))

    def barrier(self, opts: Any = None, *, wait: bool = True) -> Work:
        """An all-reduce of one element; the host waits for its end, however that comes about."""
        one = [torch.ones(1)]
        launch = lambda g, o, i: g.allreduce(o)  # noqa: E731 - as short as its kin
        return self._start("barrier", one, one, launch, blocks_host=wait)

    # --- the stream -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if work.is_ended:
                continue
            try:
                work.execute(self._communicator, self._pass_on)
            except (RuntimeError, Interrupted):
                work.host_wait()  # a peer is gone: silence, until somebody ends it
            with DEVICE.changed:
                DEVICE.changed.notify_all()
        self._gloo = self._watched = None

    def _pass_on(self, work: Work) -> None:
        while self.is_holding and not work.is_ended:
            work.host_wait(_HOLD_POLL_S)

    def _communicator(self) -> Any:
        if self._parent is not None:
            self._parent.host_wait()
        if self._gloo is None:
            self._watched = _Patient(self._store, self._connections)
            self._gloo = dist.ProcessGroupGloo(
                self._watched, self._rank, self._size, timeout=_FOR_EVER
            )
        return self._gloo


class _Patient(WatchedStore):
    """Looks for a peer's address now and then: a wait in the store would keep the main thread out
    of it, which has the same connection.
    """

    def _until(self, keys: list[str]) -> None:
        while not self._open().check(keys):
            time.sleep(_LOOK_S)

    def get(self, key: str) -> bytes:
        self._until([key])
        return super().get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._until(keys)
        return super().multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._until(keys)


class _Several:
    """Works of Gloo's as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _each(launch: Any, gloo: Any, outputs: list[Tensor], inputs: list[Tensor]) -> _Several:
    return _Several([launch(gloo, tensor) for tensor in outputs])


def _reduce_options(given: Any) -> Any:
    opts = dist.AllreduceOptions()
    opts.reduceOp = given.reduceOp
    return opts
