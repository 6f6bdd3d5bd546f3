"""A stored checkpoint into the tracked objects, whatever layout it was saved in.

Owns: the choice between the rank's own file and parts of all files; the copies from saved parts
into local tensors. Does not own: what is wanted (`plan`), verified reads (`checkpoint.loading`),
putting state into objects (`restoration`).

Invariants:
- Nothing live is touched before what is saved was seen to fit.
- The rank's own file is read into the live tensors: one of its blocks that is found damaged leaves
  them with what is wrong, and the caller has to restore another checkpoint, as all ranks do then.
  What comes from parts of all files touches nothing live before all of it was read and verified;
  in memory, besides the live tensors, are then the local tensors once and a few reads.
- No collective is called. Whether all ranks could load is for the caller to agree upon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stepfast.checkpoint.layout import DTYPE_BYTES, Entry, Layout
from stepfast.checkpoint.loading import OnRead, StoredCheckpoint, claim
from stepfast.checkpoint.overlap import Overlap, split
from stepfast.checkpoint.plain import Ref, replace_refs
from stepfast.checkpoint.shard import StoredShard
from stepfast.checkpoint.tensors.local import Known, over
from stepfast.checkpoint.tensors.naming import OWN_NAME, is_transparent
from stepfast.checkpoint.tensors.other_world import OnWarning, OtherWorld
from stepfast.checkpoint.tensors.plan import Planner, parameters_of
from stepfast.checkpoint.tensors.sources import from_file
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.tensors.walk import Walk
from stepfast.checkpoint.tensors.wanted import SHOWN_MAX, Wanted
from stepfast.errors import StateError

READ_BYTES = 64 << 20  # at most, of one read; several are under way
GAP_BYTES = 1 << 20  # what lies between two pieces and is read rather than asked for again

_FLAGS_SHOWN_MAX = 3
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Restored(NamedTuple):
    """What a restore did."""

    is_resharded: bool  # else the rank's own file was taken as it is
    read_bytes: int


class _Piece(NamedTuple):
    """Elements that lie in one rank's file, and where they go."""

    rank: int
    start: int  # in the data part of the file
    end: int
    overlap: Overlap
    target: str
    dtype: str


class Resharded:
    """As the slot would have been, had this rank taken the snapshot."""

    def __init__(self, layout: Layout, plain: bytes) -> None:
        self.layout = layout
        self.plain = plain
        self._memory = claim(layout.plain.start)

    def view(self, entry: Entry) -> memoryview:
        """The bytes of one entry."""
        return self._memory[entry.start : entry.end]


@torch.no_grad()
def restore(
    tree: StateTree,
    checkpoint: StoredCheckpoint,
    *,
    world_size: int,
    is_strict: bool = True,
    start_fresh: Collection[str] = (),
    on_warning: OnWarning = lambda text: None,
    on_read: OnRead | None = None,
) -> Restored:
    """Bring the objects of `tree`, rank `tree.rank` of `world_size`, into the checkpoint's state.

    StateError lists everything that is missing, unexpected or of another shape; if not `is_strict`
    it goes to `on_warning`, such live tensors and objects keep what they have, and the rest is
    restored. What `start_fresh` names, an object or a part of one, may be missing: it is left as it
    is, with a warning. CheckpointDamaged where the checkpoint cannot be loaded. `on_read` is told
    of the bytes as they come, between two reads of the calling thread; it may raise.
    """
    count = 0

    def counted(size_bytes: int) -> None:
        nonlocal count
        count += size_bytes
        if on_read is not None:
            on_read(size_bytes)

    walk, live, inspector = tree.look()
    world = OtherWorld(checkpoint, rank=tree.rank, world_size=world_size, on_warning=on_warning)
    if world.is_same_size and _is_own_layout(checkpoint, tree.rank, walk, live, world):
        if tree.rank == checkpoint.snapshot.step % world_size:
            checkpoint.check_whole()  # by one rank: every file is asked for its header
        shard = StoredShard(checkpoint, tree.rank, counted)
        changed = tree.restore_from(shard, copy=from_file(shard))
        _warn_of_flags(checkpoint, changed, tree.rank, on_warning)
        shard.check_rest()
        return Restored(is_resharded=False, read_bytes=count)
    plan = Planner(checkpoint, walk, live, inspector, world, start_fresh=start_fresh)
    plan.run()
    if plan.misfits:
        text = f"{checkpoint.place} and what is tracked do not fit: {plan.misfits.words()}"
        if is_strict:
            raise StateError(f"{text}{plan.misfits.advice()}")
        on_warning(f"{text}; what does not fit stays as it is")
    if plan.misfits.fresh:
        fresh = ", ".join(plan.misfits.fresh[:SHOWN_MAX])
        on_warning(f"{checkpoint.place} has no {fresh}: as the script made it, by --start-fresh")
    source = fill(checkpoint, plan.wants.found, plan.plain(), tree.rank, counted)
    changed = tree.restore_from(source, plan.left_alone)
    _warn_of_flags(checkpoint, changed, tree.rank, on_warning)
    return Restored(is_resharded=True, read_bytes=count)


def _warn_of_flags(
    checkpoint: StoredCheckpoint, changed: list[str], rank: int, on_warning: OnWarning
) -> None:
    if changed and rank == 0:  # the others' are the same
        more = len(changed) - _FLAGS_SHOWN_MAX
        names = ", ".join(changed[:_FLAGS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
        on_warning(
            f"{checkpoint.place}: requires_grad of {names} is as it was saved, not as the script"
            " made it; to have it otherwise, set it after run.track()"
        )


def _is_own_layout(
    checkpoint: StoredCheckpoint,
    rank: int,
    walk: Walk,
    live: Mapping[str, Known],
    world: OtherWorld,
) -> bool:
    """Whether the rank's own file can be taken as it is: parameters and meshes are as they were."""
    layout, values = checkpoint.layout(rank), world.shared_values
    if values[OWN_NAME].get("imported"):
        return False  # by nobody of this job's: what a module needs may not be in it
    modules, rng = values[OWN_NAME]["modules"], values[OWN_NAME]["rng"]
    objects = {*values, *modules, *rng["generators"], *(n for n in layout.by_name if "." not in n)}
    if objects - {OWN_NAME} != walk.objects.keys():
        return False
    if "cuda" in rng and not torch.cuda.is_available():
        return False
    names = {n for n, v in walk.objects.items() if isinstance(v, nn.Module)}
    saved = {n: s for n, s in layout.specs.items() if n.partition(".")[0] in names}
    here = {n: k.spec for n, k in live.items() if n.partition(".")[0] in names}
    tensors = {n: live[n].spec for n, v in walk.objects.items() if isinstance(v, Tensor)}
    if saved != here or any(layout.specs.get(n) != spec for n, spec in tensors.items()):
        return False
    refs: list[Ref] = [ref for module in modules.values() for ref in module["buffers"]]
    if any(live[ref.name].ref.shards != ref.shards for ref in refs):
        return False
    return all(
        _is_state_in_place(values[n]["state"], parameters_of(n, v, walk), live, layout)
        for n, v in walk.objects.items()
        if is_transparent(v)
    )


def _is_state_in_place(
    states: Mapping[str, object],
    parameters: Mapping[str, str],
    live: Mapping[str, Known],
    layout: Layout,
) -> bool:
    """Whether an optimizer's saved state is on meshes as its parameters are on now."""
    for name, state in states.items():
        known = live.get(parameters.get(name, ""))
        refs: list[Ref] = []
        replace_refs(state, refs.append)
        for ref in refs:
            spec = layout.specs.get(ref.name)
            if known is None or spec is None:
                return False
            if spec.global_shape == known.spec.global_shape and ref.shards != known.ref.shards:
                return False
            if ref.shards is not None and len(ref.shards) != len(known.ref.shards or ()):
                return False
    return True


def fill(
    checkpoint: StoredCheckpoint,
    wanted: Mapping[str, Wanted],
    plain: bytes,
    rank: int,
    on_read: OnRead,
) -> Resharded:
    """Read what is wanted into the places that it would have in a slot of `rank`."""
    layout = Layout.build((want.spec for want in wanted.values()), len(plain), rank=rank)
    source = Resharded(layout, plain)
    targets = {entry.name: _elements(source.view(entry), entry.dtype) for entry in layout.entries}
    for name, want in wanted.items():
        entry = layout.by_name[name]
        if want.kept is not None:
            over(source.view(entry), entry).copy_(want.kept)
        elif want.made is not None:
            source.view(entry)[:] = want.made
    groups = list(_grouped(sorted(_pieces(wanted.values()))))
    reads = checkpoint.read_ranges(((g[0].rank, g[0].start, _end(g)) for g in groups), on_read)
    for group, memory in zip(groups, reads, strict=True):
        for piece in group:
            saved = memory[piece.start - group[0].start : piece.end - group[0].start]
            _copy(_elements(saved, piece.dtype), piece.overlap, targets[piece.target])
    return source


def _pieces(wanted: Iterable[Wanted]) -> Iterator[_Piece]:
    for want in wanted:
        for chunk, overlap in want.parts:
            size, entry = DTYPE_BYTES[chunk.entry.dtype], chunk.entry
            for part in split(overlap, READ_BYTES // size):
                start = entry.start + part.source_start * size
                end = entry.start + part.source_end * size
                part = part._replace(source_start=0)
                yield _Piece(chunk.rank, start, end, part, want.spec.name, entry.dtype)


def _grouped(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are read together: of one file, near to each other, not too much at once."""
    group: list[_Piece] = []
    end = 0
    for piece in pieces:
        if group and (
            piece.rank != group[0].rank
            or piece.start - end > GAP_BYTES
            or max(end, piece.end) - group[0].start > READ_BYTES
        ):
            yield group
            group, end = [], 0
        group.append(piece)
        end = max(end, piece.end)
    if group:
        yield group


def _end(group: list[_Piece]) -> int:
    return max(piece.end for piece in group)


def _elements(memory: memoryview, dtype: str) -> Tensor:
    """The bytes as a flat tensor of numbers of that size; what they mean does not matter."""
    kind = _SAME_SIZE[DTYPE_BYTES[dtype]]
    return torch.frombuffer(memory, dtype=kind) if len(memory) else torch.empty(0, dtype=kind)


def _copy(source: Tensor, overlap: Overlap, target: Tensor) -> None:
    shape = overlap.shape
    target.as_strided(shape, overlap.target_strides, overlap.target_start).copy_(
        source.as_strided(shape, overlap.source_strides, overlap.source_start)
    )
