"""What `run.log` was given, until its turn is whole and its tensors are there.

Owns: values of the current turn; copies from the device that are still on their way.
Invariant: nothing here waits for the device inside the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stepfast.core.terms import Step
from stepfast.errors import ScriptError

_TEXT_CHARS_MAX = 2_000  # a log line is no place for more
_TURNS_PENDING_MAX = 64  # on a device that lags so far behind, the oldest turn is waited for

Value = float | int | str | bool


@dataclass(slots=True)
class _Turn:
    step: Step
    values: dict[str, Value | torch.Tensor] = field(default_factory=dict)
    event: torch.cuda.Event | None = None

    def is_there(self) -> bool:
        return self.event is None or self.event.query()


class LogBuffer:
    """Values by turn, in order."""

    def __init__(self) -> None:
        """Empty."""
        self._turns: list[_Turn] = []

    def put(self, step: Step, values: dict[str, Any]) -> None:
        """Take values of a turn in. Raises ScriptError for what is no single value."""
        if not self._turns or self._turns[-1].step != step:
            self._turns.append(_Turn(step))
        turn = self._turns[-1]
        for name, value in values.items():
            turn.values[name] = _taken(name, value, turn)

    def take(self, before: Step) -> Iterator[tuple[Step, dict[str, Value]]]:
        """The turns before `before` whose values are there, oldest first."""
        while self._turns and self._turns[0].step < before:
            turn = self._turns[0]
            if not turn.is_there() and len(self._turns) <= _TURNS_PENDING_MAX:
                return
            del self._turns[0]
            yield turn.step, {name: _plain(value) for name, value in turn.values.items()}


def _taken(name: str, value: Any, turn: _Turn) -> Value | torch.Tensor:
    if isinstance(value, str) and len(value) > _TEXT_CHARS_MAX:
        raise ScriptError(f"run.log({name}=...) is text of {len(value)} characters; log less")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no number for it
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return _taken_tensor(name, value, turn)
    if hasattr(value, "item"):
        return _taken(name, value.item(), turn)
    raise ScriptError(
        f"run.log({name}=...): {type(value).__name__} is not a number, string or tensor"
    )


def _taken_tensor(name: str, value: torch.Tensor, turn: _Turn) -> Value | torch.Tensor:
    if hasattr(value, "to_local"):
        raise ScriptError(
            f"run.log({name}=...) is a DTensor; log a plain tensor, such as full_tensor()"
        )
    if value.numel() != 1:
        raise ScriptError(f"run.log({name}=...) has {value.numel()} elements; log one")
    if value.device.type == "cpu":
        return _taken(name, value.detach().item(), turn)
    # Never run: on a device the copy is only started, and read when its event has passed.
    copy = value.detach().to("cpu", non_blocking=True)
    turn.event = torch.cuda.Event()
    turn.event.record()
    return copy


def _plain(value: Value | torch.Tensor) -> Value:
    return value.detach().item() if isinstance(value, torch.Tensor) else value
