"""What outlives a generation in a kept process: meshes and FSDP2 models, and how they are pointed
anew.

Owns: finding what holds on to a group; the training state inside FSDP2.
Does not own: the version check. Import it only through `torch_private`, after that check: the names
below are private and move between versions of torch.

Source of the list of states: FSDPState._reset_iter_state and FSDPParamGroup._reset_iter_state of
torch 2.13, which wait for collectives that were in flight; here they belong to groups that were
aborted, so nothing is waited for.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

# ----------------------------------------------------------------------- who holds on to a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The objects that refer to groups: meshes and FSDP2's notes can be pointed anew, strangers
    cannot.
    """

    meshes: list[DeviceMesh]
    mesh_infos: list[DataParallelMeshInfo]
    strangers: list[str]


def holders_of(held: list[ProcessGroup]) -> Holders:
    """Finds them by two passes over the garbage collector's objects: tens of milliseconds."""
    tracked = gc.get_objects()
    meshes = [found for found in tracked if issubclass(type(found), DeviceMesh)]
    mesh_infos = [found for found in tracked if issubclass(type(found), DataParallelMeshInfo)]
    known = {id(held), id(c10d._world), id(vars(c10d._world)), id(tracked)}
    known |= {id(registry) for registry in _registries()}
    for mesh in meshes:
        known |= {id(mesh._pg_registry)}
    for info in mesh_infos:
        known |= {id(info), id(vars(info))}
    del tracked
    strangers = [
        f"a {type(ref).__module__}.{type(ref).__qualname__}"
        for ref in gc.get_referrers(*held)
        if id(ref) not in known and not isinstance(ref, types.FrameType)
    ]
    return Holders(meshes=meshes, mesh_infos=mesh_infos, strangers=sorted(strangers))


def _registries() -> Iterator[object]:
    state = c10d._world
    yield from (state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config)
    yield from (state.pg_to_tag, state.pg_coalesce_state)
    yield from state.tags_to_pg.values()


# ------------------------------------------------------------------------------- a kept FSDP2 model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFlags:
    """What a training loop may switch and `build` would have left otherwise."""

    is_training: dict[nn.Module, bool]
    requires_grad: dict[nn.Parameter, bool]
    reductions: dict[FSDPParamGroup, tuple[bool, bool, bool]]


def flags_of(roots: list[nn.Module]) -> ModuleFlags:
    """The flags as they stand."""
    return ModuleFlags(
        is_training={part: part.training for root in roots for part in root.modules()},
        requires_grad={param: param.requires_grad for root in roots for param in root.parameters()},
        reductions={
            group: (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward)
            for state in _states(roots)
            for group in state._fsdp_param_groups
        },
    )


def shard_world_size(root: nn.Module) -> int:
    """Over how many ranks the model's largest group of parameters is sharded; 1 if over none."""
    groups = [group for state in _states([root]) for group in state._fsdp_param_groups]
    infos = [group.mesh_info for group in groups if isinstance(group.mesh_info, FSDPMeshInfo)]
    return max((info.shard_mesh_size for info in infos), default=1)


def model_obstacle(roots: list[nn.Module]) -> str | None:
    """Why these models cannot be kept, or None."""
    for root in roots:
        for name, part in root.named_modules():
            if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
                return (
                    f"{name or 'the model'} is {type(part).__name__}, whose reducer cannot be reset"
                )
    states = _states(roots)
    begun = [state for state in states if state._is_root is not None]
    if begun and len(begun) < len(states):
        return "the interrupt struck while FSDP2 was initialising itself in its first forward"
    for group in (group for state in states for group in state._fsdp_param_groups):
        if begun and not hasattr(group, "_reduce_dtype"):
            return "the interrupt struck while FSDP2 was initialising itself in its first forward"
        comms = (type(group._all_gather_comm), type(group._reduce_scatter_comm))
        if comms != (DefaultAllGather, DefaultReduceScatter):
            return f"{group} communicates by {comms[0].__name__}, which holds on to its group"
    return None


def reset_models(roots: list[nn.Module], flags: ModuleFlags | None) -> None:
    """Resets all training state; points every group at this generation's of the same mesh
    dimension.
    """
    for state in _states(roots):
        _reset_state(state)
        for group in state._fsdp_param_groups:
            _reset_param_group(group)
    for root in roots:
        for param in root.parameters():
            param.grad = None
    if flags is not None:
        for part, is_training in flags.is_training.items():
            part.training = is_training
        for param, requires_grad in flags.requires_grad.items():
            param.requires_grad_(requires_grad)
        for group, reductions in flags.reductions.items():
            group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward = reductions


def _states(roots: list[nn.Module]) -> list[FSDPState]:
    states: dict[int, FSDPState] = {}
    for root in roots:
        for part in root.modules():
            if isinstance(part, FSDPModule):
                state = part._get_fsdp_state()
                states[id(state)] = state
    return list(states.values())


def _reset_state(state: FSDPState) -> None:
    shared, comm = state._state_ctx, state._comm_ctx
    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
    shared.is_last_backward = True
    shared.post_optim_event = None
    if hasattr(comm, "post_forward_order"):  # only once a forward has begun
        comm.all_gather_state = None
        comm.reduce_scatter_states.clear()
        comm.post_forward_order.clear()
        comm._last_post_reduce_events.clear()


def _reset_param_group(group: FSDPParamGroup) -> None:
    for info in {id(info): info for info in _mesh_infos(group)}.values():
        _point_mesh_info(info)
    group._training_state = TrainingState.IDLE
    group._post_forward_indices.clear()
    group._all_gather_result = None
    group._all_reduce_state = None
    group._partial_reduce_output = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    for param in group.fsdp_params:
        # Each one, whatever the group says: the interrupt may have struck half-way through them.
        param.to_sharded()
        param.unsharded_accumulated_grad = None
        param.grad_offload_event = None
        param.sharded_param.grad = None
        param._sharded_post_forward_param = param._sharded_post_forward_param_data = None
        if hasattr(param, "_unsharded_param"):
            param._unsharded_param.grad = None
    group._sharded_state = ShardedState.SHARDED


def _mesh_infos(group: FSDPParamGroup) -> Iterator[DataParallelMeshInfo]:
    yield group.mesh_info
    if group.post_forward_mesh_info is not None:
        yield group.post_forward_mesh_info
    for param in group.fsdp_params:
        yield param.mesh_info
        if param.post_forward_mesh_info is not None:
            yield param.post_forward_mesh_info


def _point_mesh_info(info: DataParallelMeshInfo) -> None:
    if isinstance(info, FSDPMeshInfo):
        info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        # A group of its own comes from set_separate_reduce_scatter_group, which a loop calls anew.
        info.reduce_scatter_process_group = None
    if isinstance(info, DDPMeshInfo):
        info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)
