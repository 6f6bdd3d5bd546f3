"""Every optimizer and every LR scheduler of torch goes on bit for bit."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.errors import ScriptError
from unit.tracked import Net, Objects, check_round_trip, restore, take, train

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, t0=1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), fused=False, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def of_kind(name: str) -> Objects:
    model = Net()
    return {"model": model, "optimizer": OPTIMIZERS[name](list(model.parameters()))}


def test_no_optimizer_of_torch_is_left_out() -> None:
    classes = {n for n in torch.optim.__all__ if inspect.isclass(getattr(torch.optim, n))}
    assert classes - {"Optimizer", "SparseAdam"} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    check_round_trip(tmp_path, lambda: of_kind(name))


def test_sparse_gradients(tmp_path: Path) -> None:
    def make() -> Objects:
        model = nn.Embedding(10, 4, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(list(model.parameters()))}

    def work(objects: Objects) -> list[float]:
        losses = []
        for _ in range(2):
            loss = objects["model"](torch.randint(0, 10, (3,))).pow(2).sum()
            loss.backward()
            objects["optimizer"].step()
            objects["optimizer"].zero_grad()
            losses.append(loss.item())
        return losses

    check_round_trip(tmp_path, make, work)


def test_groups_and_parameters_that_begin_later(tmp_path: Path) -> None:
    """Frozen from the start, frozen after a step, in a group of its own: state that is missing."""

    def make() -> Objects:
        model = Net()
        model.body[0].bias.requires_grad_(False)
        rest = [p for n, p in model.named_parameters() if n != "embed.weight"]
        groups = [{"params": [model.embed.weight], "lr": 0.1}, {"params": rest}]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    def work(objects: Objects) -> list[float]:
        losses = train(objects, 1)
        objects["model"].body[1].weight.requires_grad_(False)
        losses += train(objects, 1)
        objects["model"].body[1].weight.requires_grad_(True)
        return losses

    check_round_trip(tmp_path, make, work)


def test_with_gradients_present_and_before_the_first_step(tmp_path: Path) -> None:
    objects = of_kind("AdamW")
    objects["model"](torch.zeros(3, dtype=torch.int64)).sum().backward()
    taken = take(tmp_path, objects)
    before = copy.deepcopy(objects["model"].state_dict())
    train(objects)
    restore(taken, objects)
    assert dict(objects["optimizer"].state) == {}
    assert all(p.grad is None for p in objects["model"].parameters())
    assert all(torch.equal(before[n], v) for n, v in objects["model"].state_dict().items())


def test_names_given_to_an_optimizer_are_no_state(tmp_path: Path) -> None:
    """They would bring a wrapper's names along."""
    model = Net()
    named = [(f"_orig_mod.{n}", p) for n, p in model.named_parameters()]
    taken = take(tmp_path, {"model": model, "optimizer": torch.optim.AdamW(named)})
    fresh = Net()
    optimizer = torch.optim.AdamW(fresh.named_parameters())
    restore(taken, {"model": fresh, "optimizer": optimizer})
    assert "embed.weight" in optimizer.param_groups[0]["param_names"]


class Warm:
    """A schedule's factor with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def sequence(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, total_iters=2), schedulers.LambdaLR(optimizer, Warm())]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def chain(optimizer: Any) -> Any:
    parts = [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(parts, optimizer)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": chain,
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=3),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 1 / (x + 1)),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, Warm()),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3, 3]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=9, power=2.0),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=math.inf),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=5),
    "SequentialLR": sequence,
    "StepLR": lambda o: schedulers.StepLR(o, 2),
}


def scheduled(name: str, learning_rate: Any = 0.1) -> Objects:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "schedule": SCHEDULES[name](optimizer)}


def test_no_schedule_of_torch_is_left_out() -> None:
    names = {n for n in schedulers.__all__ if inspect.isclass(getattr(schedulers, n))}
    assert (names - {"LRScheduler"}) | {"SWALR"} == set(SCHEDULES)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_goes_on_bitwise(tmp_path: Path, name: str) -> None:
    def work(objects: Objects) -> Any:
        losses, rates = train(objects, 3), objects["schedule"].optimizer.param_groups
        return losses, [float(group["lr"]) for group in rates]

    check_round_trip(tmp_path, lambda: scheduled(name), work)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own, in torch 2.8
@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "SequentialLR"])
def test_a_learning_rate_that_is_a_tensor(tmp_path: Path, name: str) -> None:
    check_round_trip(tmp_path, lambda: scheduled(name, torch.tensor(0.1)))


def test_a_schedule_without_its_optimizer_is_refused() -> None:
    objects = scheduled("StepLR")
    optimizer = objects.pop("optimizer")
    with pytest.raises(ScriptError, match="schedule is the schedule of an optimizer that is not"):
        StateTree({**objects, "scaler": torch.amp.GradScaler("cpu")})

    class Holder:
        def state_dict(self) -> Any:
            return optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None:
            optimizer.load_state_dict(state)

    StateTree({**objects, "holder": Holder()})


def test_of_a_schedule_what_is_plain_is_kept_and_an_object_refused(tmp_path: Path) -> None:
    class Mine(schedulers.StepLR):
        shape: Any = staticmethod(lambda step: step)
        extra: Any = None

    def make(extra: object) -> Objects:
        objects = of_kind("SGD")
        objects["schedule"] = Mine(objects["optimizer"], 2)
        objects["schedule"].shape = lambda step: step / 2  # in its state_dict, as all attributes
        objects["schedule"].extra = extra
        return objects

    check_round_trip(tmp_path, lambda: make({"nested": [print, 1.0]}["nested"][1:]))
    with pytest.raises(ScriptError, match=r"schedule\.extra\.net holds a unit\.tracked\.Net"):
        StateTree(make({"net": Net()}))
