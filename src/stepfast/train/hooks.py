"""Hooks on tracked objects: safe points, and the places where faults are injected.

Installed once for each object; they outlive generations with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stepfast.core.terms import Step
from stepfast.errors import ScriptError
from stepfast.train import torch_private

if TYPE_CHECKING:
    from stepfast.train.host import Host
    from stepfast.train.kept import Tracked


def install_hooks(tracked: Tracked, host: Host, step_now: Callable[[], Step]) -> None:
    """An optimizer's step is a safe point: what it would do to the state is undone by a restore.

    One that steps inside of a backward is refused: from there a loop cannot be left, and a snapshot
    that is copied beside the backward would hold it. (The fence that waits for that copy stands
    before every optimizer's step, whether tracked or not: `train.snapshots`.)
    """
    names = {id(value): name for name, value in vars(tracked.namespace).items()}

    def before_step(optimizer: Any, *_: Any) -> None:
        if torch_private.is_in_backward():
            raise ScriptError(
                f"the tracked optimizer {names[id(optimizer)]!r} steps inside of backward(); call"
                " its step() behind loss.backward(), without register_post_accumulate_grad_hook"
            )
        host.optimizer_steps(names[id(optimizer)], optimizer)
        host.faults.reach("optimizer", step_now())
        host.check()

    for optimizer in tracked.optimizers:
        optimizer.register_step_pre_hook(before_step)
    if host.faults.is_armed and tracked.modules:
        _install_fault_points(tracked, host, step_now)


def _install_fault_points(tracked: Tracked, host: Host, step_now: Callable[[], Step]) -> None:
    def before_forward(*_: Any) -> None:
        host.faults.reach("forward", step_now())

    def after_forward(module: Any, args: Any, output: Any) -> None:
        tensor = _first_differentiable(output)
        if tensor is not None:
            tensor.register_hook(lambda grad: host.faults.reach("backward", step_now()))

    module = tracked.modules[0]
    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)


def _first_differentiable(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    values = output.values() if isinstance(output, dict) else output
    if not isinstance(output, dict | tuple | list):
        values = vars(output).values() if hasattr(output, "__dict__") else ()
    found = (_first_differentiable(v) for v in values)
    return next((t for t in found if t is not None), None)
