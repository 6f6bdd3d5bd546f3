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
from stepfast.checkpoint.tensors.trust import Trust

MODULES = "the build of the modules"  # what is believed of them, for `trust`
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
        self._filled = list(filter(None, self._dicts))
        self._empty = [found for found in self._dicts if not found]
        self._sizes = list(map(len, self._filled))
        self._keys = list(chain.from_iterable(self._filled))
        self._values = list(chain.from_iterable(map(_VALUES, self._filled)))
        self._types = list(map(type, self._modules))

    def is_same(self, trust: Trust | None = None) -> bool:
        """Whether nothing has changed. Brings FSDP2 modules into sharded form, as naming does.

        `trust` may believe that the modules have their classes and dicts yet, and what is empty is
        empty.
        """
        if self.has_flat_parameters:
            return False
        if not self._holds_the_same():  # sharded too: unsharded parameters are other tensors
            self._reshard()
            if not self._holds_the_same():
                return False
        return trust.holds(MODULES, self._is_built_the_same) if trust else self._is_built_the_same()

    def _holds_the_same(self) -> bool:
        return (
            list(map(len, self._filled)) == self._sizes
            and are(chain.from_iterable(self._filled), self._keys)
            and are(chain.from_iterable(map(_VALUES, self._filled)), self._values)
        )

    def _is_built_the_same(self) -> bool:
        # By the modules' own attributes, which takes longer than all the rest.
        return (
            not any(self._empty)
            and are(self._read_dicts(), self._dicts)
            and are(map(type, self._modules), self._types)
        )

    def _reshard(self) -> None:
        # Unsharded parameters, which an evaluation leaves behind, are other tensors.
        for module in self._sharded:
            module.reshard()

    def _read_dicts(self) -> list[Mapping[str, object]]:
        return list(chain.from_iterable(map(_HELD, self._modules)))
