"""Whether the parts that ranks hold of each tensor make it up: the same tensor, without a gap.

Owns: the comparison of all ranks' layouts, and what is wrong with them in words. Does not own:
reading layouts (`commit`, `loading`), what is done about a gap.

Invariants:
- Exact for any boxes: uneven ones, replicas, parts that overlap, runs of flattened tensors, single
  elements and empty tensors. No bytes are looked at.
- Cheap: tensors that all ranks cut alike are one case, and what is remembered of a tensor is one
  number, however many ranks there are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from stepfast.checkpoint.layout import Entry, Layout, private_rank
from stepfast.checkpoint.manifest import TensorInfo
from stepfast.checkpoint.overlap import Shape, boxes_of_run, true_shape

SHOWN_MAX = 3  # tensors that a message names

Box = tuple[Shape, Shape]  # offsets and shape; of a flattened tensor, one number each
_Part = tuple[bool, Shape, Shape]  # whether flattened, offsets, shape


class Coverage:
    """Takes in the layouts of all ranks, in any order; then says what is wrong with them together.

    The parts of a tensor, rank by rank, are a path in a tree that all tensors share: layers of one
    size are one path.
    """

    def __init__(self) -> None:
        """Nothing seen."""
        self._infos: dict[str, TensorInfo] = {}
        self._ranks: dict[str, int] = {}  # the first rank that has the tensor
        self._ends: dict[str, int] = {}  # where the tensor's path ends
        self._steps: list[tuple[int, _Part] | None] = []  # how a place of the tree is reached
        self._roots: dict[TensorInfo, int] = {}
        self._branches: dict[tuple[int, _Part], int] = {}
        self._wrong: dict[str, str] = {}

    def add(self, layout: Layout) -> None:
        """One more rank."""
        for entry in layout.entries:
            info = TensorInfo(entry.dtype, true_shape(entry))
            known = self._infos.get(entry.name)
            owner = private_rank(entry.name)
            if owner is not None and owner != layout.rank:
                self._wrong[entry.name] = f"rank {layout.rank} has it, and it is rank {owner}'s own"
            elif known is None:
                self._infos[entry.name], self._ranks[entry.name] = info, layout.rank
                self._ends[entry.name] = self._root(info)
            elif known != info:
                first = self._ranks[entry.name]
                text = f"rank {layout.rank} has {_kind(info)}, rank {first} {_kind(known)}"
                self._wrong.setdefault(entry.name, text)
                continue
            if 0 not in entry.shape and entry.name in self._ends:
                self._add_part(entry, info)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors as wholes, by name, but for what is one rank's alone."""
        shared = ((n, info) for n, info in self._infos.items() if private_rank(n) is None)
        return dict(sorted(shared))

    def problems(self, stated: Mapping[str, TensorInfo] | None = None) -> dict[str, str]:
        """What is wrong, by the tensor's name. `stated`: what the manifest says there is."""
        found = dict(self._wrong)
        gaps: dict[tuple[TensorInfo, int], str | None] = {}
        for name, end in self._ends.items():
            case = self._infos[name], end
            if case not in gaps:
                gaps[case] = self._gap_words(*case)
            if (gap := gaps[case]) is not None:
                found.setdefault(name, f"no rank has {gap} of {_kind(self._infos[name])}")
        if stated is not None:
            found = {**_misstated(stated, self.tensors), **found}
        return dict(sorted(found.items()))

    def _add_part(self, entry: Entry, info: TensorInfo) -> None:
        is_flat = entry.original_shape is not None
        whole = (math.prod(info.shape),) if is_flat else info.shape
        if not _lies_within(entry.offsets, entry.shape, whole):
            place = _place_words(entry.offsets, entry.shape)
            self._wrong[entry.name] = f"{place} lies outside of {_kind(info)}"
            return
        step = self._ends[entry.name], (is_flat, entry.offsets, entry.shape)
        end = self._branches.get(step)
        if end is None:
            end = self._branches[step] = len(self._steps)
            self._steps.append(step)
        self._ends[entry.name] = end

    def _root(self, info: TensorInfo) -> int:
        if info not in self._roots:
            self._roots[info] = len(self._steps)
            self._steps.append(None)
        return self._roots[info]

    def _gap_words(self, info: TensorInfo, end: int) -> str | None:
        parts = set(self._path(end))
        whole = info.shape
        if parts and all(is_flat for is_flat, _, _ in parts):
            gap = first_gap({part[1:] for part in parts}, (math.prod(whole),))
            if gap is None:
                return None
            (start,), (size,) = gap
            return f"the elements {start} to {start + size} in flattened order"
        boxes = {box for part in parts for box in _boxes_of(part, whole)}
        gap = first_gap(boxes, whole)
        return None if gap is None else _place_words(*gap)

    def _path(self, end: int) -> Iterator[_Part]:
        while (step := self._steps[end]) is not None:
            end, part = step
            yield part


def first_gap(boxes: Iterable[Box], whole: Shape) -> Box | None:
    """A box of a tensor of shape `whole` that lies in none of `boxes`; None where they cover it.

    Boxes have elements, and lie within. Slab by slab between the places where boxes begin and end
    along the first dimension: within one, all that counts is what they have of the others.
    """
    if 0 in whole:
        return None
    if not whole:
        return None if any(True for _ in boxes) else ((), ())
    changes: dict[int, list[tuple[int, Box]]] = {0: [], whole[0]: []}
    for offsets, shape in boxes:
        rest = (offsets[1:], shape[1:])
        changes.setdefault(offsets[0], []).append((1, rest))
        changes.setdefault(offsets[0] + shape[0], []).append((-1, rest))
    cuts = sorted(changes)
    inside: dict[Box, int] = {}
    for start, end in itertools.pairwise(cuts):
        for count, rest in changes[start]:
            inside[rest] = inside.get(rest, 0) + count
            if not inside[rest]:
                del inside[rest]
        gap = first_gap(inside, whole[1:])
        if gap is not None:
            return (start, *gap[0]), (end - start, *gap[1])
    return None


def listed(problems: Mapping[str, str]) -> str:
    """The first few, and how many more there are."""
    shown = "; ".join(f"{name}: {text}" for name, text in list(problems.items())[:SHOWN_MAX])
    more = len(problems) - SHOWN_MAX
    return shown if more <= 0 else f"{shown}; and {more} more tensors"


def _misstated(stated: Mapping[str, TensorInfo], there: Mapping[str, TensorInfo]) -> dict[str, str]:
    found = dict.fromkeys(stated.keys() - there.keys(), "no rank has it")
    found |= dict.fromkeys(there.keys() - stated.keys(), "the manifest does not have it")
    for name in stated.keys() & there.keys():
        if stated[name] != there[name]:
            found[name] = f"it is {_kind(there[name])}, and {_kind(stated[name])} in the manifest"
    return found


def _boxes_of(part: _Part, whole: Shape) -> Iterator[Box]:
    is_flat, offsets, shape = part
    if is_flat:
        yield from boxes_of_run(offsets[0], offsets[0] + shape[0], whole)
    else:
        yield offsets, shape


def _lies_within(offsets: Shape, shape: Shape, whole: Shape) -> bool:
    if not len(offsets) == len(shape) == len(whole):
        return False
    sizes = zip(offsets, shape, whole, strict=True)
    return all(first >= 0 and first + size <= total for first, size, total in sizes)


def _place_words(offsets: Shape, shape: Shape) -> str:
    if len(offsets) != len(shape) or not offsets:
        return "the one element" if offsets == shape else f"{list(shape)} at {list(offsets)}"
    runs = (f"{first}:{first + size}" for first, size in zip(offsets, shape, strict=True))
    return f"[{', '.join(runs)}]"


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"
