"""FSDP1's flat parameters: which run of which original parameter this rank holds, and where.

Owns: the private names of `FullyShardedDataParallel` that say so; optimizer state cut along the
original parameters and put together again. Does not own: names (`naming`), specs (`local`).

Invariants:
- No collective is called: this is FSDP1's LOCAL_STATE_DICT, without its gathering of metadata.
- Padding is never kept. What is kept is named, shaped and placed as the original parameters are, so
  with `use_orig_params` and without the same entries come out.
- On a version of torch that is not listed FSDP1 is refused; nothing is guessed.

Source of the fields: FlatParameter and FlatParamHandle of torch 2.13. They are not documented for
others' use; whoever lists another version compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepfast.checkpoint.plain import Ref
from stepfast.checkpoint.tensors.local import Part, loaded_type
from stepfast.errors import ScriptError, StateError

TORCH_VERSIONS_VERIFIED = ("2.13",)


class Piece(NamedTuple):
    """Where a run of an original parameter's flattened elements lies in a local flat tensor.

    `start` counts in the original, `offset` in the flat tensor. `is_whole`: the parameter is not
    sharded, so it is kept in its own shape.
    """

    shape: tuple[int, ...]
    start: int
    offset: int
    size: int
    is_whole: bool

    def of(self, flat: Tensor) -> Part:
        """The piece of `flat`, sharing its memory."""
        cut = flat[self.offset : self.offset + self.size]
        if self.is_whole:
            return Part(cut.view(self.shape), self.shape, None)
        return Part(cut, self.shape, self.start)


class FlatPlace(NamedTuple):
    """One original parameter in its module: what is kept of it, and how its optimizer has it.

    `parameter` is what an optimizer was given: the original with `use_orig_params`, else the flat
    one. `in_state` is the piece in the optimizer's tensors; None where those are ordinary ones.
    """

    key: str
    kept: Part
    parameter: Tensor
    in_state: Piece | None
    is_shared: bool  # a second name of a parameter that has another place


# By module: the parameters that FSDP1 took out of it.
FlatPlaces = Mapping[nn.Module, list[FlatPlace]]


def check_verified(name: str, module: nn.Module) -> None:
    """ScriptError where the model uses FSDP1 and this torch's FSDP1 is not known."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TORCH_VERSIONS_VERIFIED and any(_handles(module)):
        verified = ", ".join(TORCH_VERSIONS_VERIFIED)
        raise ScriptError(
            f"{name} uses FullyShardedDataParallel, which stepfast knows of torch {verified} only,"
            f" and this is {torch.__version__}; shard it with fully_shard instead"
        )


def flat_places(name: str, module: nn.Module) -> FlatPlaces:
    """The places of all original parameters that FSDP1 holds; brings them into sharded form.

    ScriptError for a parameter whose elements cannot be told apart by their flattened order.
    """
    places: dict[nn.Module, list[FlatPlace]] = {}
    for handle in _handles(module):
        _reshard(handle)
        first: dict[tuple[nn.Module, str], FlatPlace] = {}
        for place, owner in _places_of(name, handle):
            first[owner, place.key] = place
            places.setdefault(owner, []).append(place)
        for shared in handle.flat_param._shared_param_infos:
            origin = first[shared.prim_module, shared.prim_param_name]
            alias = origin._replace(key=shared.param_name, is_shared=True)
            places.setdefault(shared.module, []).append(alias)
    return places


def is_flat_parameter(parameter: object) -> bool:
    """Whether it is FSDP1's own, rather than one of the model's."""
    return isinstance(parameter, loaded_type("torch.distributed.fsdp._flat_param", "FlatParameter"))


def drop_gradients(module: nn.Module) -> None:
    """As `parameter.grad = None` for each, where FSDP1 keeps gradients besides."""
    for handle in _handles(module):
        flat = handle.flat_param
        for parameter in (flat, *(flat._params or ())):
            parameter.grad = None
        if hasattr(flat, "_saved_grad_shard"):
            del flat._saved_grad_shard


# --------------------------------------------------------------------------- an optimizer's state

# What a Ref stands for: the snapshot's bytes, and whether they are a piece of a flat tensor.
SourceOf = Callable[[Ref], tuple[Tensor, bool]]
PlanCopy = Callable[[Tensor, Tensor], None]  # target, source


def cut_state(name: str, values: Mapping[str, Any], parameter: Tensor, piece: Piece) -> Any:
    """The state that `values`, of `parameter`, has for one original parameter.

    Tensors of the parameter's shape are cut, single numbers belong to each piece; ScriptError for
    anything in between.
    """
    cut: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            cut[key] = piece.of(value)
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise ScriptError(
                f"{name} keeps {key} of shape {tuple(value.shape)} for a flat parameter of shape"
                f" {tuple(parameter.shape)}, which cannot be cut along its parameters; use"
                " fully_shard, or another optimizer"
            )
        else:
            cut[key] = value
    return cut


def join_state(
    name: str,
    parameter: Tensor,
    pieces: Sequence[tuple[Piece, Mapping[str, Any] | None]],
    before: Mapping[str, Any],
    source_of: SourceOf,
    plan_copy: PlanCopy,
) -> dict[str, Any]:
    """The state of `parameter` out of what was saved for the originals in it; copies are planned.

    Tensors in `before` are used again where they fit. StateError where an original has no state,
    or where their single numbers differ: a flat parameter has one state for all.
    """
    saved = [values for _, values in pieces if values is not None]
    if len(saved) != len(pieces) or any(values.keys() != saved[0].keys() for values in saved):
        raise StateError(f"{name}: the snapshot has state for only a part of it; {_REMEDY}")
    joined: dict[str, Any] = {}
    for key, value in saved[0].items():
        source, is_flattened = source_of(value) if isinstance(value, Ref) else (None, False)
        if source is not None and (is_flattened or (pieces[0][0].is_whole and source.ndim > 0)):
            joined[key] = flat = _flat_like(parameter, source.dtype, before.get(key))
            for (piece, _), values in zip(pieces, saved, strict=True):
                _plan_piece(
                    f"{name}.{key}", piece.of(flat).tensor, values[key], source_of, plan_copy
                )
            continue
        numbers = [_number(values[key], source_of) for values in saved]
        if any(number != numbers[0] for number in numbers):
            several = sorted(set(map(str, numbers)))[:3]
            raise StateError(f"{name} has one {key}, the snapshot has {several} for it; {_REMEDY}")
        joined[key] = value
    return joined


_REMEDY = "build the model with use_orig_params=True"


def _plan_piece(
    name: str, target: Tensor, saved: object, source_of: SourceOf, plan_copy: PlanCopy
) -> None:
    source = source_of(saved)[0] if isinstance(saved, Ref) else None
    if source is None or source.shape != target.shape or source.dtype != target.dtype:
        what = "none" if source is None else f"{source.dtype} {list(source.shape)}"
        raise StateError(
            f"{name} is {target.dtype} {list(target.shape)} here and {what} in the snapshot"
        )
    plan_copy(target, source)


def _flat_like(parameter: Tensor, dtype: torch.dtype, before: object) -> Tensor:
    if isinstance(before, Tensor) and before.shape == parameter.shape and before.dtype == dtype:
        return before
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _number(value: object, source_of: SourceOf) -> object:
    return source_of(value)[0].item() if isinstance(value, Ref) else value


# ------------------------------------------------------------------------------- torch's own names


def _handles(module: nn.Module) -> Iterator[Any]:
    fsdp1 = loaded_type("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp1 == ():
        return
    for child in module.modules():
        if isinstance(child, fsdp1) and child._handle is not None:
            yield child._handle


def _reshard(handle: Any) -> None:
    """An evaluation leaves the root unsharded; its next forward would use what is there."""
    began = hasattr(handle.flat_param, "_local_shard")  # there is one from the first forward on
    if began and handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(free_unsharded_flat_param=True)
        handle.post_reshard()
        handle._prefetched = False


def _places_of(name: str, handle: Any) -> Iterator[tuple[FlatPlace, nn.Module]]:
    flat = handle.flat_param
    # `_local_shard` appears with the first forward; until then the parameter is its shard.
    local = getattr(flat, "_local_shard", flat).detach()
    is_whole, has_originals = not handle.uses_sharded_strategy, flat._params is not None
    for index, (key, owner, _) in enumerate(flat._param_infos):
        if flat._param_extensions[index] is not None or not flat._contiguities[index]:
            raise ScriptError(
                f"{name} gives FullyShardedDataParallel {flat._fqns[index]}, which is a DTensor or"
                " not contiguous; shard the model with fully_shard instead"
            )
        piece = _piece(flat, index, is_whole)
        parameter = flat._params[index] if has_originals else flat
        in_state: Piece | None = piece
        if has_originals:
            in_state = None if is_whole else piece._replace(offset=0)
        yield FlatPlace(key, piece.of(local), parameter, in_state, is_shared=False), owner


def _piece(flat: Any, index: int, is_whole: bool) -> Piece:
    shape, run = tuple(flat._shapes[index]), flat._shard_param_infos[index]
    if not run.in_shard:  # nothing of it is here; placed behind the end, as fully_shard has it
        return Piece(shape, math.prod(shape), 0, 0, is_whole)
    start, offset, size = run.intra_param_start_idx, run.offset_in_shard, run.numel_in_shard
    return Piece(shape, start, offset, size, is_whole)
