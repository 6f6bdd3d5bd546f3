"""How bytes that were saved get into the tensors that are there.

Owns: the choice between a copy of what lies in memory and a read into the tensor itself. Does not
own: the copies (`copier`), the reads (`checkpoint.shard`), which tensor gets which entry
(`restoration`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from stepfast.checkpoint.layout import Entry
from stepfast.checkpoint.shard import StoredShard
from stepfast.checkpoint.tensors.copier import copy_all, count_as_changed, is_plain
from stepfast.checkpoint.tensors.local import over
from stepfast.checkpoint.tensors.restoration import Copy, Views


def from_views(source: Views) -> Copy:
    """Copies from memory."""

    def copy(targets: Sequence[Tensor], entries: Sequence[Entry]) -> None:
        copy_all(targets, [over(source.view(entry), entry) for entry in entries])

    return copy


def from_file(shard: StoredShard) -> Copy:
    """Reads into the tensors themselves, where these lie in the processor's memory as in a file."""
    views = from_views(shard)

    def copy(targets: Sequence[Tensor], entries: Sequence[Entry]) -> None:
        direct: list[tuple[Tensor, Entry]] = []
        others: list[tuple[Tensor, Entry]] = []
        for target, entry in zip(targets, entries, strict=True):
            (direct if _is_as_saved(target, entry) else others).append((target, entry))
        shard.fill((entry, _memory_of(target)) for target, entry in direct)
        count_as_changed([target for target, _ in direct])
        if others:
            views([target for target, _ in others], [entry for _, entry in others])

    return copy


def _is_as_saved(target: Tensor, entry: Entry) -> bool:
    size_bytes = target.numel() * target.element_size()
    return is_plain(target) and size_bytes == entry.size_bytes


def _memory_of(tensor: Tensor) -> memoryview:
    """The tensor's own bytes; it must outlive them."""
    size_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(tensor.data_ptr())).cast("B")
