"""Keeping an FSDP2 model and resetting a thread's modes, in one process with fake groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from stepfast.errors import OperatingError
from stepfast.train import torch_groups, torch_private

needs_verified_torch = pytest.mark.skipif(
    torch_private.version_obstacle() is not None, reason="no model is kept under this torch"
)


class StopError(Exception):
    """What the tests interrupt a forward or a backward with."""


class Gate(nn.Module):
    """Lets through, or raises in the forward or the backward."""

    closed_in: str | None = None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.closed_in == "forward":
            raise StopError
        if self.closed_in == "backward":
            value.register_hook(self._stop)
        return value * 1.0

    def _stop(self, grad: torch.Tensor) -> None:
        raise StopError


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch_groups.destroy_world()


def _model() -> FSDPModule:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), Gate()) for _ in range(3)])
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


@needs_verified_torch
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_reset_after_an_interrupt_anywhere(place: str, block: int):
    model = _model()
    flags = torch_private.module_flags([model])
    _step(model)
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(False)
    model.eval()
    model[block][1].closed_in = place
    with pytest.raises(StopError):
        _step(model)
    model[block][1].closed_in = None
    assert torch_private.keep_obstacle([model]) is None

    torch_private.reset_after_interrupt([model], flags)

    assert model.training and model[block].training
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            assert state._training_state.name == "IDLE"
            assert state._state_ctx.iter_forward_root is None
            assert not state._state_ctx.post_backward_final_callback_queued
            assert not state._comm_ctx.post_forward_order
            for group in state._fsdp_param_groups:
                assert group.is_sharded and group.reduce_grads
                assert group._all_gather_result is None
    assert all(param.grad is None for param in model.parameters())
    _step(model)
    assert all(param.grad is not None for param in model.parameters())


@needs_verified_torch
@pytest.mark.usefixtures("fake_world")
def test_interrupted_while_fsdp_initialises_is_no_model_to_keep():
    model = _model()
    model._get_fsdp_state()._is_root = True  # as if the interrupt struck early in its first forward
    obstacle = torch_private.keep_obstacle([model])
    assert obstacle is not None and "first forward" in obstacle


@needs_verified_torch
@pytest.mark.usefixtures("fake_world")
def test_ddp_is_no_model_to_keep():
    model = DistributedDataParallel(nn.Linear(2, 2))
    obstacle = torch_private.keep_obstacle([nn.Sequential(model)])
    assert obstacle is not None and "DistributedDataParallel" in obstacle


def test_an_unknown_torch_is_never_guessed_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    obstacle = torch_private.keep_obstacle([nn.Linear(2, 2)])
    assert obstacle is not None and "2.99.0" in obstacle and "2.13" in obstacle


@needs_verified_torch
def test_a_plain_model_is_kept():
    model = nn.Linear(2, 2)
    assert torch_private.keep_obstacle([model]) is None
    model(torch.ones(1, 2)).sum().backward()
    torch_private.reset_after_interrupt([model])
    assert model.weight.grad is None


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_left_behind_are_reset_and_the_default_device_stays():
    torch.set_default_device("meta")
    try:
        torch.set_grad_enabled(False)
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        _FunctionMode().__enter__()
        _DispatchMode().__enter__()
        torch.autograd.graph.save_on_cpu().__enter__()

        torch_private.reset_modes()

        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.empty(1).device.type == "meta"
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
    finally:
        torch.set_default_device(None)


def test_inference_mode_left_on_costs_the_process():
    with torch.inference_mode(), pytest.raises(OperatingError, match="replaced"):
        torch_private.reset_modes()


@pytest.mark.parametrize("is_old", [False, True])
def test_old_meshes_are_forgotten_under_every_torch(
    fake_world: None, monkeypatch: pytest.MonkeyPatch, is_old: bool
):
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4), mesh, [Shard(0)]).relu().sum()
    # Called as the dispatcher calls it, so that something is in the cache on any path to it.
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    spec = distribute_tensor(torch.ones(4), mesh, [Shard(0)])._spec
    propagate(OpSchema(torch.ops.aten.relu.default, (spec,), {}))
    assert propagate.cache.cache_info().currsize > 0
    if is_old:
        monkeypatch.delattr(debug, "_clear_sharding_prop_cache", raising=False)
    torch_private.forget_old_meshes()
    assert propagate.cache.cache_info().currsize == 0
