"""What this rank would have saved, had the checkpoint been saved in this rank's layout.

Owns: for each kind of tracked object, which saved tensors it takes in which local shape, and the
plain values around them. Does not own: reading and copying (`reshard`), what "restored" means
(`restoration`), the policy for what is one rank's alone (`other_world`).

Invariants:
- Nothing live is touched, and every misfit is found before anything is read but plain values.
- Optimizer state that this process does not have yet is laid out as its parameter is here.
- Where ranks have the same plain values, those of this rank are taken if the world has its old
  size, else those of rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint import plain
from stepfast.checkpoint.layout import TensorSpec, private_rank
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.overlap import true_shape
from stepfast.checkpoint.plain import Ref
from stepfast.checkpoint.tensors.local import Inspector, Known
from stepfast.checkpoint.tensors.naming import (
    FROZEN_NAME,
    OWN_NAME,
    Held,
    Scan,
    is_container,
    is_per_rank,
    is_transparent,
    named_parameters,
)
from stepfast.checkpoint.tensors.other_world import OtherWorld
from stepfast.checkpoint.tensors.restoration import ADVICE_GROUPS
from stepfast.checkpoint.tensors.walk import Sink, Walk, has_extra_state, training_flags
from stepfast.checkpoint.tensors.wanted import Misfits, Wants
from stepfast.core.quantities import counted


class Planner:
    """Compares a checkpoint with the tracked objects; `run` once, then read the outcome."""

    def __init__(
        self,
        checkpoint: StoredCheckpoint,
        walk: Walk,
        live: Mapping[str, Known],
        inspector: Inspector,
        world: OtherWorld,
        *,
        start_fresh: Collection[str] = (),
    ) -> None:
        """`live`: what the objects hold, by name; `start_fresh`: what the checkpoint may lack."""
        self.misfits = Misfits(start_fresh)
        self._start_fresh = start_fresh
        self.left_alone: set[str] = set()  # objects that the restore passes over
        self._walk, self._live, self._inspector = walk, live, inspector
        self._checkpoint, self._world = checkpoint, world
        own = world.rank if world.is_same_size else None
        self.wants = Wants(checkpoint.index, self.misfits, own_rank=own)
        self.tree: dict[str, Any] = dict(world.shared_values)
        self._own: dict[str, Any] = dict(self.tree[OWN_NAME])
        self._modules: dict[str, Any] = dict(self._own["modules"])
        self._is_imported = bool(self._own.get("imported"))
        self._saved_names = _names_of_all_ranks(checkpoint)
        # A saved device may not exist here.
        kinds = (known.ref.device for known in live.values())
        self._device = next((kind for kind in kinds if kind != "cpu"), "cpu")

    def run(self) -> None:
        """Look at everything."""
        self._compare_objects()
        for name, value in self._walk.objects.items():
            if name in self.left_alone:
                continue
            if isinstance(value, nn.Module):
                self._plan_module(name)
            elif isinstance(value, Tensor):
                self._take_live(name)
            elif is_transparent(value):
                self._plan_optimizer(name, value)
            elif is_container(value):
                self.tree[name] = plain.replace_refs(self.tree[name], self._like_live)
            elif is_per_rank(value):
                self._plan_per_rank(name, value)
            elif name in self.tree:
                self._plan_other(name, value)
        rng: dict[str, Any] = self._own["rng"]
        made: Mapping[str, bytes] = {}
        if not self._is_imported:
            rng, made = self._world.rng(self._walk.objects)
        self._own |= {"modules": self._modules, "rng": plain.replace_refs(rng, self._whole)}
        if FROZEN_NAME in self._own:
            self._own[FROZEN_NAME] = self._frozen(self._own[FROZEN_NAME])
        for tensor_name, state in made.items():
            self.wants.make(tensor_name, state)
        self.tree[OWN_NAME] = self._own
        self._name_strange_parts()

    def plain(self) -> bytes:
        """The plain values that belong to the wanted tensors."""
        return plain.encode(self.tree, lambda value, path: value if type(value) is Ref else None)

    # --- objects ----------------------------------------------------------------------------------

    def _compare_objects(self) -> None:
        saved = {*self.tree, *self._modules, *self._own["rng"]["generators"]} - {OWN_NAME}
        saved |= {name for name in self.wants.index if "." not in name}
        here = set(self._walk.objects)
        self.misfits.missing += [
            name for name in sorted(here - saved) if not self.misfits.may_begin_fresh(name)
        ]
        for name in self._start_fresh:
            if name.partition(".")[0] not in here:
                self.misfits.other.append(f"--start-fresh {name} is nothing that is tracked")
        self.misfits.unexpected += sorted(saved - here)
        self.left_alone |= here - saved
        for name in saved - here:
            self.tree.pop(name, None)
            self._modules.pop(name, None)
        for name in self._modules:
            if not isinstance(self._walk.objects[name], nn.Module):
                self.misfits.other.append(f"{name} is a module there and none here")
                self.left_alone.add(name)

    def _name_strange_parts(self) -> None:
        """Parts of models to start fresh that are none here: of use to whoever misspelled one,
        and right on a rank that holds other parts than its neighbours.
        """
        parts = {*self._live, *(path for scan in self._walk.scans.values() for path in scan.owners)}
        for name in self._start_fresh if self.misfits else ():
            is_of_module = isinstance(self._walk.objects.get(name.partition(".")[0]), nn.Module)
            if is_of_module and not any(
                part == name or part.startswith(f"{name}.") for part in parts
            ):
                self.misfits.other.append(f"--start-fresh {name} is no part of it here")

    def _plan_module(self, name: str) -> None:
        scan, saved = self._walk.scans[name], self._modules[name]
        if self._is_imported:
            saved = {**saved, **training_flags(scan)}
        buffers = {ref.name: ref for ref in saved["buffers"]}
        twins = self._saved_twins(scan)
        for held in scan.places:
            if held.tensor is not None:
                self._take_held(held, twins.get(id(held.tensor)))
                if held.is_buffer:
                    buffers[held.name] = self._live[held.name].ref
        here = {held.name for held in scan.places if held.tensor is not None}
        places = {held.name for held in scan.places}
        for path in sorted(buffers.keys() - here):  # registered, or filled, later than in build
            if path in places or path.rpartition(".")[0] in scan.owners:
                buffers[path] = self._whole(buffers[path])
            else:
                del buffers[path]
        prefix, known = f"{name}.", here | buffers.keys()
        self._add_unexpected(
            n for n in self._saved_names if n.startswith(prefix) and n not in known
        )
        wrappers = {raw for raw, _, _ in scan.wrappers}
        self._modules[name] = {
            "buffers": list(buffers.values()),
            "eval": [path for path in saved["eval"] if path in scan.owners],
            "odd_wrappers": [raw for raw in saved["odd_wrappers"] if raw in wrappers],
            "extra": self._extra(scan.owners.items(), saved["extra"]),
            "wrapper_extra": self._extra(
                ((raw, part) for raw, part, _ in scan.wrappers), saved.get("wrapper_extra", {})
            ),
        }

    def _frozen(self, saved: list[str]) -> list[str]:
        """Of parameters that the rank did not save whose values are taken, the flags here."""
        names = self._checkpoint.layout(self._world.shared_rank).by_name.keys()
        here = [name for name in self._walk.frozen.names() if name not in names]
        return [*(name for name in saved if name in names), *here]

    def _extra(
        self, parts: Iterable[tuple[str, nn.Module]], saved: dict[str, Any]
    ) -> dict[str, Any]:
        found = {}
        for path, part in parts:
            if has_extra_state(path, part):
                if path in saved:
                    found[path] = plain.replace_refs(saved[path], self._whole)
                elif not self.misfits.may_begin_fresh(path):
                    self.misfits.missing.append(f"the extra state of {path}")
        return found

    def _plan_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved = self.tree[name]
        groups = self._groups(name, optimizer, saved["param_groups"])
        parameters = parameters_of(name, optimizer, self._walk)
        states = dict(saved["state"])
        for rank, names in self._elsewhere(name, parameters.keys() - states.keys()).items():
            others = self._world.values(rank)[name]["state"]
            states |= {n: others[n] for n in names if n in others}
        kept, of_all_ranks = {}, self._saved_states(name)
        for parameter_name, state in states.items():
            if parameter_name in parameters:
                if self.wants.is_found(parameters[parameter_name]):
                    kept[parameter_name] = self._state(state, parameters[parameter_name])
            elif f"{name}.state.{parameter_name}" in of_all_ranks:
                self.misfits.unexpected.append(f"{name}.state.{parameter_name}")
        self.tree[name] = {"state": kept, "param_groups": groups}

    def _groups(self, name: str, optimizer: Optimizer, saved: list[Any]) -> list[Any]:
        here = optimizer.param_groups
        if len(saved) == len(here):
            groups: list[Any] = plain.replace_refs(saved, self._like_live)
            return groups
        self.misfits.other.append(
            f"{name} has {counted(len(here), 'parameter group')} here and {len(saved)} there."
            f" {ADVICE_GROUPS}"
        )
        for path, known in self._live.items():
            if path.startswith(f"{name}.param_groups."):
                self.wants.keep(known.spec, known.local)
        return [{} for _ in here]

    def _elsewhere(self, name: str, parameters: set[str]) -> dict[int, list[str]]:
        """Which rank has the state of parameters that the chosen rank has none of, as a rank of
        FSDP1 may hold nothing of a parameter.
        """
        found: dict[int, list[str]] = {}
        prefix = f"{name}.state."
        for path, chunks in self.wants.index.items() if parameters else ():
            if path.startswith(prefix):
                parameter = path.removeprefix(prefix)
                while parameter and parameter not in parameters:
                    parameter = parameter.rpartition(".")[0]
                if parameter and parameter not in found.setdefault(chunks[0].rank, []):
                    found[chunks[0].rank].append(parameter)
        return found

    def _saved_states(self, name: str) -> set[str]:
        """The parameters, of all names that each rank saved, that have state."""
        prefix = f"{name}.state."
        return {n.rpartition(".")[0] for n in self._saved_names if n.startswith(prefix)}

    def _state(self, state: Any, parameter: str) -> Any:
        """A parameter's saved state, laid out as the parameter is here."""
        known = self._live[parameter]
        refs: list[Ref] = []
        plain.replace_refs(state, refs.append)
        was_sharded = any(ref.shards is not None for ref in refs)

        def placed(ref: Ref) -> Ref:
            shape = self.wants.saved_shape(ref.name)
            if shape is None:
                return self._whole(ref)
            dtype, spec = self.wants.index[ref.name][0].entry.dtype, known.spec
            if shape == self.wants.saved_shape(parameter):
                self.wants.take(
                    TensorSpec(
                        ref.name, dtype, spec.shape, spec.global_shape, spec.offsets,
                        original_shape=spec.original_shape,
                    )
                )  # fmt: skip
                return Ref(ref.name, known.ref.device, known.ref.shards)
            whole = self.wants.take_whole(ref, "cpu" if ref.device == "cpu" else known.ref.device)
            is_one = ref.shards is not None or (not was_sharded and shape not in ((), (1,)))
            if known.ref.shards is None or not is_one:
                return whole
            # As DTensor makes what has another shape than its parameter: replicated.
            return Ref(ref.name, whole.device, (-1,) * len(known.ref.shards))

        return plain.replace_refs(state, placed)

    def _plan_other(self, name: str, value: Any) -> None:
        sink = Sink(self._inspector, {})
        plain.encode({name: value.state_dict()}, sink.leaf)
        self._live = {**self._live, **sink.found}
        self.tree[name] = plain.replace_refs(self.tree[name], self._like_live)

    def _plan_per_rank(self, name: str, value: Any) -> None:
        if self._world.is_same_size:
            self.tree[name] = plain.replace_refs(self.tree[name], self._whole)
            return
        state = self._world.loader_state(name, value)
        self.tree.pop(name)
        if state is None:
            self.left_alone.add(name)
        else:
            self.tree[name] = state

    # --- tensors ----------------------------------------------------------------------------------

    def _saved_twins(self, scan: Scan) -> dict[int, str]:
        """The name under which a tensor was saved that has several here; others save it once."""
        if not self._is_imported:
            return {}
        names = [(id(held.tensor), held.name) for held in scan.places if held.tensor is not None]
        return {key: name for key, name in names if name in self.wants.index}

    def _take_held(self, held: Held, twin: str | None) -> None:
        known, is_there = self._live[held.name], held.name in self.wants.index
        is_derived = held.is_buffer and held.key in held.owner._non_persistent_buffers_set
        if self._is_imported and not is_there and is_derived:
            self.wants.keep(known.spec, known.local)  # others do not save it: the script makes it
        else:
            self.wants.take(known.spec, known.local, saved_as=None if is_there else twin)

    def _take_live(self, name: str) -> None:
        known = self._live[name]
        self.wants.take(known.spec, known.local)

    def _like_live(self, ref: Ref) -> Ref:
        """A tensor as this process has it; as a plain one where it has none that fits."""
        known = self._live.get(ref.name)
        if known is not None and true_shape(known.spec) == self.wants.saved_shape(ref.name):
            self.wants.take(known.spec)
            return known.ref
        if ref.shards is not None:
            self.misfits.other.append(
                f"{ref.name} was sharded, and nothing here says how it is to be now"
            )
        return self._whole(ref)

    def _whole(self, ref: Ref) -> Ref:
        return self.wants.take_whole(ref, "cpu" if ref.device == "cpu" else self._device)

    def _add_unexpected(self, names: Iterable[str]) -> None:
        for name in names:
            shape = self.wants.saved_shape(name)
            self.misfits.unexpected.append(f"{name} {list(shape or ())}")


def parameters_of(name: str, optimizer: Optimizer, walk: Walk) -> dict[str, str]:
    """The parameters' own names, by the names that the optimizer's state has them under."""
    found: dict[str, str] = {}
    for parameter, names in named_parameters(name, optimizer, walk.names):
        known = walk.names[id(parameter)]
        found |= {own: each.full for (own, _), each in zip(names, known, strict=True)}
    return found


def _names_of_all_ranks(checkpoint: StoredCheckpoint) -> list[str]:
    """What every rank saved. The stages of a pipeline hold different modules, and a rank of FSDP1
    nothing of some: what only some have is no surprise where this rank does not want it.
    """
    size = checkpoint.world_size
    return sorted(
        name
        for name, chunks in checkpoint.index.items()
        if len(chunks) == size and private_rank(name) is None
    )
