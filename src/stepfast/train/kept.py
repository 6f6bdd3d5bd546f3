"""What a process keeps across its generations: built objects, meshes, tracked state.

Owns: the results of `run.once` with the groups made meanwhile. Does not own: whether they may be
kept (the coordinator decides for all ranks at once).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.messages import NOTHING_BUILT
from stepfast.core.terms import Step
from stepfast.train import torch_private
from stepfast.train.data import TrackedLoader

if TYPE_CHECKING:
    from stepfast.train.replay import Record


@dataclass(slots=True)
class Built:
    """One call of `run.once`, or one mesh made outside of any."""

    value: Any
    record: Record | None
    has_state: bool = False  # `run.track` was called in it
    flags: Any = None  # of its modules, as `build` left them


@dataclass(slots=True)
class Tracked:
    """What `run.track` was given."""

    tree: StateTree
    namespace: SimpleNamespace
    loaders: tuple[TrackedLoader, ...]
    modules: tuple[nn.Module, ...]
    optimizers: tuple[Any, ...]


@dataclass(slots=True)
class Kept:
    """Everything that may outlive a generation."""

    built: dict[str, Built] = field(default_factory=dict)
    meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], Built] = field(default_factory=dict)
    tracked: Tracked | None = None
    revived: list[object] = field(default_factory=list)  # records replayed in this generation
    step: Step = Step(0)  # the turn being run

    def obstacle(self) -> str | None:
        """Why none of it may be used in another generation; None: it may. Call after `dissolve`."""
        if self.tracked is None or not self.built:
            return NOTHING_BUILT
        if not any(built.has_state for built in self.built.values()):
            return "track was not called inside a function given to run.once"
        for record in self._records():
            if record.replay_obstacle is not None:
                return record.replay_obstacle
        return torch_private.keep_obstacle(self.tracked.modules)

    @property
    def has_collectives(self) -> bool:
        """Whether building ran a collective, so that ranks must build together or not at all."""
        return any(record.has_collectives for record in self._records())

    def drop_loaders(self) -> None:
        """End iterators and workers of the generation that is over."""
        for loader in self.tracked.loaders if self.tracked else ():
            loader.drop()

    def _records(self) -> Iterator[Record]:
        for built in (*self.built.values(), *self.meshes.values()):
            if built.record is not None:
                yield built.record
