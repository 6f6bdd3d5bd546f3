"""Whether the tracked modules are built as they were, in less time than naming it all again takes.

Owns: what the names in modules follow from. Does not own: the names (`naming`).

Invariant: while `is_same` says so, the modules are the same objects of the same classes, with the
same parameters, buffers and children under the same keys. All of them are looked at each time, and
kept alive meanwhile, so that no other object can have taken the place of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from torch import nn

from stepfast.checkpoint.tensors.fixed import are
from stepfast.checkpoint.tensors.local import loaded_type

_HELD: Callable[[Any], Any] = attrgetter("_parameters", "_buffers", "_modules")
_VALUES = methodcaller("values")


class Structure:
    """The modules of one moment."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modules = list({id(m): m for root in roots for m in root.modules()}.values())
        flat = loaded_type("torch.distributed.fsdp", "FullyShardedDataParallel")
        sharded = loaded_type("torch.distributed.fsdp", "FSDPModule")
        self._sharded: list[Any] = [m for m in self._modules if isinstance(m, sharded)]
        # FSDP1 gives its parameters other memory whenever it likes.
        self.has_flat_parameters = any(isinstance(m, flat) for m in self._modules)
        self._reshard()
        self._dicts = self._read_dicts()
        self._sizes = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(_VALUES, self._dicts)))
        self._types = list(map(type, self._modules))

    def is_same(self) -> bool:
        """Whether nothing has changed. Brings FSDP2 modules into sharded form, as naming does."""
        if self.has_flat_parameters:
            return False
        if self._is_read_as_before():
            return True  # sharded too: unsharded parameters are other tensors
        self._reshard()
        return self._is_read_as_before()

    def _is_read_as_before(self) -> bool:
        dicts = self._read_dicts()
        return (
            are(dicts, self._dicts)
            and are(map(type, self._modules), self._types)
            and list(map(len, dicts)) == self._sizes
            and are(chain.from_iterable(dicts), self._keys)
            and are(chain.from_iterable(map(_VALUES, dicts)), self._values)
        )

    def _reshard(self) -> None:
        # Unsharded parameters, which an evaluation leaves behind, are other tensors.
        for module in self._sharded:
            module.reshard()

    def _read_dicts(self) -> list[Mapping[str, object]]:
        return list(chain.from_iterable(map(_HELD, self._modules)))
