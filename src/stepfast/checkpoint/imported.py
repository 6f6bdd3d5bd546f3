"""A foreign checkpoint's tensors as a committed checkpoint of stepfast's, that a run starts from.

Owns: which of its tensors are taken and what they are called; the one file that they go into, as a
single rank would have saved it. Does not own: reading them (`foreign`), the moment at which the
checkpoint exists (`commit`).

Invariants: the manifest is last, so that an import that dies leaves nothing that exists; no more
than two tensors are in memory. The plain values say that there are none: a restore leaves module
flags and generators as the script has them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint import plain
from stepfast.checkpoint.catalog import survey
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.foreign.dcp import METADATA_FILE, read_dcp
from stepfast.checkpoint.foreign.hugging_face import read_hugging_face, read_safetensors
from stepfast.checkpoint.foreign.source import ForeignTensor, Source, pieces
from stepfast.checkpoint.foreign.torch_file import read_torch_file
from stepfast.checkpoint.layout import Layout, TensorSpec
from stepfast.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFile,
    checkpoint_name,
    shard_name,
)
from stepfast.checkpoint.store import CheckpointStore, ObjectWriter
from stepfast.checkpoint.writer import ShardHasher
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import ConfigError
from stepfast.runtime.ports import Buffer

GENERATION = Generation(0)  # below that of any run, whose first is 1
JOB_ID = "import"
_NOT_TRACKED = ("stepfast", "__metadata__")  # names that no object of a run can have
_SHOWN_MAX = 8


class Selection(NamedTuple):
    """Which tensors become `tracked`'s: those that begin with `prefix`, without it.

    `prefix` None: those in the dict of that name, if the saved state was of dicts, else all that
    lie in no dict. What begins with one of `without` (after the prefix) is left out.
    """

    tracked: str = "model"
    prefix: str | None = None
    without: tuple[str, ...] = ()


class Chosen(NamedTuple):
    """The tensors by their new names inside the object, and the old names of what was left out."""

    tensors: dict[str, tuple[str, ForeignTensor]]
    left_out: list[str]


def open_source(path: Path) -> Source:
    """What lies at `path`: a model's directory, a distributed checkpoint, or one file of either
    kind of tensors. ConfigError where it is none of them.
    """
    if path.is_dir():
        return read_dcp(path) if _is_dcp(path) else read_hugging_face(path)
    if not path.exists():
        raise ConfigError(f"there is no {path}; a source is a path of this machine")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return read_torch_file(path)


def choose(source: Source, selection: Selection) -> Chosen:
    """Which tensors are taken. ConfigError where there are none, with what there is."""
    if not selection.tracked or "." in selection.tracked or selection.tracked in _NOT_TRACKED:
        raise ConfigError(f"no object can be tracked as {selection.tracked!r}; use a plain word")
    renamed = _renamed(source, selection)
    taken = {n: name for n, name in renamed.items() if not name.startswith(selection.without)}
    if selection.without and len(taken) == len(renamed):
        raise ConfigError(f"{source.place} has nothing that --without could leave out")
    if not taken:
        heads = sorted({name.partition(".")[0] for name in source.tensors})
        raise ConfigError(
            f"{source.place}: no tensor is chosen; the names begin with {_listed(heads)}:"
            " choose with --prefix"
        )
    left_out = [name for name in source.tensors if name not in taken]
    tensors = {name: (old, source.tensors[old]) for old, name in taken.items()}
    return Chosen(tensors, [*left_out, *source.plain_values])


def import_checkpoint(
    source: Source,
    chosen: Chosen,
    store: CheckpointStore,
    *,
    tracked: str,
    step: int = 0,
    version: str = "unknown",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Make the checkpoint of `step`; `progress(done, total)` is told the bytes. `version` is
    stepfast's, for people.

    ConfigError where the store has one of that step, or those of a run, which would go on from
    them. StateError where the source turns out damaged.
    """
    snapshot = SnapshotId(GENERATION, Step(step))
    _check_store(store, snapshot)
    by_name = {f"{tracked}.{name}": found for name, found in chosen.tensors.items()}
    layout, frame = _laid_out(tracked, {name: tensor for name, (_, tensor) in by_name.items()})
    directory, name = checkpoint_name(step, GENERATION), shard_name(0, 1)
    store.delete_remains(directory)  # of an import that was killed
    making = store.writer(f"{directory}/{name}", layout.file_bytes)
    with _nothing_left(store, directory), making as writer:
        hashed = _Hashed(writer, layout.file_bytes, progress)
        hashed.write(_sealed_header(layout, snapshot))
        for entry in layout.entries:
            old, tensor = by_name[entry.name]
            for piece in pieces(source.place, old, tensor):
                hashed.write(piece)
        hashed.write(frame)
    assert hashed.hasher.size_bytes == layout.file_bytes, "every byte has its place"
    file = hashed.hasher.file(0, name, layout.digest)
    return commit(store, _manifest(source, snapshot, file, version))


def _is_dcp(path: Path) -> bool:
    return (path / METADATA_FILE).exists() or any(path.glob("__*.metadata"))


def _renamed(source: Source, selection: Selection) -> dict[str, str]:
    """The new name of each tensor that may be taken."""
    prefix = selection.prefix
    if prefix is None:
        if selection.tracked in source.owners.values():
            start = f"{selection.tracked}."
            return {
                name: name.removeprefix(start)
                for name in source.tensors
                if source.owners.get(name) == selection.tracked
            }
        return {name: name for name in source.tensors if name not in source.owners}
    found = {name: name.removeprefix(prefix) for name in source.tensors if name.startswith(prefix)}
    return {name: new for name, new in found.items() if new}


def _check_store(store: CheckpointStore, snapshot: SnapshotId) -> None:
    seen = survey(store)
    there = sorted(manifest.snapshot for manifest in seen.manifests)
    if seen.damaged:
        raise ConfigError(f"{store.url} has damaged checkpoints; import into another place")
    if there and there[-1].generation > GENERATION:
        raise ConfigError(
            f"{store.url} has a run's checkpoints, up to step {there[-1].step}, and a run would go"
            " on from those; import into a place of its own"
        )
    if snapshot in there:
        raise ConfigError(
            f"{store.url} has a checkpoint of step {snapshot.step} already; choose another --step"
            " or another place"
        )


def _laid_out(tracked: str, tensors: Mapping[str, ForeignTensor]) -> tuple[Layout, bytes]:
    """The layout, and what stands behind the tensors."""
    own = {
        "modules": {tracked: {"buffers": [], "eval": [], "odd_wrappers": [], "extra": {}}},
        "rng": {"generators": {}},
        "imported": True,
    }
    blob = plain.encode({"stepfast": own})
    specs = [
        TensorSpec(name, t.dtype, t.shape, t.shape, (0,) * len(t.shape))
        for name, t in tensors.items()
    ]
    layout = Layout.build(specs, len(blob))
    return layout, layouts.frame_plain(blob).ljust(layout.plain.size_bytes, b"\0")


def _sealed_header(layout: Layout, snapshot: SnapshotId) -> bytes:
    header, seal = layout.header, layouts.seal_bytes(snapshot, layout.digest)
    return header[: layouts.SEAL_START] + seal + header[layouts.SEAL_END :]


def _manifest(source: Source, snapshot: SnapshotId, file: ShardFile, version: str) -> Manifest:
    return Manifest(
        job_id=JOB_ID,
        step=snapshot.step,
        generation=snapshot.generation,
        world_size=1,
        nproc_per_node=1,
        stepfast_version=version,
        torch_version="none",
        created_at_s=time.time(),
        files=(file,),
        user={"imported from": f"{source.kind} {Path(source.place).name}"},
    )


class _Hashed:
    """An object in the making whose checksums are kept."""

    def __init__(
        self, writer: ObjectWriter, size_bytes: int, progress: Callable[[int, int], None]
    ) -> None:
        self.hasher = ShardHasher()
        self._writer, self._size_bytes, self._progress = writer, size_bytes, progress

    def write(self, data: Buffer) -> None:
        self.hasher.update(data)
        self._writer.write(data)
        self._progress(self.hasher.size_bytes, self._size_bytes)


@contextlib.contextmanager
def _nothing_left(store: CheckpointStore, directory: str) -> Iterator[None]:
    """What was begun and cannot be ended is removed, but for what somebody else has committed."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done and store.size_bytes(f"{directory}/{MANIFEST_FILE}") is None:
            store.delete_below(directory)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_SHOWN_MAX])
    return shown + (f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else "")
