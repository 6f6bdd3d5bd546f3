"""The tensors that a restore from another layout asks of a checkpoint, and what does not fit.

Owns: which saved part is taken for which local tensor; the one error that lists all misfits. Does
not own: which tensors there are (`plan`), reading them (`reshard`).

Invariant: what is wanted is covered by saved parts, element by element, or it is a misfit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stepfast.checkpoint.layout import TensorSpec
from stepfast.checkpoint.loading import Chunk
from stepfast.checkpoint.overlap import Overlap, overlaps, true_shape
from stepfast.checkpoint.plain import Ref

SHOWN_MAX = 100  # misfits of one kind that the message names
_ADVISED_MAX = 4


class Wanted(NamedTuple):
    """One local tensor to be filled: from saved parts, or from bytes that are here already."""

    spec: TensorSpec
    parts: tuple[tuple[Chunk, Overlap], ...] = ()
    kept: Tensor | None = None  # the value that this process has
    made: bytes | None = None  # a value that no rank has saved


class Misfits:
    """What a checkpoint and the tracked objects do not agree about."""

    def __init__(self, may_lack: Collection[str] = ()) -> None:
        """None so far. `may_lack`: names that, with all below them, need not be in it."""
        self.fresh: list[str] = []  # of those, what is not in it: no misfits
        self._may_lack = may_lack
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.misshaped: list[str] = []
        self.other: list[str] = []

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.misshaped, self.other))

    def may_begin_fresh(self, name: str) -> bool:
        """Whether the checkpoint may lack `name`; then that is noted."""
        if not any(name == one or name.startswith(f"{one}.") for one in self._may_lack):
            return False
        self.fresh.append(name)
        return True

    def advice(self) -> str:
        """What to do about what is missing; empty where nothing is."""
        names = [text.split(" ")[0] for text in self.missing if not text.startswith("a part of")]
        if not names:
            return ""
        flags = " ".join(f"--start-fresh {name}" for name in names[:_ADVISED_MAX])
        more = " ..." if len(names) > _ADVISED_MAX else ""
        return f"; if that is meant to begin as the script makes it: {flags}{more}"

    def words(self) -> str:
        """All of them, by kind."""
        kinds = [
            ("not in the checkpoint: ", self.missing),
            ("only in the checkpoint: ", self.unexpected),
            ("different: ", self.misshaped),
            ("", self.other),
        ]
        return "; ".join(head + _listed(found) for head, found in kinds if found)


class Wants:
    """Collects what is wanted of an index of saved parts."""

    def __init__(
        self, index: Mapping[str, tuple[Chunk, ...]], misfits: Misfits, *, own_rank: int | None
    ) -> None:
        """`own_rank`: whose file is taken first where several ranks saved the same part; a part of
        all others is taken from the lowest rank.
        """
        self.index = index
        self.found: dict[str, Wanted] = {}
        self._misfits = misfits
        self._own_rank = own_rank

    def saved_shape(self, name: str) -> tuple[int, ...] | None:
        """The whole saved tensor's shape; None where there is none."""
        chunks = self.index.get(name)
        return None if chunks is None else true_shape(chunks[0].entry)

    def is_found(self, name: str) -> bool:
        """Whether the tensor comes from the checkpoint."""
        return name in self.found and self.found[name].kept is None

    def take(
        self, spec: TensorSpec, live: Tensor | None = None, *, saved_as: str | None = None
    ) -> None:
        """Ask for `spec`, saved under its own name or `saved_as`. Where it is a misfit, the `live`
        local tensor keeps its value.
        """
        chunks = self.index.get(saved_as or spec.name)
        if chunks is None:
            if live is None or not self._misfits.may_begin_fresh(spec.name):
                self._misfits.missing.append(f"{spec.name} {_kind(spec)}")
        elif any(not _fits(chunk.entry, spec) for chunk in chunks):
            saved = next(chunk.entry for chunk in chunks if not _fits(chunk.entry, spec))
            self._misfits.misshaped.append(
                f"{spec.name} is {_kind(spec)} here and {_kind(saved)} there"
            )
        else:
            parts = self._parts(chunks, spec)
            if _covers(parts, spec):
                self.found[spec.name] = Wanted(spec, parts)
                return
            self._misfits.missing.append(f"a part of {spec.name} {_kind(spec)}")
        if live is not None:
            self.found[spec.name] = Wanted(spec, kept=live)

    def take_whole(self, ref: Ref, device: str) -> Ref:
        """Ask for a tensor as a plain one, all of it on this rank."""
        shape = self.saved_shape(ref.name)
        if shape is None:
            self._misfits.missing.append(ref.name)
        else:
            dtype = self.index[ref.name][0].entry.dtype
            self.take(TensorSpec(ref.name, dtype, shape, shape, (0,) * len(shape)))
        return Ref(ref.name, device, None)

    def keep(self, spec: TensorSpec, value: Tensor) -> None:
        """A local tensor of this process keeps its value."""
        self.found[spec.name] = Wanted(spec, kept=value)

    def make(self, name: str, value: bytes) -> None:
        """Bytes stand in for what was saved under `name` by one rank alone."""
        self.found[name] = Wanted(self.index[name][0].entry.spec, made=value)

    def _parts(
        self, chunks: tuple[Chunk, ...], spec: TensorSpec
    ) -> tuple[tuple[Chunk, Overlap], ...]:
        near = [chunk for chunk in chunks if _may_meet(chunk.entry, spec)]
        near.sort(key=lambda chunk: (chunk.rank != self._own_rank, chunk.rank))
        first: dict[object, Chunk] = {}  # of replicas
        for chunk in near:
            first.setdefault((chunk.entry.offsets, chunk.entry.shape), chunk)
        return tuple((chunk, o) for chunk in first.values() for o in overlaps(chunk.entry, spec))


def _may_meet(saved: TensorSpec, here: TensorSpec) -> bool:
    """Quick: of a thousand ranks' parts, all but a few lie elsewhere along the first dimension."""
    is_same_kind = saved.original_shape == here.original_shape
    if not (is_same_kind and here.offsets and saved.offsets):
        return True
    first, start = saved.offsets[0], here.offsets[0]
    return first < start + here.shape[0] and start < first + saved.shape[0]


def _fits(saved: TensorSpec, here: TensorSpec) -> bool:
    return saved.dtype == here.dtype and true_shape(saved) == true_shape(here)


def _covers(parts: tuple[tuple[Chunk, Overlap], ...], spec: TensorSpec) -> bool:
    wanted = math.prod(spec.shape)
    found = sum(math.prod(overlap.shape) for _, overlap in parts)
    if found <= wanted or len(parts) == 1:
        return found == wanted
    # Saved parts overlap, so the count says nothing.
    mask = torch.zeros(wanted, dtype=torch.bool)
    for _, o in parts:
        mask.as_strided(o.shape, o.target_strides, o.target_start).fill_(True)
    return bool(mask.all())


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(true_shape(spec))}"


def _listed(found: list[str]) -> str:
    shown = ", ".join(found[:SHOWN_MAX])
    more = len(found) - SHOWN_MAX
    return shown if more <= 0 else f"{shown} and {more} more"
