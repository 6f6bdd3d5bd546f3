"""What can be tracked, and the names of the tensors in it.

Owns: the places of a module where tensors are held, with their names; the names of an optimizer's
parameters. Does not own: the tensors' specs (`local`), what is kept of an object (`walk`).

Names: a module's tensors are `object.fqn`; an optimizer's are `optimizer.state.fqn.key` and
`optimizer.param_groups.i.key`, as PyTorch's distributed checkpoint flattens them; wrappers leave no
trace in a name. What is a rank's alone (generators, module flags, loaders' positions) has the rank
in front: `stepfast.rank-00003.rng.torch`, `stepfast.rank-00003.batches.position`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stepfast.checkpoint.tensors.local import loaded_type
from stepfast.errors import ScriptError

OWN_NAME = "stepfast"  # of the RNG states and module flags beside the tracked objects
Objects = Mapping[str, Any]  # tracked, by the name they are tracked under
# By a parameter's identity: its name inside its object, and with the object's in front.
ParameterNames = Mapping[int, tuple[str, str]]


class Held(NamedTuple):
    """A place in a module where a tensor is, or may be, held; `key` is its name there."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor | None
    is_buffer: bool


class Scan(NamedTuple):
    """One module: its places under each of their names (tied ones appear twice), and its parts.

    `owners` has the parts by the paths that names begin with, `parts` with the wrappers' own paths.
    """

    places: list[Held]
    owners: dict[str, nn.Module]
    parts: list[tuple[str, nn.Module]]


def check_trackable(name: str, value: object) -> None:
    """ScriptError for a name or an object that cannot be tracked."""
    if not name or "." in name or name in (OWN_NAME, "__metadata__"):
        raise ScriptError(f"an object cannot be tracked as {name!r}; use a plain word")
    fsdp1 = loaded_type("torch.distributed.fsdp", "FullyShardedDataParallel")
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
    shared = isinstance(value, nn.Module | Tensor | Optimizer)
    return not shared and hasattr(value, "__iter__")


def private_prefixes(objects: Objects) -> tuple[str, ...]:
    """What the names begin with that are one rank's alone."""
    return (f"{OWN_NAME}.", *(f"{name}." for name, v in objects.items() if is_per_rank(v)))


def scan_all(objects: Objects) -> dict[str, Scan]:
    """The tracked modules as they are now."""
    return {
        name: _scan(name, value) for name, value in objects.items() if isinstance(value, nn.Module)
    }


def parameter_names(objects: Objects, scans: Mapping[str, Scan]) -> ParameterNames:
    """The names of all parameters that an optimizer may refer to."""
    names: dict[int, tuple[str, str]] = {}
    for name, value in objects.items():
        for held in scans[name].places if name in scans else ():
            names.setdefault(id(held.tensor), (held.name[len(name) + 1 :], held.name))
        if isinstance(value, Tensor):
            names.setdefault(id(value), (name, name))
    return names


def optimizer_names(name: str, optimizer: Optimizer, known: ParameterNames) -> list[list[str]]:
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


def named_parameters(
    name: str, optimizer: Optimizer, known: ParameterNames
) -> Iterator[tuple[Tensor, str]]:
    """An optimizer's parameters with their names, in the order of its groups."""
    for group, names in zip(
        optimizer.param_groups, optimizer_names(name, optimizer, known), strict=True
    ):
        yield from zip(group["params"], names, strict=True)


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


def _scan(name: str, module: nn.Module) -> Scan:
    scan = Scan([], {}, [])
    ddp = loaded_type("torch.nn.parallel", "DistributedDataParallel")
    fsdp = loaded_type("torch.distributed.fsdp", "FSDPModule")
    wrapped: list[str] = []
    for raw, child in module.named_modules(prefix=name, remove_duplicate=False):
        if isinstance(child, fsdp):
            # An evaluation leaves the root unsharded, and then its parameters are other tensors.
            child.reshard()
        if isinstance(child, ddp):
            wrapped.append(f"{raw}.module")
        path = _clean_path(f"{raw}.", wrapped)
        scan.owners[path[:-1]] = child
        scan.parts.append((raw, child))
        for key, parameter in child._parameters.items():
            if parameter is not None:
                scan.places.append(Held(path + key, child, key, parameter, is_buffer=False))
        for key, buffer in child._buffers.items():
            scan.places.append(Held(path + key, child, key, buffer, is_buffer=True))
    return scan


def _clean_path(path: str, wrapped: list[str]) -> str:
    for outer in reversed(wrapped):
        if path.startswith(f"{outer}."):
            path = outer.removesuffix("module") + path[len(outer) + 1 :]
    return path.replace("._orig_mod.", ".").replace("._checkpoint_wrapped_module.", ".")
