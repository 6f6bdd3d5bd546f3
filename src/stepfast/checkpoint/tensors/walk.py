"""The tracked objects' state as it stands: tensors by name, and the plain values around them.

Owns: which state each kind of object has; the order in which it is read. Does not own: names
(`naming`), what a tensor is (`local`), putting state back (`restoration`).

Invariant: RNG states are read after every `state_dict()`, for that may draw from them.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint import plain
from stepfast.checkpoint.layout import private_name
from stepfast.checkpoint.plain import Ref
from stepfast.checkpoint.tensors.fixed import Fixed, are
from stepfast.checkpoint.tensors.flat import cut_state
from stepfast.checkpoint.tensors.frozen import Frozen
from stepfast.checkpoint.tensors.local import Inspector, Known, Part, check_writable
from stepfast.checkpoint.tensors.naming import (
    FROZEN_NAME,
    LOOP_LEFT_NAME,
    OWN_NAME,
    Objects,
    ParameterNames,
    Scan,
    is_container,
    is_schedule,
    is_transparent,
    named_parameters,
    parameter_names,
    scan_all,
)
from stepfast.checkpoint.tensors.trust import Look, Trust
from stepfast.errors import ScriptError

_TRAINING: Callable[[nn.Module], bool] = attrgetter("training")
_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.WeakMethod,
)  # fmt: skip


class Sink:
    """Collects tensors under their names while a state is walked."""

    def __init__(
        self,
        inspector: Inspector,
        before: Mapping[str, Known],
        *,
        rank: int = 0,
        private: tuple[str, ...] = (),
        trust: Trust | None = None,
    ) -> None:
        """`before`: what an earlier walk found; used where it is still true. Names that begin with
        one of `private` are `rank`'s alone. `trust`: what may be believed to be true.
        """
        self.found: dict[str, Known] = {}
        self.fixed: list[Fixed] = []
        self._rank, self._private = rank, private
        self._inspector = inspector
        self._before = before
        self._trust = trust

    def holds(self, name: str, look: Look) -> bool:
        """Whether what was found of the object `name` is true now, as `look` says."""
        return look() if self._trust is None else self._trust.holds(name, look)

    def add(self, name: str, tensor: Tensor | Part) -> Ref:
        """Take `tensor` in; the name is free."""
        known = self._before.get(name)
        if known is None or not known.is_good(tensor):
            known = self._inspector.known(name, tensor)
        self.found[name] = known
        return known.ref

    def take(self, fixed: Fixed) -> None:
        """Take in what was found together; the names are free."""
        self.fixed.append(fixed)

    def all(self) -> dict[str, Known]:
        """What was added and what was taken in."""
        found = dict(self.found)
        for fixed in self.fixed:
            found.update(fixed.found)
        return found

    def beside(self) -> Sink:
        """An empty one that knows what this one knew."""
        return Sink(self._inspector, self._before, rank=self._rank, private=self._private)

    def leaf(self, value: object, path: str) -> Ref | None:
        """For `plain.encode`."""
        if not isinstance(value, Tensor | Part):
            return value if type(value) is Ref else None
        if path.startswith(self._private):
            path = private_name(self._rank, path.removeprefix(f"{OWN_NAME}."))
        # {"a.b": x, "a": {"b": y}} has one path for two tensors
        while path in self.found or any(path in fixed.found for fixed in self.fixed):
            path += "~"
        return self.add(path, value)


class Walk:
    """One look at the objects: modules first, for optimizers name their state after them."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.scans = scan_all(objects)
        self.names: ParameterNames = parameter_names(objects, self.scans)

        self.frozen = Frozen(objects, self.scans)
        self._is_in_pieces = any(n.piece is not None for ns in self.names.values() for n in ns)
        self._states: dict[str, _State] = {}
        self._tensors: dict[str, _Tensors] = {}
        self._flags: dict[str, _Flags] = {}

    def everything(self, sink: Sink, *, loop_left: bool = False) -> bytes:
        """Hand every tensor to `sink`, RNGs too; return the plain values. `loop_left` is one."""
        trees, modules = self._held(sink)
        for name, value in self.objects.items():
            if name not in trees and not isinstance(value, nn.Module | Tensor | torch.Generator):
                state = value.state_dict()
                trees[name] = _without_functions(state) if is_schedule(value) else state
        own: dict[str, object] = {"modules": modules, "rng": _rng_states(self.objects)}
        own[FROZEN_NAME] = self.frozen.encoded()
        if loop_left:
            own[LOOP_LEFT_NAME] = True
        return plain.encode({**trees, OWN_NAME: own}, sink.leaf)

    def held(self, sink: Sink) -> None:
        """Hand to `sink` what modules, optimizers, containers hold; no `state_dict()` is called."""
        trees, modules = self._held(sink)
        plain.encode({**trees, OWN_NAME: {"modules": modules}}, sink.leaf)

    def _held(self, sink: Sink) -> tuple[dict[str, object], dict[str, object]]:
        """Trees that `plain.encode` will walk, by object, and what is plain about modules."""
        trees: dict[str, object] = {}
        modules: dict[str, object] = {}
        for name, value in self.objects.items():
            if isinstance(value, nn.Module):
                modules[name] = self._module_values(name, sink)
            elif isinstance(value, Tensor):
                sink.add(name, value)
                check_writable(name, value)
            elif is_transparent(value):
                trees[name] = self._optimizer_tree(name, value, sink)
            elif is_container(value):
                trees[name] = value
        return trees, modules

    def _module_values(self, name: str, sink: Sink) -> dict[str, object]:
        """Hand the module's tensors to `sink`; return what is plain about it."""
        scan, tensors = self.scans[name], self._tensors.get(name)
        if tensors is None or not tensors.fixed.is_good():
            inner = sink.beside()
            places = [(held, inner.add(held.name, held.tensor)) for held in _held_in(scan)]
            for held, _ in places:
                check_writable(held.name, held.tensor)
            buffers = [ref for held, ref in places if held.is_buffer]
            tensors = self._tensors[name] = _Tensors(buffers, Fixed(inner.found))
        sink.take(tensors.fixed)
        return {**self._module_flags(name), "buffers": tensors.buffers}

    def _module_flags(self, name: str) -> dict[str, object]:
        """As the function, from before where no part has state of its own and none is set anew."""
        flags = self._flags.get(name)
        if flags is None or not flags.is_good():
            flags = self._flags[name] = _Flags.of(self.scans[name])
        return flags.values

    def _optimizer_tree(self, name: str, optimizer: Optimizer, sink: Sink) -> dict[str, object]:
        """As the function, with its state's bytes from before where that is the same tensors."""
        state = self._states.get(name)
        if state is None or not sink.holds(name, partial(state.is_good, optimizer)):
            if self._is_in_pieces or not _holds_tensors_alone(optimizer):
                return _optimizer_tree(name, optimizer, self.names)
            tree = _optimizer_tree(name, optimizer, self.names)
            inner = sink.beside()
            raw = msgspec.Raw(plain.encode(tree["state"], inner.leaf, f"{name}.state"))
            state = self._states[name] = _State.of(optimizer, raw, Fixed(inner.found))
        sink.take(state.fixed)
        return {"state": state.raw, "param_groups": _groups(optimizer)}


class _State(NamedTuple):
    """An optimizer's state that holds nothing but tensors: its bytes, and what they are true of."""

    sizes: list[int]
    held: list[object]
    raw: msgspec.Raw
    fixed: Fixed

    @classmethod
    def of(cls, optimizer: Optimizer, raw: msgspec.Raw, fixed: Fixed) -> _State:
        sizes, held = _sizes_and_held(optimizer)
        return cls(sizes, list(held), raw, fixed)

    def is_good(self, optimizer: Optimizer) -> bool:
        """Whether names, order and tensors are what they were."""
        sizes, held = _sizes_and_held(optimizer)
        return sizes == self.sizes and are(held, self.held) and self.fixed.is_good()


class _Flags(NamedTuple):
    """What is plain about a module, and what it is true of."""

    parts: list[nn.Module]
    training: list[bool]
    values: dict[str, object]

    @classmethod
    def of(cls, scan: Scan) -> _Flags:
        parts = [*scan.owners.values(), *(part for _, part, _ in scan.wrappers)]
        return cls(parts, list(map(_TRAINING, parts)), _flags(scan))

    def is_good(self) -> bool:
        has_more = self.values["extra"] or self.values["wrapper_extra"]
        return not has_more and list(map(_TRAINING, self.parts)) == self.training


class _Tensors(NamedTuple):
    """A module's tensors, and which of them are buffers."""

    buffers: list[Ref]
    fixed: Fixed


def set_rng_states(objects: Objects, states: Mapping[str, Any]) -> None:
    """Put back what was read of the generators: the tracked ones, torch's and the process's."""
    for name, value in objects.items():
        if isinstance(value, torch.Generator):
            value.set_state(states["generators"][name])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    plain.set_process_rng(states["process"])


def _rng_states(objects: Objects) -> dict[str, object]:
    states: dict[str, object] = {"process": plain.process_rng(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    states["generators"] = {
        n: value.get_state() for n, value in objects.items() if isinstance(value, torch.Generator)
    }
    return states


def _held_in(scan: Scan) -> Iterator[Any]:
    return (held for held in scan.places if held.tensor is not None)


def _flags(scan: Scan) -> dict[str, object]:
    # Apart, for a wrapper's own path may be that of what it wraps without a wrapper.
    wrappers = ((raw, part) for raw, part, _ in scan.wrappers)
    return {
        **training_flags(scan),
        "extra": _extra_states(scan.owners.items()),
        "wrapper_extra": _extra_states(wrappers),
    }


def _extra_states(parts: Iterable[tuple[str, nn.Module]]) -> dict[str, object]:
    return {path: part.get_extra_state() for path, part in parts if has_extra_state(path, part)}


def has_extra_state(path: str, part: nn.Module) -> bool:
    """Whether a module keeps state of its own; ScriptError where it could not be given back."""
    kind = type(part)
    if kind.get_extra_state is nn.Module.get_extra_state:
        return False
    if kind.set_extra_state is nn.Module.set_extra_state:
        raise ScriptError(
            f"{path} is a {kind.__name__}, which has get_extra_state() and no set_extra_state(), so"
            " what it returns could not be restored; give it both"
        )
    return True


def training_flags(scan: Scan) -> dict[str, list[str]]:
    """Which parts of a module are in evaluation, and which wrappers are not as what they wrap."""
    in_eval = [path for path, part in scan.owners.items() if not part.training]
    # A wrapper is, without a word, as what it wraps is: so it may be there or not.
    odd = [raw for raw, part, path in scan.wrappers if part.training != scan.owners[path].training]
    return {"eval": in_eval, "odd_wrappers": odd}


def _optimizer_tree(name: str, optimizer: Optimizer, known: ParameterNames) -> dict[str, object]:
    state: dict[str, object] = {}
    for parameter, names in named_parameters(name, optimizer, known):
        if parameter not in optimizer.state:  # looking it up would make an entry
            continue
        values = optimizer.state[parameter]
        for own, piece in names:
            path = f"{name}.state.{own}"
            state[own] = values if piece is None else cut_state(path, values, parameter, piece)
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise ScriptError(
            f"{name} keeps state that belongs to no parameter; give it state_dict() of its own"
        )
    return {"state": state, "param_groups": _groups(optimizer)}


def _without_functions(value: object) -> object:
    """A schedule's state without functions: they hold no state, and loading leaves them alone."""
    if type(value) is dict:
        return {
            key: _without_functions(item)
            for key, item in value.items()
            if not isinstance(item, _FUNCTIONS)
        }
    if type(value) is list:
        return [_without_functions(item) for item in value]
    return value


def _groups(optimizer: Optimizer) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _sizes_and_held(optimizer: Optimizer) -> tuple[list[int], Iterator[object]]:
    """What its state's names and order follow from, if it holds nothing but tensors."""
    groups = [group["params"] for group in optimizer.param_groups]
    states = [state for state in optimizer.state.values() if type(state) is dict]
    sizes = [len(optimizer.state), len(groups), *map(len, groups), *map(len, states)]
    values = chain.from_iterable(map(dict.values, states))
    parameters = chain.from_iterable(groups)
    return sizes, chain(parameters, optimizer.state, chain.from_iterable(states), values)


def _holds_tensors_alone(optimizer: Any) -> bool:
    return all(
        isinstance(parameter, Tensor)
        and type(values) is dict
        and all(isinstance(value, Tensor) for value in values.values())
        for parameter, values in optimizer.state.items()
    )
