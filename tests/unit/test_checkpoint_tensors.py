"""Tracked objects into a slot and back: bitwise, in place, structurally; old process or fresh."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.capture import Capture, Captured
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import ScriptError, StateError

Objects = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("rope", torch.arange(6.0), persistent=False)
        self.cache: Any
        self.register_buffer("cache", None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embed(tokens) * self.rope * self.scale))
        return logits


def snap(step: int) -> SnapshotId:
    return SnapshotId(Generation(1), Step(step))


class Bench:
    """Objects, their tree and their slots."""

    def __init__(self, directory: Path, objects: Objects) -> None:
        self.objects, self.tree = objects, StateTree(objects)
        self.capture = Capture(Arena(directory), self.tree)

    def take(self, step: int) -> Captured:
        return self.capture.take(snap(step))


def restore(taken: Captured, objects: Objects) -> None:
    StateTree(objects).restore_from(open_sealed(taken.slot_path, taken.snapshot))


def train(objects: Objects, turns: int) -> None:
    model, optimizer = objects["model"], objects["optimizer"]
    for _ in range(turns):
        tokens = torch.randint(0, 10, (8,))
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if "scheduler" in objects:
            objects["scheduler"].step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


def make(kind: str = "adamw") -> Objects:
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 6], gamma=0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("taken_at", [0, 3])
def test_survivor_and_fresh_process_go_on_bitwise(tmp_path: Path, kind: str, taken_at: int) -> None:
    torch.manual_seed(1)
    bench = Bench(tmp_path, make(kind))
    train(bench.objects, taken_at)
    taken = bench.take(taken_at)
    train(bench.objects, 3)
    wanted = bench.tree.local_digests(), random.random(), torch.rand(3).tolist()

    survivor = bench.objects
    identities = {name: id(value) for name, value in survivor["model"].named_parameters()}
    survivor["model"](torch.randint(0, 10, (8,))).sum().backward()
    survivor["model"].eval()
    fresh = make(kind)
    for objects in (survivor, fresh):
        restore(taken, objects)
        assert objects["model"].training
        assert all(p.grad is None for p in objects["model"].parameters())
        assert objects["model"].head.weight is objects["model"].embed.weight
        train(objects, 3)
        found = StateTree(objects).local_digests(), random.random(), torch.rand(3).tolist()
        assert found == wanted
    assert identities == {name: id(value) for name, value in survivor["model"].named_parameters()}


def test_a_slot_says_the_digests_of_the_state_that_it_holds(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bench = Bench(tmp_path, make())
    train(bench.objects, 2)
    bench.take(2)
    wanted = bench.tree.local_digests()
    assert bench.capture.digests(snap(2).step) == wanted
    train(bench.objects, 1)
    assert bench.tree.local_digests() != wanted
    assert bench.capture.digests(snap(2).step) == wanted, "whatever was done since"


def test_that_a_loop_was_left_is_kept_with_the_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make())
    before = bench.take(1)
    bench.tree.loop_left = True
    left = bench.take(2)
    for taken, expected in ((left, True), (before, False), (left, True)):
        bench.tree.restore_from(open_sealed(taken.slot_path, taken.snapshot))
        assert bench.tree.loop_left is expected


def test_optimizer_state_that_the_snapshot_has_not_is_removed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make())
    taken = bench.take(0)
    train(bench.objects, 1)
    assert bench.take(1).relaid
    restore(taken, bench.objects)
    assert dict(bench.objects["optimizer"].state) == {}


def test_restoring_keeps_the_tensors_that_exist(tmp_path: Path) -> None:
    bench = Bench(tmp_path, make("adam_tensor_lr"))
    train(bench.objects, 1)
    taken = bench.take(1)
    optimizer = bench.objects["optimizer"]
    held = [value for state in optimizer.state.values() for value in state.values()]
    held.append(optimizer.param_groups[0]["lr"])
    saved = [value.clone() for value in held]
    train(bench.objects, 3)
    restore(taken, bench.objects)
    after = [value for state in optimizer.state.values() for value in state.values()]
    after.append(optimizer.param_groups[0]["lr"])
    assert all(one is other for one, other in zip(held, after, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(saved, after, strict=True))


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64]
DTYPES += [torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]


class Odd:
    """State of every dtype, size and nesting, in an object of its own."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def test_every_dtype_and_size_comes_back_exactly(tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (24, 8), dtype=torch.uint8)
    odd = Odd()
    odd.state = {str(d): raw.view(d) if d is not torch.bool else raw.bool() for d in DTYPES}
    odd.state |= {
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "nested": [{7: (torch.ones(2), None)}],
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
    }
    wanted = copy.deepcopy(odd.state)
    taken = Bench(tmp_path, {"odd": odd}).take(0)
    back = Odd()
    restore(taken, {"odd": back})
    assert list(back.state) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert back.state[name].dtype == value.dtype and back.state[name].shape == value.shape
            found = back.state[name].contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(found, value.contiguous().reshape(-1).view(torch.uint8))
    assert isinstance(back.state["nested"][0][7], tuple)
    assert back.state["nested"][0][7][1] is None


def test_generators_buffers_and_bare_tensors(tmp_path: Path) -> None:
    generator, weight = torch.Generator(), nn.Parameter(torch.ones(2))
    model: Any = Net()
    objects: Objects = {"noise": generator, "weight": weight, "model": model}
    bench = Bench(tmp_path, objects)
    taken = bench.take(0)
    wanted = torch.rand(2, generator=generator)
    model.cache = torch.ones(3)
    with torch.no_grad():
        weight.zero_()
        model.rope.zero_()
        model.body[1].running_mean.fill_(7)
    cached = bench.take(1)
    restore(taken, objects)
    assert not torch.is_tensor(model.cache)
    assert torch.equal(model.rope, torch.arange(6.0)) and torch.equal(weight, torch.ones(2))
    assert model.body[1].running_mean.abs().sum() == 0
    assert torch.equal(torch.rand(2, generator=generator), wanted)
    restore(cached, objects)
    assert torch.equal(model.cache, torch.ones(3))
    model.body.register_buffer("late", torch.ones(2, dtype=torch.int16))
    late = bench.take(2)
    fresh: Any = Net()
    restore(late, {**objects, "model": fresh})
    assert torch.equal(fresh.body.late, model.body.late) and torch.equal(fresh.cache, model.cache)
    restore(cached, objects)
    assert model.body.late is None
    restore(late, objects)
    names = [name for name, _, _ in bench.tree.local_digests()]
    assert "weight" in names and "model.cache" in names and not any("rng" in name for name in names)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch.compile's own
def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain_names = [name for name, _, _ in StateTree({"model": Net()}).local_digests()]
    wrapped = Net()
    wrapped.body[0] = checkpoint_wrapper(wrapped.body[0])
    compiled = torch.compile(wrapped, backend="eager")
    assert [name for name, _, _ in StateTree({"model": compiled}).local_digests()] == plain_names


def test_grad_scaler_comes_back(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    taken = Bench(tmp_path, {"scaler": scaler}).take(0)
    scaler.update(2.0)
    restore(taken, {"scaler": scaler})
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("consumed", [0, 3, 9])
def test_a_loader_goes_on_where_it_was(tmp_path: Path, consumed: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)

    torch.manual_seed(3)
    batches = loader()
    iterator = iter(batches)
    for _ in range(consumed):
        next(iterator)
    taken = Bench(tmp_path, {"batches": batches}).take(0)
    wanted = [b.tolist() for b in iterator], torch.rand(2).tolist()
    wanted_epoch = [b.tolist() for b in iter(batches)]
    fresh = loader()
    restore(taken, {"batches": fresh})
    assert ([b.tolist() for b in iter(fresh)], torch.rand(2).tolist()) == wanted
    assert [b.tolist() for b in iter(fresh)] == wanted_epoch


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_fsdp2_goes_on_bitwise_and_after_an_evaluation(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def sharded() -> Objects:
        objects = make()
        fully_shard(objects["model"].body[0])
        fully_shard(objects["model"])
        optimizer = torch.optim.AdamW(objects["model"].parameters())
        return {"model": objects["model"], "optimizer": optimizer}

    torch.manual_seed(1)
    bench = Bench(tmp_path, sharded())
    train(bench.objects, 2)
    with torch.no_grad():
        bench.objects["model"](torch.randint(0, 10, (8,)))  # leaves the root unsharded
    taken = bench.take(2)
    train(bench.objects, 2)
    wanted = bench.tree.local_digests()
    for objects in (bench.objects, sharded()):
        restore(taken, objects)
        state = objects["optimizer"].state[objects["model"].scale]
        assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)
        train(objects, 2)
        assert StateTree(objects).local_digests() == wanted
    names = {name for name, _, _ in wanted}
    assert {
        "model.head.weight",
        "model.embed.weight",
        "optimizer.state.body.0.bias.exp_avg",
    } <= names


def test_offsets_are_those_of_this_rank_in_the_whole_tensor() -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        model = nn.Linear(3, 9)
        mesh = dist.init_device_mesh("cpu", (4,))
        fully_shard(model, mesh=mesh)
        few = nn.Linear(3, 2, bias=False)
        fully_shard(few, mesh=mesh)
        layout = StateTree({"model": model, "few": few}).collect().layout
        weight = layout.by_name["model.weight"]
        assert (weight.shape, weight.offsets, weight.global_shape) == ((3, 3), (6, 0), (9, 3))
        empty = layout.by_name["few.weight"]
        assert (empty.shape, empty.offsets, empty.global_shape) == ((0, 3), (2, 0), (2, 3))
        assert layout.by_name["model.bias"].offsets == (6,)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_ddp_has_the_names_of_what_it_wraps(tmp_path: Path) -> None:
    objects = make()
    taken = Bench(tmp_path, objects).take(0)
    wrapped = make()
    wrapped["model"] = nn.parallel.DistributedDataParallel(wrapped["model"])
    restore(taken, wrapped)
    assert StateTree(wrapped).local_digests() == StateTree(objects).local_digests()


def test_what_cannot_be_tracked_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"track\(lr=.*float.*no state_dict"):
        StateTree({"lr": 0.1})
    with pytest.raises(ScriptError, match="'stepfast'"):
        StateTree({"stepfast": Net()})
    odd = Odd()
    odd.state = {"fn": print}
    with pytest.raises(ScriptError, match=r"odd\.fn"):
        Bench(tmp_path, {"odd": odd}).take(0)
    with pytest.raises(ScriptError, match=r"optimizer updates a parameter .* track that module"):
        Bench(tmp_path, {"optimizer": make()["optimizer"]}).take(0)
    with pytest.raises(ScriptError, match=r"model\.weight .* cannot keep"):
        Bench(tmp_path, {"model": nn.Linear(2, 2, device="meta")}).take(0)
    with pytest.raises(ScriptError, match="run the model once"):
        Bench(tmp_path, {"model": nn.LazyLinear(2)}).take(0)


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    taken = Bench(tmp_path, {"model": nn.Linear(3, 2), "odd": Odd()}).take(0)
    cases: list[tuple[Objects, str]] = [
        ({"model": nn.Linear(3, 4), "odd": Odd()}, r"model\.weight is F32 \[4, 3\]"),
        ({"model": nn.Linear(3, 2).double(), "odd": Odd()}, "F64"),
        ({"model": nn.Sequential(nn.Linear(3, 2)), "odd": Odd()}, r"no model\.0\.weight"),
        ({"model": nn.Linear(3, 2)}, "tracked are"),
        ({"model": nn.Linear(3, 2), "odd": Odd(), "more": Odd()}, "tracked are"),
        (
            {"model": nn.Linear(3, 2, bias=False), "odd": Odd()},
            r"model\.bias, which the model has not",
        ),
    ]
    for objects, message in cases:
        before = [p.clone() for p in objects["model"].parameters()]
        with pytest.raises(StateError, match=message):
            restore(taken, objects)
        after = objects["model"].parameters()
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_tensor_that_changed_under_its_name_is_looked_at_again(tmp_path: Path) -> None:
    """The walk remembers what tensors are; `double` changes them and keeps the objects."""
    bench = Bench(tmp_path, {"model": nn.Linear(2, 2)})
    taken = bench.take(0)
    bench.objects["model"].double()
    with pytest.raises(StateError, match="F64"):
        bench.tree.restore_from(open_sealed(taken.slot_path, taken.snapshot))
    changed = bench.take(1)
    assert changed.relaid and changed.layout_digest != taken.layout_digest
    wanted = bench.tree.local_digests()
    with torch.no_grad():
        bench.objects["model"].weight.zero_()
    bench.tree.restore_from(open_sealed(changed.slot_path, changed.snapshot))
    assert bench.tree.local_digests() == wanted


def test_an_objects_own_code_sees_tensors_whose_bytes_are_in_place(tmp_path: Path) -> None:
    class Copies(Odd):
        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = {name: value.clone() for name, value in state.items()}

    class Extra(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> torch.Tensor:
            return torch.full((3,), 7.0)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.seen = state.clone(), self.weight.detach().clone()

    copies, model = Copies(), Extra(2, 2)
    copies.state = {"x": torch.arange(4.0)}
    taken = Bench(tmp_path, {"model": model, "copies": copies}).take(0)
    fresh: Objects = {"model": Extra(2, 2), "copies": Copies()}
    restore(taken, fresh)
    assert torch.equal(fresh["copies"].state["x"], torch.arange(4.0))
    extra, weight = fresh["model"].seen
    assert torch.equal(extra, torch.full((3,), 7.0)) and torch.equal(weight, model.weight)


def test_a_growing_plain_state_gets_a_bigger_slot(tmp_path: Path) -> None:
    odd = Odd()
    bench = Bench(tmp_path, {"odd": odd})
    bench.take(0), bench.take(1)
    odd.state = {"seen": "x" * 100_000}
    grown = bench.take(2)
    assert grown.relaid
    back = Odd()
    restore(grown, {"odd": back})
    assert back.state == odd.state
    bench.take(3)
    assert not bench.take(4).relaid
