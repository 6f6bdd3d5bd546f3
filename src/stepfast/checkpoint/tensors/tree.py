"""The tracked objects of one rank, and the copies of their state into a slot and out of one.

Owns: what is remembered between two captures; the digests of local tensors. Does not own: slot
files (`arena`), checks of what is read (`checkpoint.restore`), when to capture (`capture`), what
"restored" means (`restoration`).

Invariants:
- No collective is called; a rank can capture and restore whatever its peers do.
- Nothing is remembered that is not looked at again: what a tensor is counts while that tensor is
  the same object, with the same local part, shape, dtype, device and place in its mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from itertools import compress
from operator import is_
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint import plain
from stepfast.checkpoint.arena import Slot
from stepfast.checkpoint.layout import Layout, TensorSpec, private_name
from stepfast.checkpoint.tensors.copier import Copier, StreamCopier, ThreadCopier, copy_all
from stepfast.checkpoint.tensors.local import Inspector, Known, over
from stepfast.checkpoint.tensors.naming import (
    LOOP_LEFT_NAME,
    OWN_NAME,
    Objects,
    check_coupled,
    check_trackable,
    is_container,
    is_transparent,
    private_prefixes,
)
from stepfast.checkpoint.tensors.restoration import Copy, Restoration, Views
from stepfast.checkpoint.tensors.sources import from_views
from stepfast.checkpoint.tensors.staging import (
    KeptAliases,
    Staging,
    differing,
    memory_of,
    optimizer_held,
)
from stepfast.checkpoint.tensors.structure import Structure
from stepfast.checkpoint.tensors.trust import Trust
from stepfast.checkpoint.tensors.walk import Sink, Walk
from stepfast.errors import ScriptError, StateError


class Collected(NamedTuple):
    """The state of one moment: the objects' own local tensors, in the order of `layout.entries`."""

    layout: Layout
    tensors: list[Tensor]
    plain: bytes
    # The type of device where only an optimizer's step changes the tensor, as far as is known.
    held: list[str]
    trust: Trust | None = None  # what of it was believed


DigestRow = tuple[str, tuple[int, ...], str]


class _Split(NamedTuple):
    """Which of a slot's tensors are copied now, and which `later`, by types of device."""

    later: list[str]
    believed: tuple[str, ...]  # objects
    now: list[bool]
    names: list[str]  # of the later ones
    looked_at: list[bool]  # not believed to lie where they lay
    devices: list[str]
    targets_now: list[Tensor]
    targets_later: list[Tensor]

    @classmethod
    def of(
        cls, slot: Slot, later: list[str], believed: tuple[str, ...], targets: list[Tensor]
    ) -> _Split:
        now = [not device for device in later]
        names = [entry.name for entry in compress(slot.layout.entries, later)]
        prefixes = tuple(f"{name}.state." for name in believed)
        looked_at = [not name.startswith(prefixes) for name in names]
        divided = list(compress(targets, now)), list(compress(targets, later))
        return cls(later, believed, now, names, looked_at, list(filter(None, later)), *divided)


class _Last:
    """What was collected last, to begin from."""

    def __init__(self, state: Collected, sink: Sink, held_ids: set[int]) -> None:
        """`held_ids`: of the tensors that only an optimizer's step changes."""
        self._state, self._fixed, self._held_ids = state, sink.fixed, held_ids
        index = {entry.name: at for at, entry in enumerate(state.layout.entries)}
        self._other = [(name, known.spec, index[name]) for name, known in sink.found.items()]

    def with_other(self, sink: Sink, blob: bytes, trust: Trust | None) -> Collected | None:
        """The state now, where it differs only in what is no module's and no optimizer's."""
        state = self._state
        if len(sink.fixed) != len(self._fixed) or not all(map(is_, sink.fixed, self._fixed)):
            return None
        if len(sink.found) != len(self._other) or not state.layout.has_room_for(len(blob)):
            return None
        tensors, held = state.tensors.copy(), state.held.copy()
        pairs = zip(sink.found.items(), self._other, strict=True)
        for (name, known), (name_before, spec_before, at) in pairs:
            is_held = id(known.tensor) in self._held_ids
            if name != name_before or known.spec != spec_before or is_held:
                return None
            tensors[at] = known.local
        return Collected(state.layout, tensors, blob, held, trust)


class StateTree:
    """The tracked objects of one rank. For the thread that trains, between two steps."""

    def __init__(
        self, objects: Objects, *, rank: int = 0, copiers: Mapping[str, Copier] | None = None
    ) -> None:
        """Raises ScriptError for what cannot be tracked, by name, and for state that cannot be
        kept, by its path: now, rather than at the first snapshot.

        `copiers`: by type of device, what copies beside the training; default: all there are.
        """
        for name, value in objects.items():
            check_trackable(name, value)
        check_coupled(objects)
        self._objects = dict(objects)
        optimizers = [v for v in objects.values() if isinstance(v, Optimizer)]
        self._is_transparent = all(map(is_transparent, optimizers))
        self.rank, self._private = rank, private_prefixes(objects)
        self.loop_left = False  # kept and restored with the state
        default: Mapping[str, Copier] = {"cpu": ThreadCopier(), "cuda": StreamCopier()}
        self._copiers = default if copiers is None else copiers
        self._inspector = Inspector()
        self._known: Mapping[str, Known] = {}
        self._specs: list[TensorSpec] = []
        self._walk: tuple[Structure, Walk] | None = None
        self._aliases = KeptAliases()
        self._layout: Layout | None = None
        self._last: _Last | None = None
        self._held_ids: set[int] = set()
        self._doubted: set[str] = set()
        # Kept, for making them again would cost as much as a small copy; gone with their slot.
        self._slot_tensors: WeakKeyDictionary[Slot, list[Tensor]] = WeakKeyDictionary()
        self._splits: WeakKeyDictionary[Slot, _Split] = WeakKeyDictionary()
        self.collect()

    @torch.no_grad()
    def collect(self, *, trusting: bool = False) -> Collected:
        """What is there to keep now. ScriptError names the path of state that cannot be kept.

        `trusting`: objects that are as they were each time until now are believed to be so.
        """
        trust = Trust(self._doubted) if trusting else None
        sink = self._sink(trust)
        blob = self._present_walk(trust).everything(sink, loop_left=self.loop_left)
        state = None if self._last is None else self._last.with_other(sink, blob, trust)
        if state is None:
            state = self._collect_anew(sink.all(), blob, trust)
            self._last = _Last(state, sink, self._held_ids) if self._is_transparent else None
        return state

    def _collect_anew(self, found: dict[str, Known], blob: bytes, trust: Trust | None) -> Collected:
        self._known = found
        specs = [known.spec for known in found.values()]
        room = self._layout is not None and self._layout.has_room_for(len(blob))
        if self._layout is None or not room or specs != self._specs:
            self._layout, self._specs = Layout.build(specs, len(blob), rank=self.rank), specs
        known = [found[entry.name] for entry in self._layout.entries]
        on_devices = [k for k in known if k.ref.device != "cpu"]
        refuse_several_devices((k.spec.name, k.local.device) for k in on_devices)
        ids = self._held_ids = set(map(id, optimizer_held(self._objects)))
        devices = [k.ref.device if id(k.tensor) in ids else "" for k in known]
        if self._walk is not None and self._walk[0].has_flat_parameters:
            # Parts are cut anew each time: what is an optimizer's is told by its memory.
            memory = memory_of(optimizer_held(self._objects))
            devices = [
                d or (k.ref.device if k.local.untyped_storage().data_ptr() in memory else "")
                for d, k in zip(devices, known, strict=True)
            ]
        held = [device if device in self._copiers else "" for device in devices]
        return Collected(self._layout, [k.local for k in known], blob, held, trust)

    def doubt(self, names: Iterable[str]) -> None:
        """Believe nothing of these objects any more."""
        self._doubted.update(names)

    @torch.no_grad()
    def copy_into(self, slot: Slot, state: Collected) -> None:
        """Copy `state` into an unsealed slot of its layout."""
        copy_all(self._targets(slot, state), state.tensors)
        slot.write_plain(state.plain)

    def stage(self, slot: Slot, state: Collected, at_boundary: Set[str]) -> Staging:
        """Copy `state` as `copy_into` does, what optimizers hold beside the training.

        The rest, and what `at_boundary` names, may change as soon as this returns.
        """
        held = state.held
        if at_boundary:
            pairs = zip(held, slot.layout.entries, strict=True)
            held = ["" if entry.name in at_boundary else device for device, entry in pairs]
        split = self._splits.get(slot)
        believed = () if state.trust is None else state.trust.believed
        if split is None or split.later != held or split.believed != believed:
            split = _Split.of(slot, held, believed, self._targets(slot, state))
            self._splits[slot] = split
        tensors = list(compress(state.tensors, held))
        aliases = self._aliases.of(split.names, tensors, slot.layout, split.looked_at)
        staging = Staging(aliases, tensors, split.devices, state.trust)
        # Detached one by one where they need a gradient: `no_grad` costs more than all of this.
        sources_now = [
            t.detach() if t.requires_grad else t for t in compress(state.tensors, split.now)
        ]
        now = split.targets_now, sources_now
        staging.start(slot, now, split.targets_later, state.plain, self._copiers)
        return staging

    def held_and_different(self, slot: Slot, state: Collected) -> list[str]:
        """What optimizers hold and is not what the slot has any more, where `state` went whole."""
        targets = compress(self._targets(slot, state), state.held)
        names = [entry.name for entry in compress(slot.layout.entries, state.held)]
        found = differing(list(targets), list(compress(state.tensors, state.held)))
        return [names[index] for index in found]

    def _targets(self, slot: Slot, state: Collected) -> list[Tensor]:
        assert slot.layout.digest == state.layout.digest, "the slot is laid out for another state"
        targets = self._slot_tensors.get(slot)
        if targets is None:
            targets = [over(slot.view(entry), entry) for entry in slot.layout.entries]
            self._slot_tensors[slot] = targets
        return targets

    @torch.no_grad()
    def restore_from(
        self, source: Views, left_alone: Set[str] = frozenset(), copy: Copy | None = None
    ) -> list[str]:
        """Bring the tracked objects into the state of `source`; StateError: what does not fit.

        Objects that are `left_alone` are in no state of `source`, and stay as they are. `copy`: in
        the place of copies from its views. Returns the parameters whose `requires_grad` was another
        than in `source`.
        """
        try:
            tree = plain.decode(source.plain)
        except ValueError as error:
            raise StateError(str(error)) from error
        walk, sink = Walk(self._objects), self._sink()
        walk.held(sink)
        # Or tensors that the restored state has not would stay alive.
        self._known, self._walk, self._last, self._aliases = {}, None, None, KeptAliases()
        before = sink.all()
        copy = copy or from_views(source)
        restoration = Restoration(walk, before, self._inspector, source, tree, left_alone, copy)
        changed = restoration.run()
        sink = Sink(self._inspector, before)
        Walk(self._objects).held(sink)
        after = sink.all()
        self._check_restored(after, source, left_alone)
        self._known = after
        self.loop_left = bool(tree[OWN_NAME].get(LOOP_LEFT_NAME, False))
        return changed

    def look(self) -> tuple[Walk, Mapping[str, Known], Inspector]:
        """What modules and optimizers hold now, by name, and who says what a tensor is."""
        walk, sink = Walk(self._objects), self._sink()
        walk.held(sink)
        return walk, sink.all(), self._inspector

    @torch.no_grad()
    def local_digests(self) -> list[DigestRow]:
        """Name, offsets and hash of each tracked local tensor as it is now, by name; RNGs left out.

        Ranks that hold the same part of a tensor (replicas) return the same row.
        """
        sink = self._sink()
        Walk(self._objects).everything(sink)
        rows = []
        for name, known in sorted(sink.all().items()):
            if not self._is_own(name):
                raw = bytearray(known.spec.size_bytes)
                over(memoryview(raw), known.spec).copy_(known.local)
                rows.append((name, known.spec.offsets, _hash(raw)))
        return rows

    def digests_in(self, source: Views) -> list[DigestRow]:
        """The same of what a snapshot of these objects holds."""
        entries = sorted(source.layout.entries, key=lambda entry: entry.name)
        return [
            (entry.name, entry.offsets, _hash(source.view(entry)))
            for entry in entries
            if not self._is_own(entry.name)
        ]

    def _is_own(self, name: str) -> bool:
        return name.startswith(tuple(private_name(self.rank, p) for p in ("rng.", "modules.")))

    def _present_walk(self, trust: Trust | None) -> Walk:
        if self._walk is None or not self._walk[0].is_same(trust):
            roots = [value for value in self._objects.values() if isinstance(value, nn.Module)]
            self._walk = Structure(roots), Walk(self._objects)
        return self._walk[1]

    def _sink(self, trust: Trust | None = None) -> Sink:
        known = self._inspector, self._known
        return Sink(*known, rank=self.rank, private=self._private, trust=trust)

    def _check_restored(
        self, found: Mapping[str, Known], source: Views, left_alone: Set[str]
    ) -> None:
        """The other half of the layout's digest: what was restored has the snapshot's shape."""
        owners = {
            name
            for name, value in self._objects.items()
            if isinstance(value, nn.Module | Tensor) or is_transparent(value) or is_container(value)
        } - left_alone
        here = {n: known.spec for n, known in found.items() if n.partition(".")[0] in owners}
        specs = source.layout.specs
        wanted = {n: spec for n, spec in specs.items() if n.partition(".")[0] in owners}
        if here != wanted:
            names = [n for n in sorted(here | wanted) if here.get(n) != wanted.get(n)][:3]
            raise StateError(f"after restoring, these tensors do not match the snapshot: {names}")


def _hash(data: bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def refuse_several_devices(placed: Iterable[tuple[str, torch.device]]) -> None:
    """Raise ScriptError where a rank's state lies on more than one GPU.

    A copy is ordered behind the work of the one device on which it runs. Behind that of others it
    could only be by waiting for each of them whole, in the loop. Never run on a GPU.
    """
    seen: dict[torch.device, str] = {}
    for name, device in placed:
        seen.setdefault(device, name)
    if len(seen) > 1:
        (one, first), (other, second) = list(seen.items())[:2]
        raise ScriptError(
            f"{first} is on {one} and {second} on {other}: a rank's state is on one GPU, or each"
            " snapshot would hold the loop until all of them are idle; give each GPU a rank"
        )
