"""A small model in many layouts, one rank after the other in this process.

Owns: jobs whose every layout computes the same state, for each of its steps is done element by
element: what a layout's rank should hold after a load is what it holds when it trains itself.
torch's fake process group lets each rank be built without its peers; no collective is needed.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.blocks import BlockHasher
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import DTYPE_BYTES, TensorSpec, private_rank
from stepfast.checkpoint.manifest import Manifest, ShardFile
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.writer import write_slot
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.train.torch_private import forget_old_meshes

Objects = dict[str, Any]
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F64": torch.float64}
SNAPSHOT = SnapshotId(Generation(3), Step(50))


class Layout(NamedTuple):
    """How a model lies on `world_size` ranks."""

    kind: str
    shape: tuple[int, ...] = (1,)

    @property
    def world_size(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product


class Net(nn.Module):
    """Sizes that no number of ranks divides, a scalar, a buffer, an empty parameter."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1, dtype=dtype)
        self.down = nn.Linear(2 * width + 1, 3, bias=False, dtype=dtype)
        self.cube = nn.Parameter(torch.rand(5, 2, 3).to(dtype))
        self.gain = nn.Parameter(torch.rand(1).to(dtype))
        self.register_buffer("table", torch.rand(4, 2))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Recipe(NamedTuple):
    """A job, but for its layout."""

    dtype: torch.dtype = torch.float32
    width: int = 6
    optimizer: str = "adamw"
    seed: int = 1


@contextmanager
def on_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of a world that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_old_meshes()  # another rank's mesh is equal to this one's, and is not the same


def build(layout: Layout, recipe: Recipe) -> Objects:
    """The objects of the rank that this process is."""
    torch.manual_seed(recipe.seed)
    model: Any = Net(recipe.dtype, recipe.width)
    model = _laid_out(model, layout)
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def _laid_out(model: Any, layout: Layout) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if layout.kind == "plain":
        return model
    if layout.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    names = ("outer", "inner")[: len(layout.shape)]
    mesh = dist.init_device_mesh("cpu", layout.shape, mesh_dim_names=names)
    if layout.kind == "tp":
        plan = {"up": ColwiseParallel()}
        parallelize_module(model, mesh["inner"], plan, src_data_rank=None)
        mesh = mesh["outer"]
    if layout.kind == "last":  # dimensions other than the first, where FSDP2 can
        return fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: _last(p, layout.shape[0]))
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _last(parameter: nn.Parameter, count: int) -> Any:
    from torch.distributed.tensor import Shard

    even = [dim for dim, size in enumerate(parameter.shape) if size % count == 0]
    return Shard(even[-1] if even else 0)


def train(objects: Objects, rank: int, turns: int = 3) -> None:
    """Steps that need nothing of other ranks; then every element is a number that its name and its
    place in the whole tensor give it.
    """
    for _ in range(turns):
        for parameter in objects["model"].parameters():
            parameter.grad = (parameter * 0.5 + 0.25).detach()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        objects["scheduler"].step()
    with torch.no_grad():
        state = StateTree(objects, rank=rank).collect()
        for entry, local in zip(state.layout.entries, state.tensors, strict=True):
            if private_rank(entry.name) is None:
                local.copy_(_pattern(entry)[_box(entry)])


def _pattern(entry: TensorSpec) -> torch.Tensor:
    base = zlib.crc32(entry.name.encode()) % 1000
    count = math.prod(entry.global_shape)
    # Bits rather than numbers, or small types would round neighbours together.
    raw = torch.arange(base, base + count * 8, dtype=torch.int64).view(torch.uint8)
    raw = raw[: count * DTYPE_BYTES[entry.dtype]]
    return raw.clone().view(_DTYPES[entry.dtype]).view(entry.global_shape)


def _box(entry: TensorSpec) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.shape, strict=True))


def save(
    root: Path, layout: Layout, recipe: Recipe, *, turns: int = 3, block_bytes: int = 1000
) -> DirectoryStore:
    """Train in `layout` and commit a checkpoint of it, as a job would, with blocks that are small
    enough for these files to have many.
    """
    store, files = DirectoryStore(root / "store"), []
    for rank in range(layout.world_size):
        with on_rank(rank, layout.world_size):
            objects = build(layout, recipe)
            train(objects, rank, turns)
            seed_rank(rank)
            tree = StateTree(objects, rank=rank)
            taken = Capture(Arena(root / f"rank-{rank}"), tree).take(SNAPSHOT)
            files.append(
                write_slot(
                    store, taken.slot_path, SNAPSHOT, rank=rank, world_size=layout.world_size
                )
            )
    manifest = manifest_of(files)
    small = [_with_blocks(store, manifest.name, file, block_bytes) for file in files]
    commit(store, manifest_of(small))
    return store


def _with_blocks(store: Any, directory: str, file: ShardFile, block_bytes: int) -> ShardFile:
    hasher = BlockHasher(block_bytes)
    hasher.update(store.read(f"{directory}/{file.name}"))
    return msgspec.structs.replace(file, block_bytes=block_bytes, blocks=hasher.digests())


def manifest_of(files: list[Any]) -> Manifest:
    """A manifest, ready to be committed."""
    return Manifest(
        job_id="job", step=SNAPSHOT.step, generation=SNAPSHOT.generation, world_size=len(files),
        nproc_per_node=1, stepfast_version="1", torch_version="2", created_at_s=0.0,
        files=tuple(files),
    )  # fmt: skip


def seed_rank(rank: int) -> None:
    """Generators of its own for each rank."""
    torch.manual_seed(1000 + rank)
    random.seed(2000 + rank)


def digests(objects: Objects, rank: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Every local tensor."""
    return StateTree(objects, rank=rank).local_digests()
