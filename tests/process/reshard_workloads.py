"""Ranks that commit checkpoints and load those of others; what they then hold, part by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from process.tracking_workloads import _fsdp2, build, train

STEP = 2


def build_on(kind: str, seed: int, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    """As `build`; with a `shape`, fully_shard on a mesh of it."""
    import torch

    if shape is None:
        return build(kind, seed)
    objects = build("plain", seed)
    _fsdp2(objects["model"], shape)
    objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters(), lr=0.05)
    objects["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
        objects["optimizer"], 0.1, total_steps=20
    )
    return objects


def whole(objects: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of an FSDP2 model and its optimizer, gathered by torch."""
    from torch.distributed.tensor import DTensor

    def gathered(tensor: Any) -> Any:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    model, optimizer = objects["model"], objects["optimizer"]
    named = dict(model.named_parameters(remove_duplicate=False))
    found = {f"model.{name}": gathered(p) for name, p in named.items()}
    found |= {f"model.{name}": gathered(b) for name, b in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.state.{name}.{key}"] = gathered(value)
    return found


def save_kinds(rank: int, world_size: int, directory: Path, kinds: list[str]) -> dict[str, Any]:
    """Two steps and a checkpoint of each kind, committed by the test; its files, and of FSDP2 what
    torch gathers.
    """
    import torch

    from stepfast.checkpoint.arena import Arena
    from stepfast.checkpoint.capture import Capture
    from stepfast.checkpoint.directory import DirectoryStore
    from stepfast.checkpoint.tensors.tree import StateTree
    from stepfast.checkpoint.writer import write_slot
    from stepfast.core.terms import Generation, SnapshotId, Step

    found: dict[str, Any] = {}
    for kind in kinds:
        torch.manual_seed(rank)
        objects = build(kind)
        train(objects, STEP)
        arena = Arena(directory / f"slots-{kind}-{rank}")
        snapshot = SnapshotId(Generation(1), Step(STEP))
        taken = Capture(arena, StateTree(objects, rank=rank)).take(snapshot)
        store = DirectoryStore(directory / kind)
        file = write_slot(store, taken.slot_path, snapshot, rank=rank, world_size=world_size)
        found[kind] = file, whole(objects) if kind == "fsdp2" else None
    return found


def load_each(
    rank: int, world_size: int, directory: Path, pairs: list[tuple[str, str, Any]]
) -> list[Any]:
    """Each checkpoint into objects of each kind: every local part; a step, which needs them all."""
    import math

    from stepfast.checkpoint.directory import DirectoryStore
    from stepfast.checkpoint.loading import StoredCheckpoint
    from stepfast.checkpoint.tensors.reshard import restore
    from stepfast.checkpoint.tensors.tree import StateTree
    from stepfast.core.terms import Generation, SnapshotId, Step

    found = []
    for root, kind, shape in pairs:
        objects = build_on(kind, seed=9, shape=shape)
        tree = StateTree(objects, rank=rank)
        snapshot = SnapshotId(Generation(1), Step(STEP))
        checkpoint = StoredCheckpoint.open(DirectoryStore(Path(root)), snapshot)
        done = restore(tree, checkpoint, world_size=world_size)
        state = tree.collect()
        parts = [
            (entry, local.detach().clone())
            for entry, local in zip(state.layout.entries, state.tensors, strict=True)
        ]
        losses = train(objects, 2)
        assert all(map(math.isfinite, losses))
        found.append((done.is_resharded, parts, objects["schedule"].last_epoch))
    return found
