"""Gradients that outlive a turn are seen when an optimizer uses them, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepfast.train.gradients import GradientWatch

Turn = Callable[[nn.Module, torch.optim.Optimizer], None]


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def whole_zeroed_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def only_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a GradScaler does it where gradients overflowed."""
    optimizer.zero_grad()
    backward(model)


def idle(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Another optimizer's turn."""


def told(turns: list[Turn]) -> list[str]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[str] = []
    watch = GradientWatch(lambda topic, text: said.append(f"{topic}: {text}"))
    optimizer.register_step_pre_hook(lambda *_: watch.before_step("opt", optimizer))
    for turn in turns:
        turn(model, optimizer)
        watch.turn_ended([optimizer])
    return said


@pytest.mark.parametrize(
    "turns",
    [
        [only_backward, whole],
        [whole, only_backward, only_backward, whole],
        [only_backward, whole, only_backward, whole],  # once
        [only_backward, idle, whole],
    ],
)
def test_gradients_that_are_kept_are_said_once(turns: list[Turn]) -> None:
    (text,) = told(turns)
    assert text.startswith("gradients: opt keeps gradients") and "micro-batches" in text


@pytest.mark.parametrize(
    "turns",
    [
        [whole, whole],
        [whole_zeroed_first, whole_zeroed_first],
        [skipped, whole_zeroed_first, skipped, skipped, whole_zeroed_first],
        [whole, idle, whole],
        [only_backward],  # nothing has come of it yet
    ],
)
def test_a_turn_without_a_step_is_no_sign(turns: list[Turn]) -> None:
    assert told(turns) == []
