"""Whether gradients are kept from one turn to the next: a fault between would lose them.

Owns: seeing it, and the words. Does not own: dropping gradients (`checkpoint.tensors`).

A turn in which an optimizer made no step is no sign by itself: a scaler may have skipped it, and
the gradients may be zeroed next. It is one if the same gradient is still there when it does step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.weak import TensorWeakRef

Note = Callable[[str, str], object]


class GradientWatch:
    """One for the process: it says so once."""

    def __init__(self, note: Note) -> None:
        """`note(topic, text)`: where it is said."""
        self._note = note
        self._has_told = False
        self._stepped: set[int] = set()
        # Optimizers that did not step last turn, with a gradient that they had at its end.
        self._left: WeakKeyDictionary[Any, tuple[Tensor, TensorWeakRef]] = WeakKeyDictionary()

    def before_step(self, name: str, optimizer: Any) -> None:
        """The tracked optimizer `name` is about to step."""
        self._stepped.add(id(optimizer))
        left = self._left.pop(optimizer, None)
        if left is None or self._has_told:
            return
        parameter, gradient = left
        if parameter.grad is not None and parameter.grad is gradient():
            self._has_told = True
            self._note(
                "gradients",
                f"{name} keeps gradients from one turn of run.steps to the next, and a snapshot has"
                " none: after a fault between the two the result would be another one. Let one turn"
                " be one optimizer step, with its micro-batches in a loop inside of the turn",
            )

    def turn_ended(self, optimizers: Iterable[Any]) -> None:
        """At every boundary; costs next to nothing where each optimizer has stepped."""
        for optimizer in optimizers:
            if id(optimizer) not in self._stepped:
                parameter = _first_with_gradient(optimizer)
                if parameter is not None and parameter.grad is not None:
                    self._left[optimizer] = parameter, TensorWeakRef(parameter.grad)
        self._stepped.clear()

    def forget(self) -> None:
        """What was built is dropped."""
        self._left.clear()
        self._stepped.clear()


def _first_with_gradient(optimizer: Any) -> Tensor | None:
    groups = (group["params"] for group in optimizer.param_groups)
    return next((p for p in chain.from_iterable(groups) if p.grad is not None), None)
