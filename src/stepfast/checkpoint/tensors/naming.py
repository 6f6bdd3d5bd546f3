"""What can be tracked, and the names of the tensors in it.

Owns: the places of a module where tensors are held, with their names; the names of an optimizer's
parameters. Does not own: the tensors' specs (`local`), what is kept of an object (`walk`).

Names: a module's tensors are `object.fqn`; an optimizer's are `optimizer.state.fqn.key` and
`optimizer.param_groups.i.key`, as PyTorch's distributed checkpoint flattens them; wrappers leave no
trace in a name. What is a rank's alone (generators, module flags, loaders' positions) has the rank
in front: `stepfast.rank-00003.rng.torch`, `stepfast.rank-00003.batches.position`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stepfast.checkpoint.tensors.flat import (
    FlatPlace,
    Piece,
    check_verified,
    flat_places,
    is_flat_parameter,
)
from stepfast.checkpoint.tensors.local import Part, loaded_type
from stepfast.errors import ScriptError

FROZEN_NAME = "frozen"  # among our own: the parameters that require no gradient
LOOP_LEFT_NAME = "loop_left"  # among our own: the loop was left at this step, before its end
OWN_NAME = "stepfast"  # of the RNG states and module flags beside the tracked objects
Objects = Mapping[str, Any]  # tracked, by the name they are tracked under
_CONTAINERS = (dict, list, OrderedDict, Counter)
_IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset)
WRAPPER_WORDS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Named(NamedTuple):
    """A parameter's name inside its object, and with the object's in front.

    `piece`: where an optimizer's state of an FSDP1 parameter has it; None for any other.
    """

    short: str
    full: str
    piece: Piece | None = None


# By a parameter's identity. There are several names where it is a flat one.
ParameterNames = Mapping[int, list[Named]]


class Held(NamedTuple):
    """A place in a module where a tensor is, or may be, held; `key` is its name there.

    `tensor` is what is kept, a part where FSDP1 holds the parameter; `flat` is then the rest.
    """

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor | Part | None
    is_buffer: bool
    flat: FlatPlace | None = None


class Scan(NamedTuple):
    """One module: its places under each of their names (tied ones appear twice), and its parts.

    `owners` has the parts by the paths that names begin with, and so without wrappers; `wrappers`
    has those, outermost first, by their own paths, with the path of what they wrap.
    """

    places: list[Held]
    owners: dict[str, nn.Module]
    wrappers: list[tuple[str, nn.Module, str]]


def check_trackable(name: str, value: object) -> None:
    """ScriptError for a name or an object that cannot be tracked."""
    if not name or "." in name or name in (OWN_NAME, "__metadata__"):
        raise ScriptError(f"an object cannot be tracked as {name!r}; use a plain word")
    if isinstance(value, nn.Module):
        check_verified(name, value)
        return
    if isinstance(value, Tensor | torch.Generator) or is_container(value):
        return
    kind = type(value).__name__
    if isinstance(value, type):
        raise ScriptError(
            f"run.track({name}=...) got the class {value.__name__}; give it an object"
        )
    if value is None or isinstance(value, _IMMUTABLE):
        raise ScriptError(
            f"run.track({name}=...) got a {kind}, which cannot be changed in place and has no"
            f" state_dict(); track a dict instead, run.track({name}={{'value': ...}}), and change"
            " what is in it"
        )
    zero = loaded_type("torch.distributed.optim", "ZeroRedundancyOptimizer")
    if isinstance(value, zero):
        raise ScriptError(
            f"{name} is a {kind}, whose state only a collective can give; shard the model with"
            " fully_shard, and its optimizer is sharded with it"
        )
    if not _has_state(value):
        raise ScriptError(
            f"run.track({name}=...) got a {kind}, which has no state_dict() and load_state_dict();"
            " give it both, or keep it out of track and derive it from the step"
        )


def is_container(value: object) -> bool:
    """Whether it is tracked as what it holds: a dict or a list, restored in place."""
    return type(value) in _CONTAINERS


def is_schedule(value: object) -> bool:
    """Whether it is one of torch's LR schedulers, whose loading updates what is in the state."""
    return isinstance(value, LRScheduler)


def is_transparent(value: object) -> TypeGuard[Optimizer]:
    """Whether an optimizer's state is what it holds, with nothing of its own in between."""
    return isinstance(value, Optimizer) and type(value).state_dict is Optimizer.state_dict


def is_per_rank(value: object) -> bool:
    """Whether an object's state is one rank's alone, as a loader's position is.

    Loaders are known by what they can do; a class says it of itself by `state_is_per_rank`.
    """
    stated = getattr(value, "state_is_per_rank", None)
    if isinstance(stated, bool):
        return stated
    shared = isinstance(value, nn.Module | Tensor | Optimizer) or is_container(value)
    return not shared and hasattr(value, "__iter__")


def private_prefixes(objects: Objects) -> tuple[str, ...]:
    """What the names begin with that are one rank's alone."""
    return (f"{OWN_NAME}.", *(f"{name}." for name, v in objects.items() if is_per_rank(v)))


def check_coupled(objects: Objects) -> None:
    """ScriptError for a schedule whose optimizer is not tracked: one without the other is wrong."""
    tracked = {id(value) for value in objects.values()}
    known = nn.Module | Optimizer | LRScheduler | torch.amp.GradScaler
    own = [v for v in objects.values() if not isinstance(v, known) and not hasattr(v, "__next__")]
    for name, value in objects.items():
        optimizer = getattr(value, "optimizer", None)
        # An object of the script's own may hold the optimizer and its state; no loader or scaler.
        if is_schedule(value) and id(optimizer) not in tracked and not any(map(_has_state, own)):
            raise ScriptError(
                f"{name} is the schedule of an optimizer that is not tracked; track that one too"
            )


def scan_all(objects: Objects) -> dict[str, Scan]:
    """The tracked modules as they are now."""
    return {
        name: _scan(name, value) for name, value in objects.items() if isinstance(value, nn.Module)
    }


def parameter_names(objects: Objects, scans: Mapping[str, Scan]) -> ParameterNames:
    """The names of all parameters that an optimizer may refer to."""
    names: dict[int, list[Named]] = {}
    for name, value in objects.items():
        for held in scans[name].places if name in scans else ():
            short, flat = held.name[len(name) + 1 :], held.flat
            if flat is None:
                names.setdefault(id(held.tensor), [Named(short, held.name)])
            elif not flat.is_shared:
                own = names.setdefault(id(flat.parameter), [])
                # One object may be tracked under two names; its first one counts.
                if all(each.full.partition(".")[0] == name for each in own):
                    own.append(Named(short, held.name, flat.in_state))
        if isinstance(value, Tensor):
            names.setdefault(id(value), [Named(name, name)])
    return names


def optimizer_names(name: str, optimizer: Optimizer, known: ParameterNames) -> list[list[str]]:
    """Its parameters' names, by group; with the object's name in front only where needed."""
    return [
        [own for _, names in group for own, _ in names]
        for group in _named_groups(name, optimizer, known)
    ]


def named_parameters(
    name: str, optimizer: Optimizer, known: ParameterNames
) -> Iterator[tuple[Tensor, list[tuple[str, Piece | None]]]]:
    """An optimizer's parameters with their names, in the order of its groups.

    One name without a piece, but for FSDP1's: there it has one, and a flat parameter has several.
    """
    for group in _named_groups(name, optimizer, known):
        yield from group


def _named_groups(
    name: str, optimizer: Optimizer, known: ParameterNames
) -> list[list[tuple[Tensor, list[tuple[str, Piece | None]]]]]:
    taken: set[str] = set()
    groups: list[list[tuple[Tensor, list[tuple[str, Piece | None]]]]] = []
    for index, group in enumerate(optimizer.param_groups):
        groups.append([])
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ScriptError(
                    f"{name} updates a parameter of shape {tuple(parameter.shape)} (group {index},"
                    f" number {position}) that belongs to no tracked module; track that module too"
                )
            names: list[tuple[str, Piece | None]] = []
            for short, full, piece in known[id(parameter)]:
                names.append((full if short in taken else short, piece))
                taken.add(short)
            groups[-1].append((parameter, names))
    return groups


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def _scan(name: str, module: nn.Module) -> Scan:
    scan = Scan([], {}, [])
    parallel = loaded_type("torch.nn.parallel", "DistributedDataParallel")
    fsdp = loaded_type("torch.distributed.fsdp", "FSDPModule")
    flat = flat_places(name, module)
    outer: list[str] = []
    raw_of: dict[str, str] = {}
    for raw, child in module.named_modules(prefix=name, remove_duplicate=False):
        if isinstance(child, fsdp):
            # An evaluation leaves the root unsharded, and then its parameters are other tensors.
            child.reshard()
        if isinstance(child, parallel):
            outer.append(f"{raw}.module")
        path = _clean_path(raw, outer)
        if path in scan.owners:
            # `named_modules` goes from the outside in: what had the path wraps this child.
            scan.wrappers.append((raw_of[path], scan.owners[path], path))
        scan.owners[path], raw_of[path] = child, raw
        scan.places.extend(_places(path, child, flat.get(child, [])))
    return scan


def _places(path: str, module: nn.Module, flat: list[FlatPlace]) -> Iterator[Held]:
    for place in flat:
        name = f"{path}.{place.key}"
        yield Held(name, module, place.key, place.kept, is_buffer=False, flat=place)
    elsewhere = {place.key for place in flat}
    for key, parameter in module._parameters.items():
        if parameter is not None and key not in elsewhere and not is_flat_parameter(parameter):
            yield Held(f"{path}.{key}", module, key, parameter, is_buffer=False)
    for key, buffer in module._buffers.items():
        yield Held(f"{path}.{key}", module, key, buffer, is_buffer=True)


def _clean_path(raw: str, outer: list[str]) -> str:
    """`raw` without the words that wrappers put in; `outer` has the paths where `module` is one."""
    path = f"{raw}."
    for wrapped in reversed(outer):
        if path.startswith(f"{wrapped}."):
            path = wrapped.removesuffix("module") + path[len(wrapped) + 1 :]
    return ".".join(word for word in path[:-1].split(".") if word not in WRAPPER_WORDS)
