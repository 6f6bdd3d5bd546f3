"""What a rank says in a check: the tracked objects by their size, what is kept, on what device,
whether it fits the checkpoint that a run would resume from.

Owns: the report. Does not own: when it is made (`train.rank_host`), what is said to a person
(`cli`). Invariant: nothing is copied, and no collective is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.store import open_store
from stepfast.checkpoint.tensors.reshard import misfits_of
from stepfast.checkpoint.tensors.tree import Collected
from stepfast.core.messages import RankChecked, RankStart, TrackedObject
from stepfast.core.terms import Rank
from stepfast.errors import OperatingError
from stepfast.train import torch_private
from stepfast.train.data import TrackedLoader
from stepfast.train.kept import Kept, Tracked

_OBJECTS_MAX = 256  # the rest of them is summed up, for a message has its limit
_TEXT_CHARS_MAX = 8000  # the same
_OTHERS = "the rest"
_OTHERS_TYPE = "generators, plain values"


class Fit(NamedTuple):
    """How what is tracked fits the checkpoint that a run would resume from."""

    misfits: str = ""
    remarks: tuple[str, ...] = ()


def how_it_fits(tracked: Tracked, order: RankStart) -> Fit:
    """Look at the checkpoint, where there is one, and change nothing."""
    if order.settings.check_against is None:
        return Fit()
    url, snapshot = order.settings.check_against
    remarks: list[str] = []
    try:
        misfits = misfits_of(
            tracked.tree,
            StoredCheckpoint.open(open_store(url), snapshot),
            world_size=order.world_size,
            start_fresh=order.settings.checkpoints.start_fresh,
            on_warning=remarks.append,
        )
    except OperatingError as error:  # a run would try an older one, or later
        return Fit(remarks=(str(error)[:_TEXT_CHARS_MAX],))
    return Fit(misfits[:_TEXT_CHARS_MAX], tuple(text[:_TEXT_CHARS_MAX] for text in remarks))


def what_is_kept(
    kept: Kept, order: RankStart, backend: str, seconds: float, fit: Fit
) -> RankChecked:
    """The report of this rank, at the boundary behind its first turn.

    Raises ScriptError for state that cannot be kept, as a snapshot would.
    """
    tracked = kept.tracked
    assert tracked is not None, "steps begin after track"
    collected = tracked.tree.collect()
    return RankChecked(
        generation=order.generation,
        rank=Rank(order.rank),
        seconds=seconds,
        objects=objects_of(tracked, collected),
        loaders=tuple(
            f"{name} ({loader.loader_type})"
            for name, loader in vars(tracked.namespace).items()
            if isinstance(loader, TrackedLoader)
        ),
        slot_bytes=collected.layout.file_bytes,
        layout=collected.layout.digest,
        once=tuple(name.partition(":")[2] for name in kept.built),
        keep_obstacle=kept.obstacle(),
        device=_device_name(order),
        backend=backend,
        torch_version=str(torch.__version__),
        torch_obstacle=torch_private.version_obstacle(),
        misfits=fit.misfits,
        remarks=fit.remarks,
    )


def objects_of(tracked: Tracked, collected: Collected) -> tuple[TrackedObject, ...]:
    """Each tracked object with its part of the layout, in the order of `track`; what is of none of
    them last.
    """
    values = vars(tracked.namespace)
    shares: dict[str, tuple[int, int]] = dict.fromkeys(list(values)[:_OBJECTS_MAX], (0, 0))
    others, others_bytes = 0, collected.layout.plain.size_bytes
    for entry in collected.layout.entries:
        name = entry.name.partition(".")[0]
        if name in shares:
            tensors, size_bytes = shares[name]
            shares[name] = (tensors + 1, size_bytes + entry.size_bytes)
        else:
            others, others_bytes = others + 1, others_bytes + entry.size_bytes
    found = [
        TrackedObject(
            name=name, type=_type_of(values[name]), tensors=tensors, size_bytes=size_bytes
        )
        for name, (tensors, size_bytes) in shares.items()
    ]
    rest = TrackedObject(name=_OTHERS, type=_OTHERS_TYPE, tensors=others, size_bytes=others_bytes)
    return (*found, rest)


def _type_of(value: object) -> str:
    return value.loader_type if isinstance(value, TrackedLoader) else type(value).__name__


def _device_name(order: RankStart) -> str:
    if order.settings.device != "cuda":
        return order.settings.device
    return f"cuda ({torch.cuda.get_device_name(order.local_rank)})"
