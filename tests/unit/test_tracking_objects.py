"""What else can be tracked: averages, scalers, containers, wrapped models; and what cannot."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stepfast.checkpoint import plain
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.errors import ScriptError, StateError
from unit.tracked import Net, Objects, check_round_trip, restore, state_of, take, train


def trained(**more: Any) -> Objects:
    model = Net()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), **more}


# --------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("uses_buffers", [False, True])
def test_averages_of_torch(tmp_path: Path, uses_buffers: bool) -> None:
    def make() -> Objects:
        objects = trained()
        average = get_ema_multi_avg_fn(0.9)
        objects["ema"] = AveragedModel(
            objects["model"], multi_avg_fn=average, use_buffers=uses_buffers
        )
        return objects

    def work(objects: Objects) -> list[float]:
        losses = []
        for _ in range(2):
            losses += train(objects, 1)
            objects["ema"].update_parameters(objects["model"])
        return losses

    check_round_trip(tmp_path, make, work)


class Ema:
    """As many write it: a dict of tensors, and a number."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


def averaged_by_hand() -> Objects:
    objects = trained()
    return {**objects, "ema": Ema(objects["model"])}


def train_averaged(objects: Objects) -> list[float]:
    losses = []
    for _ in range(2):
        losses += train(objects, 1)
        objects["ema"].update(objects["model"])
    return losses


def test_averages_of_ones_own(tmp_path: Path) -> None:
    check_round_trip(tmp_path, averaged_by_hand, train_averaged)


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_averages_of_sharded_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def make() -> Objects:
        model = Net()
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        fully_shard(model, mesh=mesh)
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        return {**objects, "ema": Ema(model), "copies": {"first": model.embed.weight.detach() + 0}}

    check_round_trip(tmp_path, make, train_averaged)
    made = make()
    restore(take(tmp_path, made), made)
    assert all(isinstance(value, DTensor) for value in made["ema"].shadow.values())


# ------------------------------------------------------------------------------------- containers


def test_a_dict_and_a_list_come_back_in_place(tmp_path: Path) -> None:
    best: dict[str, Any] = {"loss": 3.0, "weights": torch.ones(2)}
    seen: list[Any] = [1, "two", {"three": (3, None)}]
    objects: Objects = {"best": best, "seen": seen, "empty": {}}
    inner, weights = seen[2], best["weights"]
    wanted = copy.deepcopy(objects)
    taken = take(tmp_path, objects)
    weights.zero_()
    best |= {"loss": 1.0, "more": [torch.zeros(1)]}
    inner["three"] = 4
    seen.append("late")
    seen[0] = None
    objects["empty"]["now"] = torch.ones(1)
    restore(taken, objects)
    assert objects["best"] is best and best["weights"] is weights and seen[2] is inner
    assert seen == wanted["seen"] and objects["empty"] == {}
    assert torch.equal(weights, torch.ones(2)) and best.keys() == {"loss", "weights"}
    fresh: Objects = {"best": {}, "seen": [], "empty": {}}
    restore(taken, fresh)
    assert fresh["seen"] == wanted["seen"]
    assert torch.equal(fresh["best"]["weights"], torch.ones(2))


def test_plain_values_come_back_with_their_types(tmp_path: Path) -> None:
    values: dict[Any, Any] = {
        "int": 2**70, "float": -0.0, "bool": True, "none": None, "text": "ü", "bytes": b"\0",
        "tuple": (1, (2.5, "x")), "set": {1, 2}, 7: "an integer's", "complex": 1j,
        "numpy": np.float32(0.1), "array": np.arange(4).reshape(2, 2), "deque": deque([1], 3),
        "counter": Counter("aab"), "ordered": OrderedDict(b=1, a=2),
    }  # fmt: skip
    wanted = copy.deepcopy(values)
    taken = take(tmp_path, {"values": values})
    for key in values:
        values[key] = "changed"
    for live in (values, {}):
        restore(taken, {"values": live})
        array, also = live.pop("array"), wanted["array"]
        assert array.dtype == also.dtype and (array == also).all()
        assert live == {k: v for k, v in wanted.items() if k != "array"}
        assert all(type(live[key]) is type(wanted[key]) for key in live)


@pytest.mark.parametrize("was_one", [False, True])
def test_two_names_of_one_tensor_do_not_spoil_each_other(tmp_path: Path, was_one: bool) -> None:
    first = torch.ones(2)
    held = {"current": first, "best": first if was_one else torch.zeros(2)}
    wanted = {name: value.clone() for name, value in held.items()}
    taken = take(tmp_path, {"held": held})
    held["best"] = held["current"]
    held["current"].fill_(7)
    restore(taken, {"held": held})
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)
    assert (held["best"] is held["current"]) == was_one


def test_a_list_where_a_dict_was_is_refused(tmp_path: Path) -> None:
    taken = take(tmp_path, {"x": {"a": 1}})
    with pytest.raises(StateError, match="x is a list here and a dict in the snapshot"):
        restore(taken, {"x": [1]})


# --------------------------------------------------------------------------- wrapped and compiled


def checkpointed(model: Any) -> Any:
    model.body[0] = checkpoint_wrapper(model.body[0])
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def all_of_them(model: Any) -> Any:
    inner = torch.compile(checkpoint_wrapper(model.body[0]), backend="eager")
    model.body[0] = checkpoint_wrapper(checkpoint_wrapper(inner))
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")


def flat(model: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options |= {"device_id": torch.device("cpu")}
    options |= {"sharding_strategy": ShardingStrategy.NO_SHARD}  # which FSDP1 takes for one rank
    return FullyShardedDataParallel(model, **options)


def flat_twice(model: Any, **options: Any) -> Any:
    model.body[0] = flat(model.body[0], **options)
    return flat(checkpointed(model), **options)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "checkpointed": checkpointed,
    "compiled": compiled,
    "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
    "all": all_of_them,
    "fsdp1": lambda model: flat_twice(model, use_orig_params=True),
    "fsdp1_flat": lambda model: flat_twice(model, use_orig_params=False),
}


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_wrapped_and_bare_models_have_each_others_state(tmp_path: Path, kind: str) -> None:
    def make(wrap: Callable[[Any], Any]) -> Objects:
        model = Net()
        model.body[2].eval()
        model = wrap(model)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def bare() -> Objects:
        return make(lambda model: model)

    def wrapped() -> Objects:
        return make(WRAPPERS[kind])

    for index, (here, there) in enumerate([(bare, wrapped), (wrapped, bare), (wrapped, wrapped)]):
        objects, other = here(), there()
        train(objects)
        taken = take(tmp_path / str(index), objects)
        wanted = in_any_order(objects)
        for module in other["model"].modules():
            module.train()
        restore(taken, other)
        assert in_any_order(other) == wanted
        assert train(other) == pytest.approx(train_again(taken, objects), abs=1e-6)


def in_any_order(objects: Objects) -> Any:
    """FSDP1 gives an optimizer its outer parameters first; what is kept is the same."""
    digests, values = state_of(objects)
    state = plain.decode(values)
    return digests, state["optimizer"], state["stepfast"]["modules"]


def train_again(taken: Any, objects: Objects) -> list[float]:
    restore(taken, objects)
    return train(objects)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch.compile's own
def test_restoring_a_compiled_model_in_place_compiles_nothing(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    for number, wrap in enumerate((lambda m, c: torch.compile(m, backend=c), compile_in_place)):
        torch.compiler.reset()
        counter = CompileCounter()
        model = wrap(Net(), counter)
        objects = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        train(objects)
        taken = take(tmp_path / str(number), objects)
        train(objects)
        assert counter.frame_count > 0
        counters.clear()
        compiled_before = counter.frame_count
        restore(taken, objects)
        train(objects)
        assert counter.frame_count == compiled_before
        assert not counters["stats"] and not counters["graph_break"], counters


def test_all_names_that_do_not_fit_are_said_before_anything_changes(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(2)])
    taken = take(tmp_path, {"model": model})
    for layers, message in [
        (7, r"has no model\.2\.weight, model\.3\.weight, model\.4\.weight and 2 more; was it"),
        (1, r"holds model\.1\.weight, which the model has not; was it of another model"),
    ]:
        other = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(layers)])
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(StateError, match=message):
            restore(taken, {"model": other})
        assert all(torch.equal(before[n], v) for n, v in other.state_dict().items())
    renamed = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})
    with pytest.raises(StateError, match=r"has no model\.a\.weight and holds model\.0\.weight,"):
        restore(taken, {"model": renamed})


@pytest.mark.usefixtures("one_rank_group")
def test_a_flat_parameter_cannot_have_two_ages(tmp_path: Path) -> None:
    def fine(bias_steps: int) -> Objects:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            model.bias.requires_grad_(step < bias_steps)
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer}

    def coarse() -> Objects:
        model = flat(nn.Linear(3, 2), use_orig_params=False)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    with pytest.raises(StateError, match=r"has one step, .*use_orig_params=True"):
        restore(take(tmp_path / "1", fine(2)), coarse())
    with pytest.raises(StateError, match=r"state for only a part of it; .*use_orig_params=True"):
        restore(take(tmp_path / "2", fine(0)), coarse())
    whole, objects = fine(3), coarse()
    restore(take(tmp_path / "3", whole), objects)
    (state,) = objects["optimizer"].state.values()
    parameters = [whole["model"].weight, whole["model"].bias]
    wanted = [whole["optimizer"].state[p]["exp_avg"].view(-1) for p in parameters]
    assert state["step"] == 3 and torch.equal(state["exp_avg"], torch.cat(wanted))


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_gradients_of_flat_parameters_are_gone(tmp_path: Path, use_orig_params: bool) -> None:
    model = flat(nn.Linear(3, 2), use_orig_params=use_orig_params)
    taken = take(tmp_path, {"model": model})
    model(torch.ones(3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    restore(taken, {"model": model})
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(3)).sum().backward()
    grads = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
    assert torch.equal(grads, torch.ones(8))


def compile_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


# --------------------------------------------------------------------------------- what is refused


class Own:
    """State of its own, whatever it is."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("value", [3, 2.5, "x", None, True, (1, 2), b"y"])
def test_a_plain_value_cannot_be_restored_in_place(value: object) -> None:
    with pytest.raises(ScriptError, match=r"track\(count=\.\.\.\) got .* track a dict instead"):
        StateTree({"count": value})


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"own": Own({"a": [1, {"f": print}]})}, r"own\.a\.1\.f holds a builtins"),
        ({"held": {"a": [object()]}}, r"held\.a\.0 holds a builtins\.object"),
        ({"held": [{1, 2}, lambda: 0]}, r"held\.1 holds a builtins\.function"),
        ({"held": {"t": torch.ones(2).to_sparse()}}, r"held\.t is .* cannot keep"),
        ({"net": Net}, "got the class Net"),
        ({"numbers": iter([1])}, r"track\(numbers=.*no state_dict"),
        ({"optimizer": torch.optim.SGD(Net().parameters())}, "track that module too"),
        ({"model": nn.LazyLinear(2)}, "run the model once"),
        ({"a.b": Net()}, "plain word"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_when_it_is_tracked(objects: Objects, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        StateTree(objects)


def test_a_container_in_itself_is_refused() -> None:
    held: list[Any] = []
    held.append(held)
    with pytest.raises(ScriptError, match="nested more than"):
        StateTree({"held": held})


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own
def test_an_optimizer_whose_state_needs_a_collective_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Net()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ScriptError, match="optimizer is a ZeroRedundancyOptimizer"):
        StateTree({"model": model, "optimizer": zero})


@pytest.mark.usefixtures("one_rank_group")
def test_fsdp1_of_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = flat(Net())
    StateTree({"model": model})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(ScriptError, match=r"knows of torch 2\.13 only, and this is 2\.99\.0"):
        StateTree({"model": model})


# ------------------------------------------------------------------------------------- and a scaler


def test_a_scaler_that_has_skipped_a_step(tmp_path: Path) -> None:
    def make() -> Objects:
        return trained(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1))

    def work(objects: Objects) -> list[float]:
        scales = []
        for factor in (float("inf"), 1.0):
            loss = objects["model"](torch.randint(0, 10, (4,))).sum() * factor
            objects["scaler"].scale(loss).backward()
            objects["scaler"].step(objects["optimizer"])
            objects["scaler"].update()
            objects["optimizer"].zero_grad()
            scales.append(objects["scaler"].get_scale())
        return scales

    check_round_trip(tmp_path, make, work)
