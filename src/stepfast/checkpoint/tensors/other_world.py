"""What is one rank's alone, for ranks that are not the ones that saved it.

Owns: the policy. Does not own: shared tensors and values (`plan`).

The policy: a world of the same size takes each rank's own. In another one
- plain values that all ranks share (scheduler, parameter groups, module flags) are rank 0's;
- random generators are those of the saved rank of the same number. A rank more than were saved gets
  generators that are seeded from the saved rank's (its number modulo the saved world) and its own
  number; but where the saved ranks had the same state, so have the new ones;
- a loader's position is given up, with a warning that says what is done instead.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from stepfast.checkpoint import plain
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.plain import Ref
from stepfast.checkpoint.tensors.naming import OWN_NAME, Objects
from stepfast.core.quantities import counted
from stepfast.errors import StateError

OnWarning = Callable[[str], None]
_PHILOX_BYTES = 16  # of a CUDA generator: seed and offset


class OtherWorld:
    """The plain values of a checkpoint, as rank `rank` of `world_size` takes them."""

    def __init__(
        self, checkpoint: StoredCheckpoint, *, rank: int, world_size: int, on_warning: OnWarning
    ) -> None:
        """Reads the plain values of one or two ranks, of others when they are asked for."""
        self.rank = rank
        self.is_same_size = world_size == checkpoint.world_size
        self._world_size = world_size
        self._checkpoint = checkpoint
        self._on_warning = on_warning
        self._values: dict[int, dict[str, Any]] = {}
        self._source = rank % checkpoint.world_size

    @property
    def shared_values(self) -> dict[str, Any]:
        """The values that any rank's will do for; this rank's own where there are such."""
        return self.values(self.shared_rank)

    @property
    def shared_rank(self) -> int:
        """Whose those are."""
        return self.rank if self.is_same_size else 0

    def values(self, rank: int) -> dict[str, Any]:
        """What `rank` saved, with references for its tensors."""
        if rank not in self._values:
            try:
                self._values[rank] = plain.decode(self._checkpoint.plain(rank))
            except ValueError as error:
                raise StateError(f"{self._checkpoint.place}, rank {rank}: {error}") from error
        return self._values[rank]

    def rng(self, objects: Objects) -> tuple[dict[str, Any], Mapping[str, bytes]]:
        """The generators' states, and the bytes of those that nobody saved, by tensor."""
        states = dict(self.values(self._source)[OWN_NAME]["rng"])
        made: dict[str, bytes] = {}
        if not torch.cuda.is_available():
            states.pop("cuda", None)
        if self.rank >= self._checkpoint.world_size > 1:
            states, made = self._derived(states)
        here = {n: v for n, v in objects.items() if isinstance(v, torch.Generator)}
        saved = states["generators"]
        states["generators"] = {n: saved[n] for n in here if n in saved}
        return states, made

    def loader_state(self, name: str, loader: Any) -> Any:
        """What a loader goes on from; None: it is left as it is. Warns."""
        saved = self.values(self._source)[name]
        adapt = getattr(loader, "state_in_other_world", None)
        state = None if adapt is None else adapt(saved)
        instead = "it begins anew" if state is None else "its present epoch begins anew"
        self._on_warning(
            f"{name}: {self._checkpoint.place} (step {self._checkpoint.snapshot.step}) has the"
            f" positions of {counted(self._checkpoint.world_size, 'rank')}, and"
            f" {self._world_size} load it: rank {self.rank} takes none of them,"
            f" {instead}, and some samples of that epoch come twice"
        )
        return state

    def _derived(self, states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
        neighbour = (self._source + 1) % self._checkpoint.world_size
        others = self.values(neighbour)[OWN_NAME]["rng"]
        own_bytes, other_bytes = self._tensors(states), self._tensors(others)
        states, made = dict(states), {}
        for (name, own), other in zip(own_bytes.items(), other_bytes.values(), strict=False):
            if own != other:
                made[name] = _reseeded(own, self._seed(own))
        process = plain.encode(states["process"])
        if process != plain.encode(others["process"]):
            states["process"] = _process_rng(self._seed(process))
        return states, made

    def _tensors(self, states: dict[str, Any]) -> dict[str, bytes]:
        refs: list[Ref] = []
        plain.replace_refs(states, refs.append)
        index = self._checkpoint.index
        places = [index[ref.name][0] for ref in refs]
        read = self._checkpoint.read_ranges((c.rank, c.entry.start, c.entry.end) for c in places)
        return {ref.name: bytes(memory) for ref, memory in zip(refs, read, strict=True)}

    def _seed(self, state: bytes) -> int:
        digest = hashlib.blake2b(state + self.rank.to_bytes(4, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _reseeded(state: bytes, seed: int) -> bytes:
    """A generator's state as of one that was just seeded."""
    if len(state) == _PHILOX_BYTES:
        return struct.pack("<qq", seed, 0)
    made: bytes = torch.Generator().manual_seed(seed).get_state().numpy().tobytes()
    assert len(made) == len(state), f"a generator's state of {len(state)} bytes is of no known kind"
    return made


def _process_rng(seed: int) -> dict[str, object]:
    """As `plain.process_rng`, of generators that were just seeded."""
    numpy = sys.modules.get("numpy")
    of_numpy = None
    if numpy is not None:
        of_numpy = numpy.random.RandomState(seed % 2**32).get_state(legacy=False)
    return plain.rng_values(random.Random(seed).getstate(), of_numpy)
