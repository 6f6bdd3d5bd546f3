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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stepfast.checkpoint.arena import Slot
from stepfast.checkpoint.capture import COPY_ERRORS
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.tensors.copier import Copier, Copying, Pairs, copy_few
from stepfast.checkpoint.tensors.fixed import are
from stepfast.checkpoint.tensors.local import local_of
from stepfast.checkpoint.tensors.naming import is_transparent
from stepfast.checkpoint.tensors.trust import Trust

Copiers = Mapping[str, Copier]  # by type of device
_CANCEL_LIMIT_S = 10.0
# What is asked of all tensors at every step, in C.
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
_STRIDE: Callable[[Tensor], tuple[int, ...]] = Tensor.stride
_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Staging:
    """The part of one snapshot that is copied beside the training."""

    def __init__(
        self, aliases: Aliases, tensors: list[Tensor], devices: list[str], trust: Trust | None
    ) -> None:
        """`tensors`: the local tensors as they are at the boundary, on `devices`, as far as what
        `trust` believes is true; `aliases` of them.
        """
        self._aliases, self._tensors = aliases, tensors
        self._versions = _versions(tensors)
        self._devices = devices
        self._trust = trust
        self._seen: _Seen | None = None
        self._under_way: list[Copying] = []

    def start(
        self, slot: Slot, now: Pairs, targets: list[Tensor], plain: bytes, copiers: Copiers
    ) -> None:
        """Begin to copy what may change at once, `now`, the aliases to `targets`, and `plain`."""
        later = targets, self._aliases.tensors
        beside = self._copied_by_one_that_calls(copiers)
        if not beside:
            slot.write_plain(plain)

        def at_end() -> None:
            if beside:
                slot.write_plain(plain)
                self._look()

        try:
            for device, mine_now, mine in _by_device(now, later, self._devices):
                if device not in copiers:
                    copy_few(*mine_now)
                    continue
                copying = copiers[device].start(slot, mine_now, mine, at_end)
                self._under_way.append(copying)
        except BaseException:
            self.cancel()
            self.wait(_CANCEL_LIMIT_S)
            raise

    def _copied_by_one_that_calls(self, copiers: Copiers) -> bool:
        """Whether one copier has all that is copied beside the training, and says at its end."""
        devices = set(self._devices)
        return len(devices) == 1 and copiers[devices.pop()].calls_at_end

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
        # What was believed wrongly may not fit where it is copied to.
        if failure is not None and not self.broken():
            raise failure
        return True

    def cancel(self) -> None:
        """Stop soon; `wait` says when."""
        for copying in self._under_way:
            copying.cancel()

    def changed(self) -> list[str]:
        """The tensors that were changed or given other memory since the boundary, before they were
        copied.
        """
        return self._seen_behind_copy().changed

    def broken(self) -> list[str]:
        """The objects that hold other tensors than was believed."""
        return self._seen_behind_copy().broken

    def _seen_behind_copy(self) -> _Seen:
        if self._seen is None:
            self._look()
        assert self._seen is not None, "it was looked"
        return self._seen

    def _look(self) -> None:
        """What became of it; where a thread copied, in that thread, so that no fence waits."""
        broken = [] if self._trust is None else self._trust.broken()
        self._seen = _Seen(self._changed(), broken)

    def _changed(self) -> list[str]:
        # No shapes: with the same memory and version, what was copied is what was there.
        addresses, strides = _memory(self._tensors)
        versions = _versions(self._tensors)
        if self._aliases.are_over(addresses, strides) and versions == self._versions:
            return []
        before = zip(self._aliases.addresses, self._aliases.strides, self._versions, strict=True)
        pairs = zip(before, zip(addresses, strides, versions, strict=True), strict=True)
        return [name for name, (x, y) in zip(self._aliases.names, pairs, strict=True) if x != y]


class _Seen(NamedTuple):
    """What speaks against a copy: tensors that changed, objects that hold others."""

    changed: list[str]
    broken: list[str]


class Aliases:
    """Tensors over the memory that is copied: it stays, though the originals be given other memory.

    What has one of the addresses is kept alive, and so is alone to have it.
    """

    def __init__(self, names: list[str], originals: list[Tensor], digest: str) -> None:
        """`digest`: of the layout that has the shapes and dtypes of `originals`."""
        self.names, self.originals, self.digest = names, originals, digest
        self.addresses, self.strides = _memory(originals)
        self.tensors = [tensor.detach() for tensor in originals]

    def are_over(self, addresses: list[int], strides: list[tuple[int, ...]]) -> bool:
        """Whether that is the memory."""
        return addresses == self.addresses and strides == self.strides


class KeptAliases:
    """Kept from one snapshot to the next, for making them takes time at each boundary."""

    def __init__(self) -> None:
        self._kept: Aliases | None = None

    def of(
        self, names: list[str], tensors: list[Tensor], layout: Layout, looked_at: list[bool]
    ) -> Aliases:
        """An alias of each of the tensors; those that are not `looked_at` are believed to be where
        they were. `layout` has their shapes and dtypes.
        """
        kept = self._kept
        if kept is None or layout.digest != kept.digest or names != kept.names:
            is_good = False
        elif are(tensors, kept.originals):
            before = list(compress(kept.addresses, looked_at))
            is_good = list(map(_ADDRESS, compress(tensors, looked_at))) == before
        else:  # as FSDP1's, which are cut anew each time
            is_good = kept.are_over(*_memory(tensors))
        if kept is None or not is_good:
            kept = self._kept = Aliases(names, tensors, layout.digest)
        return kept


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


def _memory(tensors: list[Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    return list(map(_ADDRESS, tensors)), list(map(_STRIDE, tensors))


def _by_device(now: Pairs, later: Pairs, devices: list[str]) -> Iterator[tuple[str, Pairs, Pairs]]:
    """What is copied `now` and `later` by type of device; `devices` are of the latter."""
    devices_now = [tensor.device.type for tensor in now[1]]
    present = {*devices_now, *devices}
    if len(present) == 1:
        yield present.pop(), now, later
        return
    for device in sorted(present):
        yield device, _part_of(now, devices_now, device), _part_of(later, devices, device)


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
