"""What a loop may change about a model besides its numbers: requires_grad, extra state; and tensors
that nothing can be restored into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from property.layouts import SNAPSHOT, Layout, Recipe, build, manifest_of, on_rank
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.tensors.reshard import restore as restore_stored
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.writer import write_slot
from stepfast.errors import ScriptError, StateError
from unit.tracked import Objects, restore, state_of, take

PLAIN = Layout("plain")
Wrap = Callable[[nn.Module], Any]


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def flat(model: nn.Module) -> Any:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


# ------------------------------------------------------------------------------- requires_grad


def half_frozen(wrap: Wrap) -> Objects:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    wrapped = wrap(model)
    return {"model": wrapped, "optimizer": torch.optim.AdamW(wrapped.parameters(), lr=0.1)}


def step(objects: Objects) -> None:
    objects["model"](torch.ones(2, 4)).sum().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def flags(objects: Objects) -> list[bool]:
    return [parameter.requires_grad for parameter in objects["model"].parameters()]


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*")
@pytest.mark.parametrize("wrap", [as_it_is, fully_shard, flat])
def test_what_a_loop_unfroze_stays_so_and_what_it_froze(tmp_path: Path, wrap: Wrap) -> None:
    """In the objects themselves, which are in another state by now, and in a fresh process's."""
    objects = half_frozen(wrap)
    step(objects)
    first, *_, last = objects["model"].parameters()
    first.requires_grad_(True)
    last.requires_grad_(False)
    at_snapshot = flags(objects)
    step(objects)
    taken = take(tmp_path, objects)
    step(objects)
    wanted = state_of(objects)
    first.requires_grad_(False)
    for again in (objects, half_frozen(wrap)):
        restore(taken, again)
        assert flags(again) == at_snapshot == [True, False, True, False]
        step(again)
        assert state_of(again) == wanted


def test_a_parameter_tracked_by_itself_keeps_its_flag(tmp_path: Path) -> None:
    objects: Objects = {"q": nn.Parameter(torch.ones(2)), "t": torch.ones(2)}
    objects["q"].requires_grad_(False)
    taken = take(tmp_path, objects)
    again: Objects = {"q": nn.Parameter(torch.zeros(2)), "t": torch.zeros(2)}
    restore(taken, again)
    assert not again["q"].requires_grad and not again["t"].requires_grad


def test_flags_that_stay_are_packed_once() -> None:
    model = nn.Linear(2, 2)
    frozen = StateTree({"model": model}).look()[0].frozen
    before = frozen.encoded()
    assert frozen.encoded() is before
    model.bias.requires_grad_(False)
    assert frozen.encoded() is not before and frozen.names() == ["model.bias"]


@pytest.mark.parametrize("saved_as", [PLAIN, Layout("fsdp2", (2,))])
def test_the_flags_of_a_checkpoint_count_and_it_is_said(tmp_path: Path, saved_as: Layout) -> None:
    """In the saved world and in another: what the script made is not silently passed over."""
    store, files, world_size = DirectoryStore(tmp_path / "store"), [], saved_as.world_size
    for rank in range(world_size):
        with on_rank(rank, world_size):
            saved = build(saved_as, Recipe())
            next(saved["model"].parameters()).requires_grad_(False)
            capture = Capture(Arena(tmp_path / f"rank-{rank}"), StateTree(saved, rank=rank))
            slot = capture.take(SNAPSHOT).slot_path
            files.append(write_slot(store, slot, SNAPSHOT, rank=rank, world_size=world_size))
    commit(store, manifest_of(files))
    said: list[str] = []
    objects = build(PLAIN, Recipe())
    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    restore_stored(StateTree(objects), checkpoint, world_size=1, on_warning=said.append)
    assert [not p.requires_grad for p in objects["model"].parameters()].count(True) == 1
    assert any("requires_grad of model." in text and "after run.track()" in text for text in said)


# --------------------------------------------------------------------------------- extra state


class Remembers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[int] = []

    def get_extra_state(self) -> Any:
        return {"seen": list(self.seen), "count": torch.tensor(len(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        assert int(state["count"]) == len(state["seen"])
        self.seen = state["seen"]


class Around(DistributedDataParallel):
    """A wrapper with extra state of its own."""

    note = 0

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*", "ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize(
    "wrap", [as_it_is, DistributedDataParallel, Around, checkpoint_wrapper, compiled, flat]
)
def test_a_wrapped_root_has_its_extra_state_back(tmp_path: Path, wrap: Wrap) -> None:
    inner = Remembers()
    wrapped = wrap(inner)
    inner.seen = [1, 2]
    wrapped.note = 5
    taken = take(tmp_path, {"model": wrapped})
    again = Remembers()
    around = wrap(again)
    restore(taken, {"model": around})
    assert again.seen == [1, 2]
    assert not isinstance(around, Around) or around.note == 5


def test_extra_state_that_could_not_be_given_back_is_refused() -> None:
    class Half(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

    with pytest.raises(ScriptError, match=r"model\.0 is a Half, .* no set_extra_state\(\)"):
        StateTree({"model": nn.Sequential(Half(2, 2))})


# ---------------------------------------------------------------------------- expanded tensors


def with_mask() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    return model


@pytest.mark.parametrize(
    ("objects", "name"),
    [
        ({"model": with_mask()}, "model.mask"),
        ({"scale": torch.ones(1).expand(3)}, "scale"),
        ({"model": nn.ParameterList([nn.Parameter(torch.ones(1).expand(2))])}, "model.0"),
    ],
)
def test_what_nothing_can_be_restored_into_is_refused(objects: Objects, name: str) -> None:
    with pytest.raises(ScriptError, match=rf"{name} is an expanded tensor, .*contiguous"):
        StateTree(objects)


def test_an_expanded_dimension_of_one_is_nothing_special() -> None:
    StateTree({"ids": torch.arange(4).expand(1, -1)})


def test_an_expanded_tensor_in_a_container_or_optimizer_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"scale": torch.full((1, 3), 2.0).expand(2, 3)}
    held = {"row": torch.tensor([7.0]).expand(4)}
    objects: Objects = {"model": model, "optimizer": optimizer, "held": held}
    taken = take(tmp_path, objects)
    held["row"] = torch.zeros(1).expand(4)
    optimizer.state[model.weight]["scale"] = torch.zeros(1, 3).expand(2, 3)
    restore(taken, objects)
    assert held["row"].tolist() == [7.0] * 4
    assert optimizer.state[model.weight]["scale"].tolist() == [[2.0] * 3] * 2


# ------------------------------------------------------------------------------ parameter groups


def test_a_group_that_only_the_snapshot_has_is_said_with_what_to_do(tmp_path: Path) -> None:
    def make() -> Objects:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())}

    objects = make()
    objects["optimizer"].add_param_group({"params": list(objects["model"][1].parameters())})
    taken = take(tmp_path, objects)
    with pytest.raises(StateError, match=r"1 parameter group, .* has 2; .* add_param_group\(\)"):
        restore(taken, make())
