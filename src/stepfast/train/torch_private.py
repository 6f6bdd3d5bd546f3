"""The door to private names of torch: the verified versions, kept models, the thread's modes.

Owns: which versions of torch are verified; what the other two files behind this door must not do on
others. `torch_groups` has the registries of groups, `torch_kept` what verified versions alone have.
Does not own: when any of this happens (`train.groups`, the wrapper).

Invariant: on a version that is not listed no model and no group is kept: building again uses public
names alone. What this file and `torch_groups` touch exists since torch 2.8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import _mesh_resources
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils.data._utils import signal_handling

from stepfast.errors import OperatingError

if TYPE_CHECKING:
    from stepfast.train.torch_kept import ModuleFlags

TORCH_VERSIONS_VERIFIED = ("2.13",)


def version_obstacle() -> str | None:
    """Why nothing may be kept under this torch, or None."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version in TORCH_VERSIONS_VERIFIED:
        return None
    verified = ", ".join(TORCH_VERSIONS_VERIFIED)
    return f"keeping models is verified for torch {verified} only, this is {torch.__version__}"


# ------------------------------------------------------------------------------- what is kept


def keep_obstacle(modules: Iterable[nn.Module]) -> str | None:
    """Why these models cannot be kept across an interrupt, or None.

    Ask after `build`, so that it is known early, and at the interrupt, which may strike anywhere.
    """
    if (obstacle := version_obstacle()) is not None:
        return obstacle
    from stepfast.train import torch_kept  # its imports exist in verified versions only

    return torch_kept.model_obstacle(list(modules))


def spans_world(modules: Iterable[nn.Module], world_size: int) -> bool:
    """Whether a forward of one of these waits for every rank: FSDP2 over one dimension of all."""
    if version_obstacle() is not None:
        return False
    from stepfast.train import torch_kept

    return any(torch_kept.shard_world_size(module) == world_size for module in modules)


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


def is_in_backward() -> bool:
    """Whether this thread runs inside of a backward; False where torch does not say."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def forget_old_meshes() -> None:
    """Empties DTensor's caches: they hand out older generations' meshes, which equal new ones."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
        return
    # Until torch 2.10 nothing empties both; the second cache, of compiled code, came with 2.10.
    clear_compiled = getattr(debug, "_clear_fast_path_sharding_prop_cache", None)
    if clear_compiled is not None:
        clear_compiled()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()


def end_loader_workers(iterator: object) -> None:
    """Kills the workers of a DataLoader's iterator, whatever they wait for.

    torch's SIGCHLD handler raises in the main thread for a worker that it knows, so it must not
    know them any more.
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
    """Switches gradients on, autocast off and empties this thread's mode stacks; call it on the
    user's thread.

    `with` blocks undo themselves while the stack unwinds; this is for one whose exit was itself
    interrupted. The default device stays: `torch.set_default_device` is a setting, kept as a mode.

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
    _empty_dispatch_modes()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    _mesh_resources.mesh_stack.clear()


def _empty_dispatch_modes() -> None:
    # Held until all are off: torch 2.8 frees a mode that nothing but its stack holds before it
    # hands it out, and the process crashes some time later.
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    for _ in modes:
        _python_dispatch._pop_mode()


def _empty_function_modes() -> None:
    kept: list[Any] = []
    while torch._C._len_torch_function_stack() > 0:
        mode = torch._C._pop_torch_function_stack()
        if isinstance(mode, DeviceContext):
            kept.append(mode)
    for mode in reversed(kept):
        torch._C._push_on_torch_function_stack(mode)
