"""What of a snapshot may be copied while the training goes on, and whether that went well.

Owns: which tensors change inside of an optimizer's step alone; whether one of them changed all the
same. Does not own: the copying (`copier`), when to wait for it and what follows (`capture`).

A change is seen by the tensor's version or by other memory behind it. Some leave no such trace:
writes through `.data`, kernels of one's own, fused optimizers. For those there are the fence before
every optimizer's step, and `differing`, which compares bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepfast.checkpoint.arena import Slot
from stepfast.checkpoint.capture import COPY_ERRORS
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.tensors.copier import Copier, Copying, Pairs, copy_few
from stepfast.checkpoint.tensors.local import local_of
from stepfast.checkpoint.tensors.naming import is_transparent

Copiers = Mapping[str, Copier]  # by type of device
_CANCEL_LIMIT_S = 10.0
# What is asked of all tensors at every step, in C.
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
_STRIDE: Callable[[Tensor], tuple[int, ...]] = Tensor.stride
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Staging:
    """The part of one snapshot that is copied beside the training."""

    def __init__(self, names: list[str], tensors: list[Tensor], devices: list[str]) -> None:
        """`tensors`: the local tensors under `names`, as they are at the boundary, on `devices`."""
        self.names = names
        self.tensors = tensors
        # No shapes: with the same memory and version, what was copied is what was there.
        self.addresses = list(map(_ADDRESS, tensors))
        self._versions = _versions(tensors)
        self._devices = devices
        self._under_way: list[Copying] = []

    def start(self, slot: Slot, now: Pairs, later: Pairs, copiers: Copiers) -> None:
        """Begin to copy aliases of the tensors, `later`, and what may change at once, `now`."""
        devices_now = [tensor.device.type for tensor in now[1]]
        try:
            for device in sorted({*devices_now, *self._devices}):
                mine_now = _part_of(now, devices_now, device)
                if device not in copiers:
                    copy_few(*mine_now)
                    continue
                mine = _part_of(later, self._devices, device)
                self._under_way.append(copiers[device].start(slot, mine_now, mine))
        except BaseException:
            self.cancel()
            self.wait(_CANCEL_LIMIT_S)
            raise

    @property
    def stands_after_abort(self) -> bool:
        """Whether what was copied is sound though the groups were aborted meanwhile."""
        return all(copying.stands_after_abort for copying in self._under_way)

    @property
    def own_s(self) -> float:
        """Processor time that the copying took beside the training, once it has ended."""
        return sum(copying.own_s for copying in self._under_way)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is written any more; `wait` says whether it went well."""
        try:
            return self.wait(0.0)
        except COPY_ERRORS:
            return True

    def wait(self, limit_s: float) -> bool:
        """Whether all has ended within the limit; then it raises what stopped a copy."""
        deadline_s, failure = time.monotonic() + limit_s, None
        for copying in self._under_way:
            try:
                if not copying.wait(max(0.0, deadline_s - time.monotonic())):
                    return False
            except COPY_ERRORS as error:  # the others still write
                failure = error
        if failure is not None:
            raise failure
        return True

    def cancel(self) -> None:
        """Stop soon; `wait` says when."""
        for copying in self._under_way:
            copying.cancel()

    def changed(self) -> list[str]:
        """The tensors that were changed or given other memory since the boundary."""
        addresses = list(map(_ADDRESS, self.tensors))
        versions = _versions(self.tensors)
        if addresses == self.addresses and versions == self._versions:
            return []
        before = zip(self.addresses, self._versions, strict=True)
        pairs = zip(before, zip(addresses, versions, strict=True), strict=True)
        return [name for name, (x, y) in zip(self.names, pairs, strict=True) if x != y]


class Aliases:
    """Tensors over the memory that is copied: it stays, though the originals be given other memory.

    Kept from one snapshot to the next, for making them takes time at each boundary.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] = []
        # Of the last ones. What has one of the addresses is kept alive, and so is alone to have it.
        self._views: tuple[object, ...] = ()

    def of(self, staging: Staging, layout: Layout) -> list[Tensor]:
        """An alias of each staged tensor; `layout` has their shapes and dtypes."""
        strides = list(map(_STRIDE, staging.tensors))
        views = (layout.digest, staging.names, staging.addresses, strides)
        if views != self._views:
            self._found, self._views = [tensor.detach() for tensor in staging.tensors], views
        return self._found


def optimizer_held(objects: Mapping[str, Any]) -> Iterator[Tensor]:
    """What only an optimizer's step changes, by all that is known before a turn.

    The parameters in tracked optimizers' groups, and the tensors of their state. Parameters of no
    optimizer are not among them: a copy that averages is written to at any time.
    """
    for value in objects.values():
        if not isinstance(value, Optimizer):
            continue
        for group in value.param_groups:
            yield from group["params"]
        if is_transparent(value):
            for state in value.state.values():
                if isinstance(state, dict):
                    yield from (v for v in state.values() if isinstance(v, Tensor))


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the memory behind `tensors`, of which any of them may be a part."""
    return {tensor.untyped_storage().data_ptr() for tensor in map(local_of, tensors)} - {0}


@torch.no_grad()
def differing(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[int]:
    """The indices at which a tensor is not, bit for bit, what its target holds."""
    pairs = enumerate(zip(targets, tensors, strict=True))
    return [index for index, pair in pairs if not _agree(*pair)]


def _agree(target: Tensor, tensor: Tensor) -> bool:
    if tensor.dtype != target.dtype or tensor.shape != target.shape:
        return False
    return torch.equal(_bits(target).to(tensor.device), _bits(tensor))


def _part_of(pairs: Pairs, devices: list[str], device: str) -> Pairs:
    mine = [each == device for each in devices]
    return list(compress(pairs[0], mine)), list(compress(pairs[1], mine))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])


def _versions(tensors: list[Tensor]) -> list[int]:
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:  # a tensor made in inference mode has none, and no optimizer updates it
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
