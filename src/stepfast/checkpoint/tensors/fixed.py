"""Whether many tensors are what they were, in a few passes over all of them.

Owns: the comparison. Does not own: whether the same tensors are still in their places (`structure`,
`walk`), what a tensor is (`local`).

It is asked at every step for every tensor, when the processor's caches are full of something else:
each pass runs in C and touches as little memory as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from stepfast.checkpoint.tensors.local import Known, Part

_LOCAL: Callable[[Any], Any] = attrgetter("_local_tensor")
# Mesh, placements and global shape in one object, which a DTensor of other ones has another one of.
_SPEC: Callable[[Any], Any] = attrgetter("_spec")
_SHAPE: Callable[[Any], Any] = attrgetter("shape")
_DTYPE: Callable[[Any], Any] = attrgetter("dtype")
_DEVICE: Callable[[Any], Any] = attrgetter("device")


class Fixed:
    """Tensors by name, found at one time, and what is known of them."""

    def __init__(self, found: Mapping[str, Known]) -> None:
        self.found = found
        # Parts are cut anew each time; there is nothing to look at again.
        self._is_cut = any(isinstance(known.tensor, Part) for known in found.values())
        sharded = [known for known in found.values() if known.place is not None]
        self._sharded = [known.tensor for known in sharded]
        self._own_locals = [known.local for known in sharded]
        self._specs = list(map(_SPEC, self._sharded))
        places = [known.place for known in sharded if known.place is not None]
        self._coordinates = {id(p.mesh): (p.mesh, p.coordinate) for p in places}
        self._locals = [known.local for known in found.values()]
        self._shapes = [known.spec.shape for known in found.values()]
        self._dtypes = list(map(_DTYPE, self._locals))
        self._devices = list(map(_DEVICE, self._locals))

    def is_good(self) -> bool:
        """Whether all that is known of them is true now."""
        return not self._is_cut and self._is_placed() and self._is_shaped()

    def _is_placed(self) -> bool:
        return (
            are(map(_LOCAL, self._sharded), self._own_locals)
            and are(map(_SPEC, self._sharded), self._specs)
            and all(mesh.get_coordinate() == at for mesh, at in self._coordinates.values())
        )

    def _is_shaped(self) -> bool:
        tensors = self._locals
        return (
            list(map(_SHAPE, tensors)) == self._shapes
            and list(map(_DTYPE, tensors)) == self._dtypes
            and list(map(_DEVICE, tensors)) == self._devices
        )


def are(found: Iterable[object], expected: Sequence[object]) -> bool:
    """Whether as many objects as `expected` has are these very ones. None of them is looked at."""
    return all(map(is_, found, expected))
