"""One restore: a snapshot's state into the tracked objects, in place.

Owns: what "restored" means for each kind of object, and the order of it. Does not own: finding and
checking the snapshot (`checkpoint.restore`), comparing the outcome with it (`tree`).

Invariants:
- Identity is kept: parameters, buffers and optimizer tensors that exist are copied into, those that
  the snapshot does not have are removed, missing ones are made.
- A model or an optimizer that does not fit is refused before anything is changed.
- An object's own code (`load_state_dict`, `set_extra_state`) never sees a tensor whose bytes are
  not in place yet.
- RNG states are set after every `load_state_dict()`, for that may draw from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint import plain
from stepfast.checkpoint.layout import Entry, Layout, TensorSpec
from stepfast.checkpoint.plain import Ref
from stepfast.checkpoint.tensors.copier import copy_all
from stepfast.checkpoint.tensors.flat import drop_gradients, join_state
from stepfast.checkpoint.tensors.local import (
    Inspector,
    Known,
    Part,
    empty_like_saved,
    is_expanded,
    loaded_type,
    local_of,
    over,
    sharded,
    words,
)
from stepfast.checkpoint.tensors.naming import (
    FROZEN_NAME,
    OWN_NAME,
    is_container,
    is_transparent,
    named_parameters,
    optimizer_names,
)
from stepfast.checkpoint.tensors.walk import Sink, Walk, set_rng_states
from stepfast.core.quantities import counted
from stepfast.errors import StateError


class Views(Protocol):
    """Where a snapshot is restored from: verified bytes and what they mean."""

    layout: Layout
    plain: bytes

    def view(self, entry: Entry) -> memoryview: ...


ADVICE_GROUPS = (
    "State is restored into what the script makes before the loop, so give the optimizer all its"
    " groups there, in the place of add_param_group() in the loop, with requires_grad_(False) on"
    " parameters whose turn comes later"
)

# Brings local tensors to what entries hold, however that is done best.
Copy = Callable[[Sequence[Tensor], Sequence[Entry]], None]


class Restoration:
    """The objects, what they hold now by name, and the snapshot; some objects are left alone."""

    def __init__(
        self,
        walk: Walk,
        live: Mapping[str, Known],
        inspector: Inspector,
        source: Views,
        tree: dict[str, Any],
        left_alone: Set[str],
        copy: Copy,
    ) -> None:
        self._objects = {n: v for n, v in walk.objects.items() if n not in left_alone}
        self._scans, self._names, self._frozen = walk.scans, walk.names, walk.frozen
        self._live, self._inspector = dict(live), inspector
        self._source, self._tree, self._copy = source, tree, copy
        self._own = tree[OWN_NAME]
        self._targets: list[Tensor] = []
        self._entries: list[Entry] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def run(self) -> list[str]:
        """Check, then change; the parameters whose `requires_grad` was not as it was saved."""
        self._check()
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                self._restore_module(name, value)
            elif isinstance(value, Tensor):
                self._plan_copy(name, value)
        for name, value in self._objects.items():
            if is_transparent(value):
                self._restore_optimizer(name, value)
        for name, value in self._objects.items():
            if is_container(value):
                self._restore_container(name, value)
            elif name in self._tree and not is_transparent(value):
                self._restore_other(name, value)
        states = self._fill(self._own["rng"])
        self._copy_planned()
        if "process" in states:  # a checkpoint that was imported has none
            set_rng_states(self._objects, states)
        frozen = self._own.get(FROZEN_NAME)  # others' checkpoints do not have it
        return [] if frozen is None else self._frozen.restore(frozen, self._objects.keys())

    # --- what cannot fit is refused while nothing is changed yet ----------------------------------

    def _check(self) -> None:
        rng = self._own["rng"]
        saved = {*self._tree, *self._own["modules"], *rng["generators"]} - {OWN_NAME}
        saved |= {name for name in self._source.layout.by_name if "." not in name}
        if saved != set(self._objects):
            raise StateError(
                f"the snapshot holds {sorted(saved)} and tracked are {sorted(self._objects)}"
            )
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                self._check_module(name)
            elif isinstance(value, Tensor):
                self._check_fits(name)
            elif is_transparent(value):
                self._check_optimizer(name, value)

    def _check_module(self, name: str) -> None:
        scan, buffers = self._scans[name], self._own["modules"][name]["buffers"]
        saved = self._source.layout.by_name.keys()
        needed = [h.name for h in scan.places if h.tensor is not None and not h.is_buffer]
        known = {held.name for held in scan.places}
        known |= {b.name for b in buffers if b.name.rpartition(".")[0] in scan.owners}
        strange = sorted(path for path in saved - known if path.startswith(f"{name}."))
        problems = []
        if missing := [path for path in needed if path not in saved]:
            problems.append(f"has no {_listed(missing)}")
        if strange:
            problems.append(f"holds {_listed(strange)}, which the model has not")
        if problems:
            raise StateError(f"the snapshot {' and '.join(problems)}; was it of another model?")
        for path in needed:
            self._check_fits(path)

    def _check_fits(self, name: str) -> None:
        wanted = self._source.layout.specs.get(name)
        if wanted is None:
            raise StateError(f"the snapshot has no {name}; was it taken of another model?")
        spec: TensorSpec = self._live[name].spec
        if wanted != spec:
            raise StateError(f"{name} is {words(spec)} here and {words(wanted)} in the snapshot")

    def _check_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved, here = self._tree[name], optimizer_names(name, optimizer, self._names)
        known = {parameter for group in here for parameter in group}
        if len(saved["param_groups"]) != len(here) or not known.issuperset(saved["state"]):
            strange = sorted(set(saved["state"]) - known)[:3]
            raise StateError(
                f"{name} has {counted(len(here), 'parameter group')}, the snapshot has"
                f" {len(saved['param_groups'])}; parameters that only it knows: {strange}."
                f" {ADVICE_GROUPS}"
            )

    # --- each kind of object ----------------------------------------------------------------------

    def _restore_module(self, name: str, module: nn.Module) -> None:
        flags = self._own["modules"][name]
        buffers = {ref.name: ref for ref in flags["buffers"]}
        places = {held.name: held for held in self._scans[name].places}
        for held in places.values():
            if held.tensor is not None and not held.is_buffer:
                self._plan_copy(held.name, held.tensor)
                if isinstance(held.tensor, Tensor):
                    held.tensor.grad = None
            else:
                ref = buffers.pop(held.name, None)
                assert not isinstance(held.tensor, Part), "no buffer is flat"
                value = None if ref is None else self._tensor(ref, held.tensor)
                held.owner._buffers[held.key] = value
        for path, ref in buffers.items():  # registered later than in the constructor
            owner, _, key = path.rpartition(".")
            self._scans[name].owners[owner].register_buffer(key, self._tensor(ref, None))
        drop_gradients(module)
        extra = self._fill(flags["extra"])
        wrapper_extra = self._fill(flags.get("wrapper_extra", {}))
        if extra or wrapper_extra:
            self._copy_planned()
        scan = self._scans[name]
        for path, part in scan.owners.items():
            part.training = path not in flags["eval"]
            if path in extra:
                part.set_extra_state(extra[path])
        for raw, part, path in scan.wrappers:
            part.training = scan.owners[path].training != (raw in flags["odd_wrappers"])
            if raw in wrapper_extra:
                part.set_extra_state(wrapper_extra[raw])

    def _restore_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved = self._tree[name]
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(self._fill(values))
        for parameter, names in named_parameters(name, optimizer, self._names):
            parameter.grad = None
            found = [(own, piece, saved["state"].get(own)) for own, piece in names]
            if all(values is None for _, _, values in found):
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state.setdefault(parameter, {})
            own, piece, values = found[0]
            if piece is not None:
                pieces = [(piece, values) for _, piece, values in found if piece is not None]
                path = f"{name}.state.{own}"
                values = join_state(path, parameter, pieces, state, self._saved, self._plan)
            filled = self._fill(values, like=parameter)
            state.clear()
            state.update(filled)

    def _restore_container(self, name: str, value: Any) -> None:
        self._tell_apart(name)
        filled = self._fill(self._tree[name])
        if type(filled) is not type(value):
            raise StateError(
                f"{name} is a {type(value).__name__} here and a {type(filled).__name__} in the"
                " snapshot"
            )
        put_into(value, filled)

    def _tell_apart(self, name: str) -> None:
        """One live tensor under two names may have been two when the snapshot was taken."""
        first: dict[int, str] = {}
        for path in sorted(path for path in self._live if path.startswith(f"{name}.")):
            before = first.setdefault(id(self._live[path].tensor), path)
            if before != path and not self._have_same_bytes(before, path):
                del self._live[path]

    def _have_same_bytes(self, one: str, other: str) -> bool:
        entries = [self._source.layout.by_name.get(name) for name in (one, other)]
        views = [self._source.view(entry) for entry in entries if entry is not None]
        return len(views) == 2 and views[0] == views[1]

    def _restore_other(self, name: str, value: Any) -> None:
        refs: list[Ref] = []
        plain.replace_refs(self._tree[name], refs.append)
        if any(ref.shards is not None for ref in refs):
            # Only the object knows the meshes of its DTensors.
            sink = Sink(self._inspector, {})
            plain.encode({name: value.state_dict()}, sink.leaf)
            self._live.update(sink.found)
        state = self._fill(self._tree[name])
        self._copy_planned()
        value.load_state_dict(state)
        if isinstance(value, loaded_type("torchdata.stateful_dataloader", "StatefulDataLoader")):
            # Its next iterator is made now, before the RNGs are set: making one draws from them.
            value.state_dict()
        if isinstance(value, torch.amp.GradScaler):
            value._per_optimizer_states.clear()  # left over from an interrupted step

    # --- tensors ----------------------------------------------------------------------------------

    def _fill(self, value: Any, like: Tensor | None = None) -> Any:
        return plain.replace_refs(value, lambda ref: self._tensor(ref, like))

    def _tensor(self, ref: Ref, like: Tensor | None) -> Tensor:
        """What `ref` stands for: the live tensor, or a new one like `like`; its copy is planned."""
        entry, live = self._entry(ref), self._live.get(ref.name)
        if live is not None and self._can_take(live, ref):
            self._plan_copy(ref.name, live.tensor)
            return live.tensor
        if like is None and live is not None:
            like = live.tensor
        local = empty_like_saved(entry, ref, like)
        made = local if ref.shards is None else sharded(local, entry, ref.shards, like)
        self._plan_copy(ref.name, made)
        return made

    def _can_take(self, live: Known, ref: Ref) -> bool:
        """Whether what `ref` stands for fits into the live tensor."""
        is_same = live.spec == self._source.layout.specs[ref.name]
        return is_same and live.ref.shards == ref.shards and not is_expanded(live.local)

    def _plan_copy(self, name: str, target: Tensor | Part) -> None:
        self._targets.append(local_of(target))
        self._entries.append(self._source.layout.by_name[name])

    def _plan(self, target: Tensor, source: Tensor) -> None:
        self._pairs.append((target, source))

    def _saved(self, ref: Ref) -> tuple[Tensor, bool]:
        entry = self._entry(ref)
        return over(self._source.view(entry), entry), entry.original_shape is not None

    def _entry(self, ref: Ref) -> Entry:
        entry = self._source.layout.by_name.get(ref.name)
        if entry is None:
            raise StateError(f"the snapshot refers to {ref.name} and has no such tensor")
        return entry

    def _copy_planned(self) -> None:
        """All at once: a call for each tensor would cost as much as a small tensor's bytes."""
        if self._targets:
            self._copy(self._targets, self._entries)
            self._targets, self._entries = [], []
        if self._pairs:
            copy_all([target for target, _ in self._pairs], [source for _, source in self._pairs])
            self._pairs = []


def _listed(names: list[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def put_into(live: Any, restored: Any) -> Any:
    """`restored`, in `live` and the containers in it: who holds one of them sees what is new."""
    if isinstance(live, dict) and type(live) is type(restored):
        items = {key: put_into(live.get(key), item) for key, item in restored.items()}
        live.clear()
        live.update(items)
        return live
    if isinstance(live, list) and type(live) is type(restored):
        before = [*live, *([None] * (len(restored) - len(live)))]
        live[:] = [put_into(old, new) for old, new in zip(before, restored, strict=False)]
        return live
    return restored
