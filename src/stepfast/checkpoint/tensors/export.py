"""A stored checkpoint as whole tensors in torch's own formats.

Owns: which tensors go out and under which names; the files. Does not own: reading (`reshard`), the
command (`cli`). torch is needed: whoever must not load it runs this in a process of its own.

Invariants: bytes are those of the checkpoint, verified; what is one rank's alone stays behind. The
files are written where nothing is; a failure leaves none that looks whole. All tensors that are
exported are in memory at once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from stepfast.checkpoint.layout import TensorSpec, private_rank
from stepfast.checkpoint.loading import OnRead, StoredCheckpoint
from stepfast.checkpoint.overlap import true_shape
from stepfast.checkpoint.tensors.local import over
from stepfast.checkpoint.tensors.reshard import fill
from stepfast.checkpoint.tensors.wanted import Misfits, Wants
from stepfast.errors import ConfigError, OperatingError, StateError


class ExportFormat(StrEnum):
    """What to write.

    `dcp`: a directory of `torch.distributed.checkpoint`; names are `object.name`. `torch`: a file
    for `torch.load(..., weights_only=True)`, a dict of names for each object.
    """

    DCP = "dcp"
    TORCH = "torch"


def export(
    checkpoint: StoredCheckpoint,
    target: Path,
    form: ExportFormat,
    *,
    objects: Collection[str] = (),
    on_read: OnRead = lambda size_bytes: None,
) -> int:
    """Write the tensors of `objects` (none named: of all) to `target`; returns how many.

    ConfigError where `target` exists or an object is unknown; StateError where the checkpoint
    cannot be loaded.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; choose another target, or remove it")
    found = whole_tensors(checkpoint, objects=objects, on_read=on_read)
    hidden = target.with_name(f".{target.name}.part")
    try:
        match form:
            case ExportFormat.DCP:
                _write_dcp(hidden, found)
            case ExportFormat.TORCH:
                # Copies: torch.save writes the whole memory that a tensor is a view of.
                torch.save(_by_object({n: t.clone() for n, t in found.items()}), hidden)
        os.rename(hidden, target)
    except OSError as error:
        raise OperatingError(f"{target}: {error.strerror or error}") from error
    return len(found)


def whole_tensors(
    checkpoint: StoredCheckpoint,
    *,
    objects: Collection[str] = (),
    on_read: OnRead = lambda size_bytes: None,
) -> dict[str, Tensor]:
    """Every tensor that ranks share, whole, by name; of `objects` alone where such are named."""
    misfits = Misfits()
    wants = Wants(checkpoint.index, misfits, own_rank=None)
    shared = [name for name in checkpoint.index if private_rank(name) is None]
    known = {name.partition(".")[0] for name in shared}
    if strange := sorted(set(objects) - known):
        raise ConfigError(
            f"{checkpoint.place} has no tensors of {', '.join(strange)}; it has those of"
            f" {', '.join(sorted(known))}"
        )
    for name in shared:
        if not objects or name.partition(".")[0] in objects:
            entry = checkpoint.index[name][0].entry
            shape = true_shape(entry)
            wants.take(TensorSpec(name, entry.dtype, shape, shape, (0,) * len(shape)))
    if misfits:
        raise StateError(f"{checkpoint.place} cannot be exported: {misfits.words()}")
    source = fill(checkpoint, wants.found, b"", 0, on_read)
    return {entry.name: over(source.view(entry), entry) for entry in source.layout.entries}


def _by_object(found: dict[str, Tensor]) -> dict[str, Tensor | dict[str, Tensor]]:
    nested: dict[str, dict[str, Tensor]] = {}
    bare: dict[str, Tensor | dict[str, Tensor]] = {}
    for name, tensor in found.items():
        owner, _, rest = name.partition(".")
        if rest:
            nested.setdefault(owner, {})[rest] = tensor
        else:
            bare[name] = tensor
    return bare | nested


def _write_dcp(directory: Path, found: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # That there is no process group is as it is meant.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        # The names are the same as without: torch joins them, and remembers whose they are.
        state = _by_object(found)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
