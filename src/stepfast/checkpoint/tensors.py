"""Tracked objects as local tensors and plain values, and back. The only room that knows torch.

Owns: names, shapes and offsets of tensors; the copies into a slot and out of one; what "restored"
means for each kind of object. Does not own: slot files (`arena`), checks of what is read
(`restore`), when to capture (`capture`).

Names: a module's tensors are `object.fqn`; an optimizer's are `optimizer.state.fqn.key` and
`optimizer.param_groups.i.key`, as PyTorch's distributed checkpoint flattens them; wrappers leave no
trace in a name.

Invariants:
- No collective is called; a rank can capture and restore whatever its peers do.
- Restoring keeps identity: parameters, buffers and optimizer tensors that exist are copied into,
  those that the snapshot does not have are removed, missing ones are made. A model or an optimizer
  that does not fit is refused before anything is changed.
- RNG states are read after every `state_dict()` and set after every `load_state_dict()`, for either
  may draw from them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint import plain
from stepfast.checkpoint.arena import Slot
from stepfast.checkpoint.layout import Entry, Layout, TensorSpec
from stepfast.checkpoint.plain import Ref
from stepfast.errors import ScriptError, StateError

OWN_NAME = "stepfast"  # of the RNG states and module flags beside the tracked objects
_REPLICATED = -1
Objects = Mapping[str, Any]  # tracked, by the name they are tracked under
_Names = dict[int, tuple[str, str]]
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


class Views(Protocol):
    """Where a snapshot is restored from: verified bytes and what they mean."""

    layout: Layout
    plain: bytes

    def view(self, entry: Entry) -> memoryview: ...


class Collected(NamedTuple):
    """The state of one moment: the objects' own local tensors, in the order of `layout.entries`."""

    layout: Layout
    tensors: list[Tensor]
    plain: bytes


class _Held(NamedTuple):
    """A place in a module where a tensor is, or may be, held; `key` is its name there."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor | None
    is_buffer: bool


class _Scan(NamedTuple):
    """One module: its places under each of their names (tied ones appear twice), and its flags."""

    places: list[_Held]
    owners: dict[str, nn.Module]
    eval_paths: list[str]
    extra: dict[str, object]


class _Known(NamedTuple):
    """What is known of a tensor; good while the same object has the same shape and dtype."""

    tensor: Tensor
    ref: Ref
    spec: TensorSpec


class _Sink:
    """Collects tensors under their names while a state is walked."""

    def __init__(self, known: Mapping[str, _Known]) -> None:
        self.found: dict[str, _Known] = {}
        self._known = known

    def add(self, name: str, tensor: Tensor) -> Ref:
        known = self._known.get(name)
        if known is None or known.tensor is not tensor or not _still(known):
            spec = _spec(name, tensor)
            known = _Known(tensor, Ref(name, tensor.device.type, _shards(tensor)), spec)
        self.found[name] = known
        return known.ref

    def leaf(self, value: object, path: str) -> Ref | None:
        if not isinstance(value, Tensor):
            return value if type(value) is Ref else None
        while path in self.found:  # {"a.b": x, "a": {"b": y}} has one path for two tensors
            path += "~"
        return self.add(path, value)


class StateTree:
    """The tracked objects of one rank. For the thread that trains, between two steps."""

    def __init__(self, objects: Objects) -> None:
        """Raises ScriptError for a name or an object that cannot be tracked."""
        for name, value in objects.items():
            _check_trackable(name, value)
        self._objects = dict(objects)
        self._known: dict[str, _Known] = {}
        self._specs: list[TensorSpec] = []
        self._layout: Layout | None = None
        self._slot_tensors: WeakKeyDictionary[Slot, list[Tensor]] = WeakKeyDictionary()

    @torch.no_grad()
    def collect(self) -> Collected:
        """What is there to keep now. ScriptError names the path of state that cannot be kept."""
        found, blob = self._walk(with_others=True)
        specs = [known.spec for known in found.values()]
        room = self._layout is not None and self._layout.has_room_for(len(blob))
        if self._layout is None or not room or specs != self._specs:
            self._layout, self._specs = Layout.build(specs, len(blob)), specs
        tensors = [_local(found[entry.name].tensor) for entry in self._layout.entries]
        return Collected(self._layout, tensors, blob)

    @torch.no_grad()
    def copy_into(self, slot: Slot, state: Collected) -> None:
        """Copy `state` into an unsealed slot of its layout."""
        assert slot.layout.digest == state.layout.digest, "the slot is laid out for another state"
        targets = self._slot_tensors.get(slot)
        if targets is None:
            # Kept, for making them again would cost as much as a small copy; gone with their slot.
            targets = [_over(slot.view(entry), entry) for entry in slot.layout.entries]
            self._slot_tensors[slot] = targets
        torch._foreach_copy_(targets, state.tensors)
        slot.write_plain(state.plain)

    @torch.no_grad()
    def restore_from(self, source: Views) -> None:
        """Bring every tracked object into the state of `source`; StateError: what does not fit."""
        try:
            tree = plain.decode(source.plain)
        except ValueError as error:
            raise StateError(str(error)) from error
        live, _ = self._walk(with_others=False)
        tensors = {name: known.tensor for name, known in live.items()}
        _Restoration(self._objects, source, tree, tensors).run()
        self._check_restored(source)
        self._known = {}  # or tensors that the restored state has not would stay alive

    @torch.no_grad()
    def local_digests(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, offsets and hash of each tracked local tensor, by name; RNGs left out.

        Ranks that hold the same part of a tensor (replicas) return the same row.
        """
        rows = []
        for name, (tensor, _, spec) in sorted(self._walk(with_others=True)[0].items()):
            if not name.startswith(f"{OWN_NAME}."):
                raw = bytearray(spec.size_bytes)
                _over(memoryview(raw), spec).copy_(_local(tensor))
                digest = hashlib.blake2b(raw, digest_size=32).hexdigest()
                rows.append((name, spec.offsets, digest))
        return rows

    def _walk(self, *, with_others: bool) -> tuple[dict[str, _Known], bytes]:
        """Tensors by name, and the plain values; `with_others`: of all, RNGs too."""
        sink, scans = _Sink(self._known), _scan_all(self._objects)
        names = _parameter_names(self._objects, scans)
        trees: dict[str, object] = {}
        modules: dict[str, object] = {}
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                modules[name] = _module_values(scans[name], sink)
            elif isinstance(value, Tensor):
                sink.add(name, value)
            elif _is_transparent(value):
                trees[name] = _optimizer_tree(name, value, names)
            elif with_others and not isinstance(value, torch.Generator):
                trees[name] = value.state_dict()
        rng = _rng_states(self._objects) if with_others else {}
        blob = plain.encode({**trees, OWN_NAME: {"modules": modules, "rng": rng}}, sink.leaf)
        if with_others:
            self._known = sink.found
        return sink.found, blob

    def _check_restored(self, source: Views) -> None:
        """The other half of the layout's digest: what was restored has the snapshot's shape."""
        owners = {
            n
            for n, v in self._objects.items()
            if isinstance(v, nn.Module | Tensor) or _is_transparent(v)
        }
        here = {known.spec for known in self._walk(with_others=False)[0].values()}
        wanted = {e.spec for e in source.layout.entries}
        here, wanted = (
            {s for s in specs if s.name.split(".")[0] in owners} for specs in (here, wanted)
        )
        if here != wanted:
            names = sorted(spec.name for spec in here ^ wanted)[:3]
            raise StateError(f"after restoring, these tensors do not match the snapshot: {names}")


class _Restoration:
    """One restore: the objects, what they hold now by name, and the snapshot."""

    def __init__(
        self,
        objects: Objects,
        source: Views,
        tree: dict[str, Any],
        live: dict[str, Tensor],
    ) -> None:
        self._objects, self._source, self._tree, self._live = objects, source, tree, live
        self._own = tree[OWN_NAME]
        self._scans = _scan_all(objects)
        self._names = _parameter_names(objects, self._scans)

    def run(self) -> None:
        self._check()
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                self._restore_module(name, value)
            elif isinstance(value, Tensor):
                self._copy(name, value)
        for name, value in self._objects.items():
            if _is_transparent(value):
                self._restore_optimizer(name, value)
        for name, value in self._objects.items():
            if name in self._tree and not _is_transparent(value):
                self._restore_other(name, value)
        _set_rng_states(self._objects, self._fill(self._own["rng"]))

    def _check(self) -> None:
        """Refuse what cannot fit while nothing is changed yet."""
        rng = self._own["rng"]
        saved = {*self._tree, *self._own["modules"], *rng["generators"]} - {OWN_NAME}
        saved |= {name for name in self._source.layout.by_name if "." not in name}
        if saved != set(self._objects):
            raise StateError(
                f"the snapshot holds {sorted(saved)} and tracked are {sorted(self._objects)}"
            )
        for name, value in self._objects.items():
            if isinstance(value, nn.Module):
                for held in self._scans[name].places:
                    if held.tensor is not None and not held.is_buffer:
                        self._check_fits(held.name, held.tensor)
                scan, buffers = self._scans[name], self._own["modules"][name]["buffers"]
                known = {held.name for held in scan.places}
                known |= {b.name for b in buffers if b.name.rpartition(".")[0] in scan.owners}
                for path in sorted(self._source.layout.by_name.keys() - known):
                    if path.startswith(f"{name}."):
                        raise StateError(f"the snapshot holds {path}, which the model has not")
            elif isinstance(value, Tensor):
                self._check_fits(name, value)
            elif _is_transparent(value):
                self._check_optimizer(name, value)

    def _check_fits(self, name: str, tensor: Tensor) -> None:
        entry = self._source.layout.by_name.get(name)
        if entry is None:
            raise StateError(f"the snapshot has no {name}; was it taken of another model?")
        spec = _spec(name, tensor)
        if entry.spec != spec:
            raise StateError(f"{name} is {_words(spec)} here and {_words(entry)} in the snapshot")

    def _check_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved, here = self._tree[name], _optimizer_names(name, optimizer, self._names)
        known = {parameter for group in here for parameter in group}
        if len(saved["param_groups"]) != len(here) or not known.issuperset(saved["state"]):
            strange = sorted(set(saved["state"]) - known)[:3]
            raise StateError(
                f"{name} has {len(here)} parameter groups, the snapshot has"
                f" {len(saved['param_groups'])}; parameters that only it knows: {strange}"
            )

    def _restore_module(self, name: str, module: nn.Module) -> None:
        places = {held.name: held for held in self._scans[name].places}
        flags = self._own["modules"][name]
        buffers = {ref.name: ref for ref in flags["buffers"]}
        for held in places.values():
            if held.tensor is not None and not held.is_buffer:
                self._copy(held.name, held.tensor)
                held.tensor.grad = None
            else:
                ref = buffers.pop(held.name, None)
                value = None if ref is None else self._tensor(ref, held.tensor)
                held.owner._buffers[held.key] = value
        for path, ref in buffers.items():  # registered later than in the constructor
            owner, _, key = path.rpartition(".")
            self._scans[name].owners[owner].register_buffer(key, self._tensor(ref, None))
        for path, child in module.named_modules(prefix=name, remove_duplicate=False):
            child.training = path not in flags["eval"]
            if path in flags["extra"]:
                child.set_extra_state(self._fill(flags["extra"][path]))

    def _restore_optimizer(self, name: str, optimizer: Optimizer) -> None:
        saved = self._tree[name]
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(self._fill(values))
        for group, names in zip(
            optimizer.param_groups, _optimizer_names(name, optimizer, self._names), strict=True
        ):
            for parameter, parameter_name in zip(group["params"], names, strict=True):
                parameter.grad = None
                if parameter_name not in saved["state"]:
                    optimizer.state.pop(parameter, None)
                    continue
                values = self._fill(saved["state"][parameter_name], like=parameter)
                state = optimizer.state.setdefault(parameter, {})
                state.clear()
                state.update(values)

    def _restore_other(self, name: str, value: Any) -> None:
        refs: list[Ref] = []
        plain.replace_refs(self._tree[name], refs.append)
        if any(ref.shards is not None for ref in refs):
            # Only the object knows the meshes of its DTensors.
            sink = _Sink({})
            plain.encode({name: value.state_dict()}, sink.leaf)
            self._live.update((path, known.tensor) for path, known in sink.found.items())
        value.load_state_dict(self._fill(self._tree[name]))
        if isinstance(value, _loaded_type("torchdata.stateful_dataloader", "StatefulDataLoader")):
            # Its next iterator is made now, before the RNGs are set: making one draws from them.
            value.state_dict()
        if isinstance(value, torch.amp.GradScaler):
            value._per_optimizer_states.clear()  # left over from an interrupted step

    def _fill(self, value: Any, like: Tensor | None = None) -> Any:
        return plain.replace_refs(value, lambda ref: self._tensor(ref, like))

    def _tensor(self, ref: Ref, like: Tensor | None) -> Tensor:
        """What `ref` stands for: the live tensor with the saved bytes, or a new one like `like`."""
        entry = self._source.layout.by_name.get(ref.name)
        if entry is None:
            raise StateError(f"the snapshot refers to {ref.name} and has no such tensor")
        live = self._live.get(ref.name)
        if live is not None and _spec(ref.name, live) == entry.spec and _shards(live) == ref.shards:
            self._copy(ref.name, live)
            return live
        model = like if like is not None else live
        part = _local(model) if model is not None else None
        # A parameter's state is laid out in memory as the parameter is; fused kernels rely on it.
        on_model = model is not None and ref.device != "cpu"
        device = model.device if model is not None and on_model else torch.device(ref.device)
        local = torch.empty(entry.shape, dtype=_TORCH_DTYPES[entry.dtype], device=device)
        if part is not None and tuple(part.shape) == entry.shape:
            local = torch.empty_like(part, dtype=local.dtype, device=device, requires_grad=False)
        local.copy_(_over(self._source.view(entry), entry))
        return local if ref.shards is None else _sharded(local, entry, ref.shards, model)

    def _copy(self, name: str, target: Tensor) -> None:
        entry = self._source.layout.by_name[name]
        _local(target).copy_(_over(self._source.view(entry), entry))


def _check_trackable(name: str, value: object) -> None:
    if not name or "." in name or name in (OWN_NAME, "__metadata__"):
        raise ScriptError(f"an object cannot be tracked as {name!r}; use a plain word")
    fsdp1 = _loaded_type("torch.distributed.fsdp", "FullyShardedDataParallel")
    if isinstance(value, nn.Module):
        if any(isinstance(child, fsdp1) for child in value.modules()):
            raise ScriptError(
                f"{name} uses FullyShardedDataParallel; shard it with fully_shard instead"
            )
    elif not isinstance(value, Tensor | torch.Generator) and not _has_state(value):
        raise ScriptError(
            f"run.track({name}=...) got a {type(value).__name__}, which has no state_dict() and"
            " load_state_dict(); give it both, or keep it out of track and derive it from the step"
        )


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def _is_transparent(value: object) -> TypeGuard[Optimizer]:
    """Whether an optimizer's state is what it holds, with nothing of its own in between."""
    return isinstance(value, Optimizer) and type(value).state_dict is Optimizer.state_dict


def _scan_all(objects: Objects) -> dict[str, _Scan]:
    return {
        name: _scan(name, value) for name, value in objects.items() if isinstance(value, nn.Module)
    }


def _scan(name: str, module: nn.Module) -> _Scan:
    scan = _Scan([], {}, [], {})
    ddp = _loaded_type("torch.nn.parallel", "DistributedDataParallel")
    fsdp = _loaded_type("torch.distributed.fsdp", "FSDPModule")
    wrapped: list[str] = []
    for raw, child in module.named_modules(prefix=name, remove_duplicate=False):
        if isinstance(child, fsdp):
            # An evaluation leaves the root unsharded, and then its parameters are other tensors.
            child.reshard()
        if isinstance(child, ddp):
            wrapped.append(f"{raw}.module")
        path = _clean_path(f"{raw}.", wrapped)
        scan.owners[path[:-1]] = child
        for key, parameter in child._parameters.items():
            if parameter is not None:
                scan.places.append(_Held(path + key, child, key, parameter, is_buffer=False))
        for key, buffer in child._buffers.items():
            scan.places.append(_Held(path + key, child, key, buffer, is_buffer=True))
        if not child.training:
            scan.eval_paths.append(raw)
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            scan.extra[raw] = child.get_extra_state()
    return scan


def _module_values(scan: _Scan, sink: _Sink) -> dict[str, object]:
    """Hand the module's tensors to `sink`; return what is plain about it."""
    buffers: list[Ref] = []
    for held in scan.places:
        if held.tensor is not None:
            ref = sink.add(held.name, held.tensor)
            if held.is_buffer:
                buffers.append(ref)
    return {"eval": scan.eval_paths, "extra": scan.extra, "buffers": buffers}


def _clean_path(path: str, wrapped: list[str]) -> str:
    for outer in reversed(wrapped):
        if path.startswith(f"{outer}."):
            path = outer.removesuffix("module") + path[len(outer) + 1 :]
    return path.replace("._orig_mod.", ".").replace("._checkpoint_wrapped_module.", ".")


def _parameter_names(objects: Objects, scans: Mapping[str, _Scan]) -> _Names:
    """By a parameter's identity: its name inside its object, and with the object's in front."""
    names: _Names = {}
    for name, value in objects.items():
        for held in scans[name].places if name in scans else ():
            names.setdefault(id(held.tensor), (held.name[len(name) + 1 :], held.name))
        if isinstance(value, Tensor):
            names.setdefault(id(value), (name, name))
    return names


def _optimizer_names(name: str, optimizer: Optimizer, known: _Names) -> list[list[str]]:
    """Its parameters' names, by group; with the object's name in front only where needed."""
    taken: set[str] = set()
    groups: list[list[str]] = []
    for index, group in enumerate(optimizer.param_groups):
        groups.append([])
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ScriptError(
                    f"{name} updates a parameter of shape {tuple(parameter.shape)} (group {index},"
                    f" number {position}) that belongs to no tracked module; track that module too"
                )
            short, full = known[id(parameter)]
            groups[-1].append(full if short in taken else short)
            taken.add(short)
    return groups


def _optimizer_tree(name: str, optimizer: Optimizer, known: _Names) -> dict[str, object]:
    state: dict[str, object] = {}
    for group, names in zip(
        optimizer.param_groups, _optimizer_names(name, optimizer, known), strict=True
    ):
        for parameter, parameter_name in zip(group["params"], names, strict=True):
            if parameter in optimizer.state:  # looking it up would make an entry
                state[parameter_name] = optimizer.state[parameter]
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise ScriptError(
            f"{name} keeps state that belongs to no parameter; give it state_dict() of its own"
        )
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _rng_states(objects: Objects) -> dict[str, object]:
    states: dict[str, object] = {"process": plain.process_rng(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    states["generators"] = {
        n: value.get_state() for n, value in objects.items() if isinstance(value, torch.Generator)
    }
    return states


def _set_rng_states(objects: Objects, states: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        if isinstance(value, torch.Generator):
            value.set_state(states["generators"][name])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
    plain.set_process_rng(states["process"])


def _loaded_type(module: str, name: str) -> Any:
    """A class, for isinstance, of a module that may not be loaded: then it has no instances."""
    return getattr(sys.modules.get(module), name, ())


def _dtensor() -> Any:
    return _loaded_type("torch.distributed.tensor", "DTensor")


def _local(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds; it shares its storage with `tensor`."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    # Not to_local(): of a parameter that makes a view each time, and this runs at every step.
    return tensor._local_tensor if isinstance(tensor, _dtensor()) else tensor


def _still(known: _Known) -> bool:
    local = _local(known.tensor)
    return local.shape == known.spec.shape and _DTYPES.get(local.dtype) == known.spec.dtype


def _shards(tensor: Tensor) -> tuple[int, ...] | None:
    """Per mesh dimension the sharded dimension, or -1; None for a plain tensor."""
    if not isinstance(tensor, _dtensor()):
        return None
    return tuple(_REPLICATED if p.is_replicate() else int(p.dim) for p in tensor.placements)


def _sharded(local: Tensor, entry: Entry, shards: tuple[int, ...], model: Tensor | None) -> Tensor:
    """A DTensor of `local`, on the mesh of `model`. No collective is called."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(model, DTensor):
        raise StateError(
            f"{entry.name} is a DTensor in the snapshot, and here its parameter is a plain tensor"
        )
    placements = [Replicate() if dim == _REPLICATED else Shard(dim) for dim in shards]
    same = (
        _shards(model) == shards
    )  # then also what the numbers do not say, as the order of strided shards
    shape = torch.Size(entry.global_shape)
    return DTensor.from_local(
        local, model.device_mesh, model.placements if same else placements, run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    if nn.parameter.is_lazy(tensor):
        raise ScriptError(f"{name} has no shape yet; run the model once before run.track()")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        raise ScriptError(
            f"{name} is a {tensor.dtype} {tensor.layout} tensor on {tensor.device}, which stepfast"
            " cannot keep"
        )
    shape = tuple(tensor.shape)
    if not isinstance(tensor, _dtensor()):
        return TensorSpec(name, dtype, shape, shape, (0,) * len(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(p.is_partial() for p in tensor.placements):
        raise ScriptError(
            f"{name} is a DTensor of partial sums; redistribute it before run.track()"
        )
    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return TensorSpec(name, dtype, tuple(_local(tensor).shape), shape, tuple(offsets))


def _over(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A tensor over `memory`, without a copy."""
    dtype = _TORCH_DTYPES[spec.dtype]
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(spec.shape)


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} at {list(spec.offsets)} of {list(spec.global_shape)}"
