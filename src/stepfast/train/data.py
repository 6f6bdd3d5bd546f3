"""A tracked loader: an iterator over its epochs whose position is state.

Owns: the epoch, the loader's iterator and its workers. Does not own: the loader's own state format.
Invariants: an iterator never outlives its generation; the sampler knows the epoch before the
epoch's first sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stepfast.core.faults import Whereabouts
from stepfast.core.quantities import counted
from stepfast.errors import ScriptError, StateError
from stepfast.train import torch_private
from stepfast.train.whereabouts import Whereabout


def is_loader(value: object) -> bool:
    """Whether `track` hands it back as an iterator: it can be iterated and has state."""
    if isinstance(value, torch.nn.Module):
        return False  # a Sequential can be iterated too
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_state and hasattr(value, "__iter__") and not hasattr(value, "__next__")


class TrackedLoader:
    """Endless iterator over the epochs of a loader with `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, loader: Any, whereabout: Whereabout) -> None:
        """`loader`: torchdata's StatefulDataLoader, or anything of its shape."""
        self._name = name
        self._loader = loader
        self._whereabout = whereabout
        self._iterator: Iterator[Any] | None = None
        # Of the epoch's beginning: the workers are seeded from it.
        self._rng_before: bytes | None = None
        self._orders_before: list[bytes] = []
        self.epoch = 0

    @property
    def loader_type(self) -> str:
        """The class of what was tracked."""
        return type(self._loader).__name__

    def __iter__(self) -> TrackedLoader:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch; behind the last one the next epoch begins."""
        with self._whereabout.said(Whereabouts.DATA):
            for _ in range(3):
                if self._iterator is None:
                    self._begin_epoch()
                assert self._iterator is not None, "an epoch was begun"
                try:
                    return next(self._iterator)
                except StopIteration:
                    # A position restored behind the last batch ends at once: at most one more epoch
                    # is tried.
                    self._iterator = None
                    self.epoch += 1
        raise ScriptError(f"the tracked loader {self._name!r} yields no batch in a whole epoch")

    def state_dict(self) -> dict[str, Any]:
        """Epoch and the loader's own position; asking an unused loader would start its workers, so
        it is not asked.
        """
        position = None if self._iterator is None else self._loader.state_dict()
        orders = self._orders()  # before its first batch it has no position, and yet an order
        return {
            "epoch": self.epoch,
            "loader": position,
            "rng_before": self._rng_before,
            "orders_before": orders if position is None else self._orders_before,
            "orders": orders,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; the old iterator and its workers are gone first.

        The new iterator is made here, from the generator's state at the epoch's beginning: making
        one draws from the generator, and its workers get their seeds from that draw. The caller
        restores the generator afterwards.
        """
        self.drop()
        self.epoch = int(state["epoch"])
        self._set_orders(state["orders_before"])
        if state["loader"] is None:
            return
        self._loader.load_state_dict(state["loader"])
        torch.set_rng_state(_as_state(state["rng_before"]))
        self._begin_epoch()
        self._set_orders(state["orders"])

    def state_in_other_world(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is left of a rank's position where the job has another number of ranks: the epoch,
        which begins anew in the order that it had, for ranks divide it in another way.
        """
        return {**state, "loader": None}

    def drop(self) -> None:
        """End the iterator and its workers now, whatever state they are in."""
        kept = getattr(self._loader, "_iterator", None)
        iterators = {id(iterator): iterator for iterator in (self._iterator, kept)}
        self._iterator = None
        if hasattr(self._loader, "_iterator"):
            self._loader._iterator = None
        for iterator in iterators.values():
            torch_private.end_loader_workers(iterator)

    def _begin_epoch(self) -> None:
        self._rng_before = torch.get_rng_state().numpy().tobytes()
        self._orders_before = self._orders()
        self._set_sampler_epoch()
        self._iterator = iter(self._loader)

    def _orders(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in self._generators()]

    def _set_orders(self, orders: list[bytes]) -> None:
        generators = self._generators()
        if len(generators) != len(orders):
            raise StateError(
                f"the tracked loader {self._name!r} has"
                f" {counted(len(generators), 'generator')} of its own, in the snapshot it has"
                f" {len(orders)}"
            )
        for generator, order in zip(generators, orders, strict=True):
            generator.set_state(_as_state(order))

    def _generators(self) -> list[torch.Generator]:
        """What the loader and its samplers draw from, besides the process's own generator."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        owners = [self._loader, getattr(self._loader, "sampler", None), batch_sampler]
        owners.append(getattr(batch_sampler, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())

    def _set_sampler_epoch(self) -> None:
        for owner in ("sampler", "batch_sampler", "dataset"):
            set_epoch = getattr(getattr(self._loader, owner, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
                return


def _as_state(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
