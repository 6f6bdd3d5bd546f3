"""A run that starts from imported weights: what it takes, what stays as the script makes it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from property.layouts import SNAPSHOT, Layout, Recipe, build, digests, on_rank, save, train
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.export import export_safetensors
from stepfast.checkpoint.imported import Selection, choose, import_checkpoint, open_source
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.tensors.export import ExportFormat, export
from stepfast.checkpoint.tensors.reshard import Restored, restore
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.whole import WholeCheckpoint
from stepfast.errors import StateError
from unit.stored_checkpoints import snap
from unit.tracked import Net

Objects = dict[str, Any]
FIRST = snap(0, generation=0)


def imported(source: Path, store: Path, **selection: Any) -> StoredCheckpoint:
    chosen = choose(found := open_source(source), Selection(**selection))
    tracked = selection.get("tracked", "model")
    import_checkpoint(found, chosen, DirectoryStore(store), tracked=tracked)
    return StoredCheckpoint.open(DirectoryStore(store), FIRST)


def load(
    checkpoint: StoredCheckpoint, objects: Objects, *fresh: str, **options: Any
) -> tuple[Restored, list[str]]:
    """Restore; what was done and what was said."""
    told: list[str] = []
    rank, world_size = options.pop("rank", 0), options.pop("world_size", 1)
    done = restore(
        StateTree(objects, rank=rank), checkpoint, world_size=world_size, start_fresh=fresh,
        on_warning=told.append, **options,
    )  # fmt: skip
    return done, told


@pytest.fixture
def of_hugging_face(tmp_path: Path) -> tuple[nn.Module, StoredCheckpoint]:
    """A model, and its checkpoint as Hugging Face writes one: a tied weight once, no buffer that
    the model makes by itself.
    """
    torch.manual_seed(5)
    model = Net()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(3)
    state = {n: v.detach() for n, v in model.state_dict().items() if n != "head.weight"}
    assert "rope" not in state
    save_file(state, tmp_path / "model.safetensors")
    return model, imported(tmp_path, tmp_path / "store")


def test_weights_are_taken_and_all_else_is_as_the_script_has_it(
    of_hugging_face: tuple[nn.Module, StoredCheckpoint],
) -> None:
    saved, checkpoint = of_hugging_face
    torch.manual_seed(9)
    random.seed(9)
    model = Net()
    model.body[1].eval()
    model.rope.mul_(2)
    weight, rope, states = model.embed.weight, model.rope.clone(), torch.get_rng_state()
    draws = random.getstate()
    done, told = load(checkpoint, {"model": model})
    assert done.is_resharded and told == []
    assert model.embed.weight is weight and model.head.weight is weight
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(model.rope, rope)
    assert not model.body[1].training and model.training
    assert torch.equal(torch.get_rng_state(), states) and random.getstate() == draws


def test_an_object_that_is_not_there_is_refused_and_the_error_says_the_way(
    of_hugging_face: tuple[nn.Module, StoredCheckpoint],
) -> None:
    _, checkpoint = of_hugging_face
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {"model": model, "optimizer": optimizer, "extra": {"count": 3}}
    before = model.embed.weight.clone()
    with pytest.raises(StateError) as raised:
        load(checkpoint, objects)
    assert "not in the checkpoint: extra, optimizer; " in str(raised.value)
    assert str(raised.value).endswith("--start-fresh extra --start-fresh optimizer")
    with pytest.raises(StateError, match="not in the checkpoint: extra"):
        load(checkpoint, objects, "optimizer")
    with pytest.raises(StateError, match="--start-fresh optimiser is nothing that is tracked"):
        load(checkpoint, objects, "optimizer", "extra", "optimiser")
    assert torch.equal(model.embed.weight, before)


def test_what_may_be_missing_begins_fresh_and_that_is_said(
    of_hugging_face: tuple[nn.Module, StoredCheckpoint],
) -> None:
    saved, checkpoint = of_hugging_face
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    generator = torch.Generator().manual_seed(4)
    state = generator.get_state()
    objects = {
        "model": model, "optimizer": optimizer, "extra": {"count": 3}, "noise": generator,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }  # fmt: skip
    _, told = load(checkpoint, objects, "optimizer", "extra", "schedule", "noise", "model")
    assert len(told) == 1
    assert "has no extra, noise, optimizer, schedule: as the script made it" in told[0]
    assert torch.equal(model.embed.weight, saved.embed.weight)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.25
    assert objects["extra"] == {"count": 3} and torch.equal(generator.get_state(), state)
    # And it is a state like any other from there on.
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    StateTree(objects).collect()


def test_a_part_of_a_model_may_be_new(
    of_hugging_face: tuple[nn.Module, StoredCheckpoint],
) -> None:
    saved, checkpoint = of_hugging_face
    model = Net()
    model.classes = nn.Linear(6, 2)
    made = model.classes.weight.clone()
    with pytest.raises(StateError, match=r"--start-fresh model\.classes\.weight --start-fresh mo"):
        load(checkpoint, {"model": model})
    _, told = load(checkpoint, {"model": model}, "model.classes")
    assert "has no model.classes.weight, model.classes.bias" in told[0]
    assert torch.equal(model.classes.weight, made)
    assert torch.equal(model.embed.weight, saved.embed.weight)


def test_what_is_not_missing_but_different_is_refused_all_the_same(
    of_hugging_face: tuple[nn.Module, StoredCheckpoint],
) -> None:
    _, checkpoint = of_hugging_face
    model = Net()
    model.body[0] = nn.Linear(6, 7)
    with pytest.raises(StateError, match=r"different: model\.body\.0\.weight is F32 \[7, 6\]"):
        load(checkpoint, {"model": model}, "model")
    other = Net()
    del other.body
    with pytest.raises(StateError, match=r"only in the checkpoint: model\.body\.0\.bias"):
        load(checkpoint, {"model": other}, "model")


def test_an_imported_model_is_no_optimizer(tmp_path: Path) -> None:
    save_file({"state.w.exp_avg": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = imported(tmp_path, tmp_path / "store", tracked="optimizer")
    model = nn.Linear(2, 1)
    objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(StateError, match="optimizer is a module there and none here"):
        load(checkpoint, objects, "model")


@pytest.mark.parametrize(
    ("form", "layout", "recipe"),
    [
        ("torch", Layout("plain"), Recipe()),
        ("safetensors", Layout("fsdp", (3,)), Recipe(dtype=torch.bfloat16)),
        ("dcp", Layout("tp", (2, 2)), Recipe()),
    ],
)
def test_a_trained_model_goes_out_and_in_and_into_any_layout(
    tmp_path: Path, form: str, layout: Layout, recipe: Recipe
) -> None:
    trained = StoredCheckpoint.open(save(tmp_path, Layout("fsdp", (2,)), recipe), SNAPSHOT)
    target = tmp_path / "exported"
    if form == "safetensors":
        export_safetensors(WholeCheckpoint(trained), target, progress=lambda done, total: None)
    else:
        export(trained, target, ExportFormat(form))
    checkpoint = imported(target, tmp_path / "imported")
    for rank in range(layout.world_size):
        with on_rank(rank, layout.world_size):
            native = build(layout, recipe)
            train(native, rank)
            wanted = [row for row in digests(native, rank) if row[0].startswith("model.")]
            objects = build(layout, recipe._replace(seed=2))
            fresh = ("optimizer", "scheduler")
            load(checkpoint, objects, *fresh, rank=rank, world_size=layout.world_size)
            found = [row for row in digests(objects, rank) if row[0].startswith("model.")]
            assert found == wanted
            assert not objects["optimizer"].state
