"""The door to private names of torch; `torch_kept` behind it has those that only verified versions have.

Owns: torch.distributed's registries of groups, the thread's modes, the verified versions.
Does not own: when any of this happens (`train.groups`, the wrapper).

Invariant: on a version that is not listed no model and no group is kept: building again uses public
names alone. What this file itself touches exists since torch 2.8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import signal_handling
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from stepfast.errors import OperatingError

if TYPE_CHECKING:
    from stepfast.train.torch_kept import Holders, ModuleFlags

TORCH_VERSIONS_VERIFIED = ("2.13",)
_HASHED_NAME_CHARACTERS = 40  # a SHA-1 in hex: groups made with use_local_synchronization


def version_obstacle() -> str | None:
    """Why nothing may be kept under this torch, or None."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version in TORCH_VERSIONS_VERIFIED:
        return None
    verified = ", ".join(TORCH_VERSIONS_VERIFIED)
    return f"keeping models is verified for torch {verified} only, this is {torch.__version__}"


# ------------------------------------------------------------------------------- registries of groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """What made a group, as far as it is needed to make its successor under the same name."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    tag: str | None
    description: str

    @property
    def is_local(self) -> bool:
        """Whether only the group's members made the call; such a name does not count calls."""
        return len(self.name) == _HASHED_NAME_CHARACTERS


def world() -> ProcessGroup | None:
    """The default group, or None."""
    return c10d.GroupMember.WORLD


def groups() -> list[ProcessGroup]:
    """All groups that this rank is a member of, the world first. From any thread."""
    return list(c10d._world.pg_names)


def group_names() -> set[str]:
    """The names of all groups that this rank is a member of."""
    return set(c10d._world.pg_names.values())


def group_count() -> int:
    """How many names `new_group` has counted in this generation, calls without this rank included."""
    return int(c10d._world.group_count)


def sequence_number(group: ProcessGroup) -> int:
    """How many operations this rank has started in the group; 0 once it is shut down. From any thread."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # not in the stub
    except RuntimeError:
        return 0


def call_of(group: ProcessGroup) -> GroupCall | str:
    """What makes this group again; or, in words, why that cannot be."""
    name = str(c10d._world.pg_names[group])
    backend = group._get_backend(torch.device("cpu"))
    if not isinstance(backend, c10d.ProcessGroupGloo):
        return f"group {name} is not Gloo's alone: making it again has not been verified"
    tag = c10d._world.pg_to_tag.get(group, "")
    return GroupCall(
        name=name,
        ranks=tuple(c10d._world.pg_group_ranks[group]),
        backend=c10d._world.pg_map[group][0],
        timeout=backend.options._timeout,
        tag=tag.removeprefix("user:") if tag.startswith("user:") else None,
        description=group.group_desc,
    )


def make_group(call: GroupCall) -> None:
    """Makes the group again; a name other than before means that the generations' calls have drifted apart."""
    made = c10d._new_group_with_tag(
        ranks=list(call.ranks),
        timeout=call.timeout,
        backend=call.backend,
        pg_tag=call.tag,
        use_local_synchronization=call.is_local,
        group_desc=call.description,
        sort_ranks=False,
    )
    if made.group_name != call.name:
        raise OperatingError(f"group {call.name} came back as {made.group_name}: build again")


def make_group_without(rank: int) -> None:
    """Takes part in a `new_group` call that `rank`, this process, is no member of."""
    c10d._new_group_with_tag(ranks=[0 if rank else 1])


def destroy_world() -> None:
    """Destroys every group and empties the registries, those of a half-formed world too."""
    if world() is not None:
        c10d.destroy_process_group()
    state = c10d._world
    for registry in (state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config):
        registry.clear()
    state.pg_to_tag.clear()
    state.tags_to_pg.clear()
    state.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()
    c10d._update_default_pg(None)
    state.group_count = 0
    # Each init_process_group wraps sys.excepthook once more and never takes its wrapper off.
    while getattr(sys.excepthook, "__qualname__", "").startswith("init_process_group."):
        sys.excepthook = _wrapped_hook(sys.excepthook)


def _wrapped_hook(hook: Any) -> Any:
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    return cells["old_hook"].cell_contents


def abort_device_groups() -> int:
    """Aborts all NCCL groups at once, from the monitor thread; returns how many. Never run: needs a GPU."""
    aborted = [group for group in groups() if "nccl" in str(c10d._world.pg_map.get(group, ""))]
    if not aborted:
        return 0
    # Grouped, or communicators that depend on each other wait for each other's abort.
    backend: Any = aborted[0]._get_backend(torch.device("cuda"))
    backend._group_start()
    for group in aborted:
        group.abort()
    backend._group_end()
    return len(aborted)


# ------------------------------------------------------------------------- what is kept


def holders_of(held: list[ProcessGroup]) -> Holders:
    """The objects that refer to these groups, torch's registries left out; only in a verified torch."""
    from stepfast.train import torch_kept

    return torch_kept.holders_of(held)


def names_on(mesh: DeviceMesh) -> tuple[str, ...]:
    """The groups that the mesh keeps as objects, by name."""
    return tuple(mesh._pg_registry)


def point_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Lets the mesh keep this generation's groups of these names, and no other; () detaches it."""
    mesh._pg_registry.clear()
    for name in names:
        mesh._pg_registry[name] = c10d._resolve_process_group(c10d.GroupName(name))


def detach_mesh_info(info: object) -> None:
    """Takes the groups from FSDP2's note of a mesh; `reset_after_interrupt` puts the new ones in."""
    for name in ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group"):
        if hasattr(info, name):
            setattr(info, name, None)


def keep_obstacle(modules: Iterable[nn.Module]) -> str | None:
    """Why these models cannot be kept across an interrupt, or None.

    Ask after `build`, so that it is known early, and at the interrupt, which may strike anywhere.
    """
    if (obstacle := version_obstacle()) is not None:
        return obstacle
    from stepfast.train import torch_kept  # its imports exist in verified versions only

    return torch_kept.model_obstacle(list(modules))


def module_flags(modules: Iterable[nn.Module]) -> ModuleFlags:
    """What a training loop may switch, as it stands; take it right after `build`."""
    from stepfast.train import torch_kept

    return torch_kept.flags_of(list(modules))


def reset_after_interrupt(modules: Iterable[nn.Module], flags: ModuleFlags | None = None) -> None:
    """Brings kept models to where `build` left them, but for the values of parameters and buffers.

    Call it after the groups were made again, and only where `keep_obstacle` saw nothing. Nothing is
    waited for: what was in flight belongs to groups that are gone.
    """
    from stepfast.train import torch_kept

    torch_kept.reset_models(list(modules), flags)


def forget_old_meshes() -> None:
    """Empties DTensor's caches: they hand out older generations' meshes, which equal new ones."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def end_loader_workers(iterator: object) -> None:
    """Kills the workers of a DataLoader's iterator, whatever they wait for.

    torch's SIGCHLD handler raises in the main thread for a worker that it knows, so it must not know
    them any more.
    """
    workers = list(getattr(iterator, "_workers", ()))
    if not workers:
        return
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # type: ignore[attr-defined]  # seen on the line above
    iterator._shutdown = True  # type: ignore[attr-defined]  # or its finaliser would wait for them
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(timeout=1.0)


# ------------------------------------------------------------------------------ the thread's modes


def reset_modes() -> None:
    """Switches gradients on, autocast off and empties this thread's mode stacks; call it on the user's thread.

    `with` blocks undo themselves while the stack unwinds; this is for one whose exit was itself interrupted. The
    default device stays: `torch.set_default_device` is a setting, kept as a mode.

    Raises OperatingError if inference mode stayed on: only a fresh process is rid of it.
    """
    if torch.is_inference_mode_enabled():
        raise OperatingError("inference mode stayed switched on: this process has to be replaced")
    torch.set_grad_enabled(True)
    for device_type in ("cpu", "cuda"):
        torch.set_autocast_enabled(device_type, False)
    torch.autocast_increment_nesting()  # so that the count ends at zero, not below
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()
    _empty_function_modes()
    while _python_dispatch._get_current_dispatch_mode_stack():
        _python_dispatch._pop_mode()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    _mesh_resources.mesh_stack.clear()


def _empty_function_modes() -> None:
    kept: list[Any] = []
    while torch._C._len_torch_function_stack() > 0:
        mode = torch._C._pop_torch_function_stack()
        if isinstance(mode, DeviceContext):
            kept.append(mode)
    for mode in reversed(kept):
        torch._C._push_on_torch_function_stack(mode)
