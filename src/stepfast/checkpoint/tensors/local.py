"""One tensor as this rank holds it: its local part, what it is a part of, tensors over memory.

Owns: which tensors can be kept, their specs, DTensors made of local parts. Does not own: names
(`naming`), which tensors there are (`walk`).

Invariants: no collective is called, and nothing here copies a tensor. What a DTensor is, is read
from the tensor whenever it is asked for; only arithmetic is remembered.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepfast.checkpoint.layout import Entry, TensorSpec
from stepfast.checkpoint.plain import Ref
from stepfast.errors import ScriptError, StateError

_REPLICATED = -1
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.int64: "I64", torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # shape and offsets


class _Place(NamedTuple):
    """Which part of a DTensor this rank holds: all that its offsets follow from, but its shape."""

    mesh: Any
    placements: tuple[Any, ...]
    coordinate: Any  # a list or a tuple, by torch's version; None outside of the mesh


class Part(NamedTuple):
    """A run of the flattened elements of a tensor of `whole_shape`, from `start` on.

    Or, where `start` is None, all of them, in their own shape.
    """

    tensor: Tensor
    whole_shape: tuple[int, ...]
    start: int | None


class Known(NamedTuple):
    """What is known of a tensor; good while `is_good`."""

    tensor: Tensor
    local: Tensor
    place: _Place | None
    ref: Ref
    spec: TensorSpec

    def is_good(self, tensor: Tensor | Part) -> bool:
        """Whether all of it is true of `tensor` now."""
        if type(tensor) is Part:
            return self._is_part(tensor)
        if tensor is not self.tensor:
            return False
        local, spec = self.local, self.spec
        if self.place is not None and not self._is_at(self.place, tensor):
            return False
        return (
            local.shape == spec.shape
            and _DTYPES.get(local.dtype) == spec.dtype
            and local.device.type == self.ref.device
        )

    def _is_part(self, part: Part) -> bool:
        # Not by identity: parts are cut anew each time. What has their memory is the same part.
        tensor, spec = part.tensor, self.spec
        if part.start is None:
            is_same_run = spec.original_shape is None
        else:
            is_same_run = spec.original_shape == part.whole_shape and spec.offsets == (part.start,)
        return (
            is_same_run
            and tensor.shape == spec.shape
            and tensor.dtype == self.local.dtype
            and tensor.data_ptr() == self.local.data_ptr()
            and tensor.device.type == self.ref.device
        )

    def _is_at(self, place: _Place, dtensor: Any) -> bool:
        # Field by field and without a _Place of its own: it is asked of each tensor at every step.
        return (
            dtensor._local_tensor is self.local
            and dtensor.device_mesh is place.mesh
            and dtensor.placements == place.placements
            and place.mesh.get_coordinate() == place.coordinate
            and dtensor.shape == self.spec.global_shape
        )


class Inspector:
    """Says what a tensor is. Remembers where parts begin: the same few shapes come again."""

    def __init__(self) -> None:
        self._parts: dict[object, _Box | None] = {}

    def known(self, name: str, tensor: Tensor | Part) -> Known:
        """What is to be known of `tensor` under `name`; ScriptError where it cannot be kept."""
        if isinstance(tensor, Part):
            return self._known_part(name, tensor)
        spec = self._spec(name, tensor)
        ref = Ref(name, tensor.device.type, shards_of(tensor))
        return Known(tensor, local_of(tensor), _place_of(tensor), ref, spec)

    def _known_part(self, name: str, part: Part) -> Known:
        whole = self.known(name, part.tensor)
        if part.start is None:
            return whole
        spec = TensorSpec(
            name, whole.spec.dtype, whole.spec.shape, (math.prod(part.whole_shape),), (part.start,),
            original_shape=part.whole_shape,
        )  # fmt: skip
        return whole._replace(spec=spec)

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        if nn.parameter.is_lazy(tensor):
            raise ScriptError(f"{name} has no shape yet; run the model once before run.track()")
        dtype, kept = _DTYPES.get(tensor.dtype), tensor.layout is torch.strided
        if dtype is None or tensor.is_meta or not kept or tensor.is_nested:
            raise ScriptError(
                f"{name} is a {tensor.dtype} {tensor.layout} tensor on {tensor.device}, which"
                " stepfast cannot keep"
            )
        shape, place = tuple(tensor.shape), _place_of(tensor)
        if place is None:
            return TensorSpec(name, dtype, shape, shape, (0,) * len(shape))
        if any(p.is_partial() for p in place.placements):
            raise ScriptError(
                f"{name} is a DTensor of partial sums; redistribute it before run.track()"
            )
        local_shape = tuple(local_of(tensor).shape)
        if place.coordinate is None:  # a rank outside of the mesh, which holds nothing
            return TensorSpec(name, dtype, local_shape, shape, ())
        part = self._part_of(shape, place)
        if part is None or part[0] != local_shape:
            raise ScriptError(
                f"{name} is a DTensor with {list(local_shape)} of {list(shape)} on this rank,"
                f" placed as {place.placements}; which part that is cannot be told:"
                " redistribute it before run.track()"
            )
        return TensorSpec(name, dtype, local_shape, shape, part[1])

    def _part_of(self, shape: tuple[int, ...], place: _Place) -> _Box | None:
        """Shape and offsets of the part at a place in a mesh; None if it is not in one piece."""
        # By the mesh's shape: a mesh as a key would outlive its generation.
        key = (shape, place.mesh.shape, place.placements, tuple(place.coordinate))
        if key not in self._parts:
            self._parts[key] = _part_of(shape, place)
        return self._parts[key]


def _part_of(shape: tuple[int, ...], place: _Place) -> _Box | None:
    # Not torch's own function: what FSDP2 cuts out of what tensor parallelism has cut, it places
    # wrongly where the sizes are uneven (torch 2.13). Such a cut is a strided one, and comes last.
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(place.placements):
        if not placement.is_replicate():
            (strided if hasattr(placement, "split_factor") else plain).append(mesh_dim)
    size, offsets, cuts = list(shape), [0] * len(shape), [1] * len(shape)
    for mesh_dim in (*plain, *reversed(strided)):
        placement = place.placements[mesh_dim]
        dim = placement.dim
        if mesh_dim in strided and placement.split_factor != cuts[dim]:
            return None  # it is no cut of a cut, but every so many rows
        cuts[dim] *= place.mesh.shape[mesh_dim]
        step = -(-size[dim] // place.mesh.shape[mesh_dim])
        first = min(step * place.coordinate[mesh_dim], size[dim])
        offsets[dim] += first
        size[dim] = min(step, size[dim] - first)
    # An empty part lies behind the end, where no other part begins.
    ends = zip(size, offsets, shape, strict=True)
    return tuple(size), tuple(offset if count else whole for count, offset, whole in ends)


def loaded_type(module: str, name: str) -> Any:
    """A class, for isinstance, of a module that may not be loaded: then it has no instances."""
    return getattr(sys.modules.get(module), name, ())


def local_of(tensor: Tensor | Part) -> Tensor:
    """The tensor that this rank holds; it shares its storage with `tensor`."""
    if type(tensor) is Part:
        return tensor.tensor
    assert isinstance(tensor, Tensor)
    # Not to_local(): of a parameter that makes a view each time, and this runs at every step.
    dtensor = _as_dtensor(tensor)
    local: Tensor = tensor if dtensor is None else dtensor._local_tensor
    return local


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory, so that nothing is copied into it.

    Those that torch itself tells at once: what `expand` makes.
    """
    if tensor.layout is not torch.strided:
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def check_writable(name: str, tensor: Tensor | Part) -> None:
    """ScriptError for a tensor that is kept in its place and cannot be restored there."""
    if is_expanded(local_of(tensor)):
        raise ScriptError(
            f"{name} is an expanded tensor, which no value can be restored into: several of its"
            " elements are one place in memory; put its .contiguous() in its place before"
            " run.track()"
        )


def shards_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Per mesh dimension the sharded dimension, or -1; None for a plain tensor."""
    place = _place_of(tensor)
    if place is None:
        return None
    return tuple(_REPLICATED if p.is_replicate() else int(p.dim) for p in place.placements)


def over(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A tensor over `memory`, without a copy."""
    dtype = _TORCH_DTYPES[spec.dtype]
    if spec.size_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(spec.shape)


def empty_like_saved(entry: Entry, ref: Ref, model: Tensor | None) -> Tensor:
    """A local tensor of `entry`'s dtype and shape, where and as `model` is, if there is one.

    A parameter's state is laid out in memory as the parameter is; fused kernels rely on it.
    """
    on_model = model is not None and ref.device != "cpu"
    device = model.device if model is not None and on_model else torch.device(ref.device)
    dtype, part = _TORCH_DTYPES[entry.dtype], None if model is None else local_of(model)
    if part is not None and tuple(part.shape) == entry.shape:
        return torch.empty_like(part, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype, device=device)


def sharded(local: Tensor, entry: Entry, shards: tuple[int, ...], model: Tensor | None) -> Tensor:
    """A DTensor of `local`, on the mesh of `model`. No collective is called."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(model, DTensor):
        raise StateError(
            f"{entry.name} is a DTensor in the snapshot, and here its parameter is a plain tensor"
        )
    placements = [Replicate() if dim == _REPLICATED else Shard(dim) for dim in shards]
    # Then also what the numbers do not say, as the order of strided shards.
    same = shards_of(model) == shards
    shape = torch.Size(entry.global_shape)
    return DTensor.from_local(
        local, model.device_mesh, model.placements if same else placements, run_check=False,
        shape=shape, stride=torch.empty(shape, device="meta").stride(),
    )  # fmt: skip


def words(spec: TensorSpec) -> str:
    """A spec as a message shows it."""
    return f"{spec.dtype} {list(spec.shape)} at {list(spec.offsets)} of {list(spec.global_shape)}"


def _as_dtensor(tensor: Tensor) -> Any:
    """The same tensor, if it is a DTensor; else None."""
    if type(tensor) in (Tensor, nn.Parameter):
        return None
    is_one = isinstance(tensor, loaded_type("torch.distributed.tensor", "DTensor"))
    return tensor if is_one else None


def _place_of(tensor: Tensor) -> _Place | None:
    """None for a plain tensor."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return None
    mesh = dtensor.device_mesh
    return _Place(mesh, dtensor.placements, mesh.get_coordinate())
