"""Which parameters require gradients: a loop may freeze and unfreeze them, so it is state.

Owns: reading the flags of all tracked parameters and setting them. Does not own: where parameters
are (`naming`), which of a checkpoint's flags a rank takes (`plan`).

FSDP2 gives its unsharded parameters the flags of its sharded ones at each all-gather, FSDP1 those
of the originals, so both may be set at any boundary. What DDP reduces follows from the flags when
it was made; it is made by `build`, as it was before the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import msgspec
from torch import Tensor

from stepfast.checkpoint import plain
from stepfast.checkpoint.tensors.local import Part
from stepfast.checkpoint.tensors.naming import Objects, Scan

_REQUIRES_GRAD: Callable[[Any], bool] = attrgetter("requires_grad")


class Frozen:
    """The parameters of all modules and the tensors tracked by themselves, by name."""

    def __init__(self, objects: Objects, scans: Mapping[str, Scan]) -> None:
        """True while the modules are built as they were."""
        self._found: dict[str, Tensor] = {n: v for n, v in objects.items() if isinstance(v, Tensor)}
        for held in (held for scan in scans.values() for held in scan.places):
            if held.is_buffer or held.tensor is None:
                continue
            if held.flat is not None:  # what is kept of it is a copy or a piece, which has no flag
                self._found[held.name] = held.flat.parameter
            elif not isinstance(held.tensor, Part):
                self._found[held.name] = held.tensor
        self._tensors = list(self._found.values())
        self._flags: list[bool] | None = None
        self._raw = msgspec.Raw()

    def names(self) -> list[str]:
        """Those that require no gradient."""
        return list(compress(self._found, map(not_, map(_REQUIRES_GRAD, self._tensors))))

    def encoded(self) -> msgspec.Raw:
        """The names, as `plain.encode` takes them; at every boundary, so the bytes are kept."""
        flags = list(map(_REQUIRES_GRAD, self._tensors))
        if flags != self._flags:
            self._flags, self._raw = flags, msgspec.Raw(plain.encode(self.names()))
        return self._raw

    def restore(self, frozen: Collection[str], objects: Collection[str]) -> list[str]:
        """Freeze these of `objects` and no others; returns the names whose flag was another."""
        wanted, changed = set(frozen), []
        for name, tensor in self._found.items():
            is_wanted = name not in wanted
            if name.partition(".")[0] not in objects or not tensor.is_leaf:
                continue
            if tensor.requires_grad != is_wanted:
                tensor.requires_grad_(is_wanted)
                changed.append(name)
        return changed
