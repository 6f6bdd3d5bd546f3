"""Which part of a tensor a rank holds: on meshes of two dimensions, and of flat parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepfast.checkpoint.layout import Entry
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.errors import ScriptError
from stepfast.train import torch_private
from unit.tracked import restore, state_of, take

pytest.importorskip("torch.testing._internal.distributed.fake_pg")


def on_each_rank(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` in a world whose other ranks answer nothing: no collective may matter."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    answers = []
    for rank in range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            answers.append(work(rank))
        finally:
            dist.destroy_process_group()
            torch_private.forget_old_meshes()  # or the next rank is handed this one's, as equal
    return answers


class Counted(nn.Module):
    """Its elements are their own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 10, bias=False)
        self.down = nn.Linear(10, 7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(self.up(inputs))
        return outputs


def held(objects: dict[str, Any]) -> list[tuple[Entry, torch.Tensor]]:
    collected = StateTree(objects).collect()
    return [
        (entry, tensor.clone())
        for entry, tensor in zip(collected.layout.entries, collected.tensors, strict=True)
        if entry.name.startswith(("model.", "optimizer."))
    ]


def wholes(ranks: list[list[tuple[Entry, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The tensors put together from all ranks' parts; each element must be there."""
    found: dict[str, torch.Tensor] = {}
    for entry, part in [row for rank in ranks for row in rank]:
        whole = found.setdefault(entry.name, torch.full(entry.global_shape, math.nan))
        place = tuple(
            slice(start, start + size)
            for start, size in zip(entry.offsets, entry.shape, strict=True)
        )
        there = whole[place]
        assert there.shape == part.shape, entry
        assert bool((there.isnan() | (there == part)).all()), entry
        whole[place] = part
        if entry.original_shape is not None:
            assert entry.global_shape == (math.prod(entry.original_shape),)
    return found


def tensor_parallel(rank: int, shape: tuple[int, ...]) -> list[tuple[Entry, torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = Counted()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    return held({"model": model})


def hybrid(rank: int, shape: tuple[int, ...]) -> list[tuple[Entry, torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return held({"model": fully_shard(Counted(), mesh=mesh)})


@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (2, 4), (3, 1)])
@pytest.mark.parametrize("make", [tensor_parallel, hybrid])
def test_the_parts_of_a_mesh_of_two_dimensions_make_up_the_whole(
    make: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    parts = on_each_rank(math.prod(shape), lambda rank: make(rank, shape))
    for name, whole in wholes(parts).items():
        assert torch.equal(whole.view(-1), torch.arange(float(whole.numel()))), name


def flat(model: nn.Module, use_orig_params: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def stepped(rank: int, use_orig_params: bool) -> list[tuple[Entry, torch.Tensor]]:
    """With optimizer state whose values are those of the parameters."""
    model = flat(Counted(), use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    for parameter in model.parameters():
        if parameter.numel():
            optimizer.state[parameter] = {"momentum_buffer": parameter.detach().clone(), "n": 3}
    return held({"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 23])
def test_the_pieces_of_flat_parameters_make_up_the_originals(
    world_size: int, use_orig_params: bool
) -> None:
    """Also where a rank holds nothing but padding: 107 elements, 5 to each of 23 ranks."""
    parts = on_each_rank(world_size, lambda rank: stepped(rank, use_orig_params))
    found = wholes(parts)
    for name, whole in found.items():
        assert torch.equal(whole, torch.arange(float(whole.numel()))), name
    originals = {
        "model.up.weight": (10, 3), "model.down.weight": (7, 10), "model.down.bias": (7,)
    }  # fmt: skip
    state = {f"optimizer.state.{n[6:]}.momentum_buffer": shape for n, shape in originals.items()}
    assert found.keys() == originals.keys() | state.keys()
    for rows in parts:
        shapes = {entry.name: entry.original_shape for entry, _ in rows}
        assert shapes.items() <= (originals | state).items()
        assert shapes.keys() >= originals.keys()


@pytest.mark.parametrize("rank", [0, 21, 22])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_padding_is_neither_kept_nor_spoiled(
    tmp_path: Path, rank: int, use_orig_params: bool
) -> None:
    """Rank 21 of 23 holds two elements and padding, rank 22 nothing else."""

    def make() -> dict[str, Any]:
        model = flat(Counted(), use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        return {"model": model, "optimizer": optimizer}

    def fill(objects: dict[str, Any], value: float) -> None:
        for parameter in objects["model"].parameters():
            parameter.data.fill_(value)
            if parameter.numel():
                state = objects["optimizer"].state[parameter]
                state |= {"momentum_buffer": torch.full_like(parameter.data, value), "n": 3}

    def work(at: int) -> None:
        if at != rank:
            return
        objects, fresh = make(), make()
        fill(objects, 5.0)
        taken = take(tmp_path, objects)
        wanted = state_of(objects)
        restore(taken, fresh)
        assert state_of(fresh) == wanted
        buffers = [s["momentum_buffer"] for s in fresh["optimizer"].state.values()]
        if not use_orig_params:
            (buffer,) = buffers
            held = min(5, max(0, 107 - 5 * rank))
            assert buffer.tolist() == [5.0] * held + [0.0] * (5 - held)
        fill(objects, 7.0)
        restore(taken, objects)
        assert state_of(objects) == wanted

    on_each_rank(23, work)


def test_what_flattening_would_mix_up_is_refused() -> None:
    def turned(_: int) -> None:
        model = Counted()
        model.up.weight = nn.Parameter(torch.ones(3, 10).t())
        with pytest.raises(ScriptError, match=r"up\.weight, which is a DTensor or not contiguous"):
            StateTree({"model": flat(model, use_orig_params=True)})

    on_each_rank(2, turned)


def test_state_that_cannot_be_cut_is_refused_by_its_path() -> None:
    def odd(_: int) -> None:
        model = flat(Counted(), use_orig_params=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[next(model.parameters())] = {"rows": torch.ones(5)}
        with pytest.raises(ScriptError, match=r"optimizer\.state\.up\.weight keeps rows of shape"):
            StateTree({"model": model, "optimizer": optimizer})

    on_each_rank(2, odd)
