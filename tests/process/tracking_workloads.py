"""Models of every kind of sharding, and what the ranks that a test starts do with them.

Owns: the models by kind, what a rank does with them. Does not own: what is right (the test).
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from process.groups_cluster import PROCESSES

WORK_LIMIT_S = 60.0
SHARDED1: dict[str, tuple[str, bool, tuple[int, ...] | None]] = {  # strategy, use_orig_params, mesh
    "fsdp1": ("FULL_SHARD", True, None),
    "fsdp1_flat": ("FULL_SHARD", False, None),
    "fsdp1_grad_op": ("SHARD_GRAD_OP", True, None),
    "fsdp1_grad_op_flat": ("SHARD_GRAD_OP", False, None),
    "fsdp1_hybrid": ("HYBRID_SHARD", True, (1, 2)),
    "fsdp1_hybrid_flat": ("HYBRID_SHARD", False, (1, 2)),
    "fsdp1_replicated": ("HYBRID_SHARD", True, (2, 1)),
    "fsdp1_no_shard": ("NO_SHARD", True, None),
    "fsdp1_no_shard_flat": ("NO_SHARD", False, None),
    "fsdp1_bfloat16": ("FULL_SHARD", True, None),
    "fsdp1_bfloat16_flat": ("FULL_SHARD", False, None),
}
SHARDED2 = {"fsdp2": (2,), "hsdp_replicated": (2, 1), "hsdp_sharded": (1, 2)}
KINDS = (*SHARDED1, *SHARDED2, "tensor_parallel", "ddp", "plain")


def in_ranks(world_size: int, work: Callable[..., Any], directory: Path, *args: Any) -> list[Any]:
    """What `work(rank, world_size, directory, *args)` returns on each rank, in a gloo group."""
    directory.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(
            target=_serve, args=(theirs, work, rank, world_size, directory, *args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = [_answer(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [text for is_good, text in answers if not is_good]
    assert not failed, "\n".join(map(str, failed))
    return [answer for _, answer in answers]


def _answer(pipe: Any) -> tuple[bool, Any]:
    assert pipe.poll(WORK_LIMIT_S), "a rank does not answer"
    try:
        answer: tuple[bool, Any] = pipe.recv()
        return answer
    except EOFError:
        return False, "a rank ended without an answer"


def _serve(
    pipe: Connection,
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    directory: Path,
    *args: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20)
    )
    try:
        pipe.send((True, work(rank, world_size, directory, *args)))
    except Exception:  # noqa: BLE001 - the test hears of it
        pipe.send((False, traceback.format_exc()))
    multiprocessing.connection.wait(
        [pipe]
    )  # until the test ends it: its peers may need its sockets


def build(kind: str, seed: int = 1) -> dict[str, Any]:
    """Model, optimizer and schedule of one kind; odd sizes, a tied weight, buffers."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(seed)

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 7)
            self.norm = nn.LayerNorm(7)
            self.second = nn.Linear(7, 5, bias=False)
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, inputs: Any) -> Any:
            self.seen += 1
            return self.second(torch.tanh(self.norm(self.first(inputs))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.body = Body()
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.body(self.embed(tokens)) * self.scale)

    model: Any = Net()
    if kind in SHARDED1:
        model = _fsdp1(model, *SHARDED1[kind], is_mixed="bfloat16" in kind)
    elif kind in SHARDED2:
        _fsdp2(model, SHARDED2[kind])
    elif kind == "tensor_parallel":
        model = _tensor_parallel()
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    assert dist.is_initialized()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def _fsdp1(model: Any, strategy: str, use_orig_params: bool, shape: Any, *, is_mixed: bool) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    precision = MixedPrecision(param_dtype=torch.bfloat16) if is_mixed else None
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("r", "s"))

    def wrap(module: Any) -> Any:
        return FullyShardedDataParallel(
            module, sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh,
            use_orig_params=use_orig_params, device_id=torch.device("cpu"),
            mixed_precision=precision,
        )  # fmt: skip

    model.body = wrap(model.body)
    return wrap(model)


def _fsdp2(model: Any, shape: tuple[int, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensor_parallel() -> Any:
    """Two dimensions, one of them of tensor parallelism, whose shards fully_shard cuts again."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 11))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def backward(objects: dict[str, Any]) -> float:
    """Half a step, on tokens of the rank's own; returns the loss."""
    import torch
    from torch import nn

    tokens = torch.randint(0, 11, (6,))
    loss = nn.functional.cross_entropy(objects["model"](tokens), tokens)
    loss.backward()
    return loss.item()


def train(objects: dict[str, Any], turns: int) -> list[float]:
    """The losses."""
    losses = []
    for _ in range(turns):
        loss = backward(objects)
        objects["optimizer"].step()
        objects["schedule"].step()
        objects["optimizer"].zero_grad()
        losses.append(loss)
    return losses


def round_trip(rank: int, world_size: int, directory: Path, kind: str) -> dict[str, Any]:
    """Two steps, a snapshot, two steps; back in place and in a fresh process' objects, two steps.

    Snapshots and restores are made by one rank after the other, while the other one waits for the
    store: a collective in them would never end.
    """
    import torch
    import torch.distributed as dist

    from stepfast.checkpoint.arena import Arena
    from stepfast.checkpoint.capture import Capture
    from stepfast.checkpoint.restore import open_sealed
    from stepfast.checkpoint.tensors.tree import StateTree
    from stepfast.core.terms import Generation, SnapshotId, Step

    store = dist.FileStore(str(directory / "turns"), world_size)
    alone = iter(range(100))

    def one_by_one(work: Callable[[], Any]) -> Any:
        number = next(alone)
        if rank > 0:
            store.get(f"{number}-{rank - 1}")
        result = work()
        store.set(f"{number}-{rank}", "done")
        store.get(f"{number}-{world_size - 1}")
        return result

    def look(objects: dict[str, Any]) -> None:
        """A forward alone leaves sharded models in whole, and each strategy in its own way."""
        # In bfloat16 FSDP1 itself steps wrongly after a forward without a backward.
        has_grad = kind in SHARDED1 and "bfloat16" not in kind
        with torch.set_grad_enabled(has_grad):
            objects["model"](torch.zeros(6, dtype=torch.int64))

    def restore(objects: dict[str, Any]) -> None:
        tree = one_by_one(lambda: StateTree(objects))
        one_by_one(lambda: tree.restore_from(open_sealed(taken.slot_path, taken.snapshot)))

    torch.manual_seed(rank)
    objects = build(kind)
    torch.manual_seed(rank)
    train(objects, 2)
    look(objects)
    tree = one_by_one(lambda: StateTree(objects))
    capture = Capture(Arena(directory / f"rank-{rank}"), tree)
    taken = one_by_one(lambda: capture.take(SnapshotId(Generation(1), Step(2))))
    at_snapshot = one_by_one(tree.local_digests)
    wanted = train(objects, 2), one_by_one(tree.local_digests)

    found = []
    fresh = build(kind, seed=9)
    for each in (objects, fresh):
        look(each)
        backward(each)  # its gradients must not be there afterwards
        restore(each)
        back = StateTree(each)
        found.append((one_by_one(back.local_digests) == at_snapshot, train(each, 2)))
        found[-1] += (one_by_one(back.local_digests),)
    return {"wanted": wanted, "found": found, "slot": str(taken.slot_path)}


def whole_tensors(rank: int, world_size: int, directory: Path, kind: str) -> dict[str, Any]:
    """A slot's path after two steps of FSDP1, and the same state as FSDP1 itself gathers it."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    from stepfast.checkpoint.arena import Arena
    from stepfast.checkpoint.capture import Capture
    from stepfast.checkpoint.tensors.tree import StateTree
    from stepfast.core.terms import Generation, SnapshotId, Step

    objects = build(kind)
    torch.manual_seed(rank)
    train(objects, 2)
    capture = Capture(Arena(directory / f"rank-{rank}"), StateTree(objects))
    taken = capture.take(SnapshotId(Generation(1), Step(2)))
    model, optimizer = objects["model"], objects["optimizer"]
    whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    wanted = {
        f"optimizer.state.{name}.{key}": value.tolist()
        for name, state in whole["state"].items()
        for key, value in state.items()
        if key != "step"
    }
    with FullyShardedDataParallel.summon_full_params(model):
        for raw, parameter in model.named_parameters(remove_duplicate=False):
            name = raw.replace("_fsdp_wrapped_module.", "")
            wanted[f"model.{name}"] = parameter.tolist()
    return {"slot": str(taken.slot_path), "wanted": wanted}
