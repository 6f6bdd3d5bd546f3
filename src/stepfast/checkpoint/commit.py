"""The one moment at which a checkpoint begins to exist.

Owns: what has to be true of every rank's file before, and of all together; the manifest that is
written last. Does not own: who calls it and when (one at a time, the coordinator).

Invariants:
- No manifest names a file that is absent, has another size, or holds another snapshot or layout.
- The files together have every element of every tensor (`coverage`).
- Doing it again, with the same files, changes nothing and is no error: whoever died in the middle,
  or never got its answer, asks again.
"""

from __future__ import annotations

from functools import partial

import msgspec

from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.coverage import Coverage, listed
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFile,
    check_files,
    checkpoint_name,
    decode_manifest,
    encode_manifest,
    snapshot_words,
)
from stepfast.checkpoint.parallel import SMALL_REQUESTS, in_parallel
from stepfast.checkpoint.store import CheckpointStore
from stepfast.core.terms import SnapshotId
from stepfast.errors import StateError

_HEADER_GUESS_BYTES = 1 << 16


def commit(store: CheckpointStore, manifest: Manifest) -> Manifest:
    """Make the checkpoint exist whose files `manifest` names; its `tensors` are filled in here.

    Returns what stands in the store: an earlier commit of the same files counts as this one.
    StateError where a file is not what it should be, a part of a tensor is in no file, ranks have
    different tensors of one name, or another checkpoint has the name.
    """
    assert not manifest.tensors, "the tensors are read from the files"
    check_files(manifest.files, manifest.world_size)
    check = partial(_checked_layout, store, manifest.snapshot)
    coverage = Coverage()
    for layout in in_parallel(check, manifest.files, SMALL_REQUESTS):
        coverage.add(layout)
    if problems := coverage.problems():
        raise StateError(f"{store.url}/{manifest.name} is not whole: {listed(problems)}")
    whole = msgspec.structs.replace(manifest, tensors=coverage.tensors)
    name = f"{manifest.name}/{MANIFEST_FILE}"
    if store.put_if_absent(name, encode_manifest(whole)):
        return whole
    found = decode_manifest(store.read(name))
    if msgspec.structs.replace(found, created_at_s=whole.created_at_s) != whole:
        raise StateError(
            f"{store.url}/{name} is another checkpoint's (job {found.job_id}); give this job a"
            " place of its own for its checkpoints"
        )
    return found


def read_layout(store: CheckpointStore, name: str) -> tuple[Layout, SnapshotId | None]:
    """The layout and the seal in the header of a rank's file; StateError says what is wrong."""
    size_bytes = store.size_bytes(name)
    if size_bytes is None:
        raise StateError(f"{store.url}/{name} is missing")
    raw = store.read(name, 0, min(size_bytes, _HEADER_GUESS_BYTES))
    try:
        wanted = layouts.header_bytes(raw)
        if wanted > size_bytes:
            raise ValueError("it is cut within its header")
        if wanted > len(raw):
            raw += store.read(name, len(raw), wanted - len(raw))
        layout = layouts.parse_header(raw[:wanted])
        if layout.file_bytes != size_bytes:
            raise ValueError(f"it has {size_bytes} bytes, not the {layout.file_bytes} it says")
    except ValueError as error:
        raise StateError(f"{store.url}/{name}: {error}") from error
    return layout, layouts.parse_seal(raw[layouts.SEAL_START : layouts.SEAL_END], layout.digest)


def _checked_layout(store: CheckpointStore, snapshot: SnapshotId, file: ShardFile) -> Layout:
    name = f"{checkpoint_name(snapshot.step, snapshot.generation)}/{file.name}"
    layout, held = read_layout(store, name)
    if held != snapshot:
        raise StateError(
            f"{store.url}/{name} holds {snapshot_words(held)}, not {snapshot_words(snapshot)}"
        )
    if layout.rank != file.rank:
        raise StateError(f"{store.url}/{name} is the file of rank {layout.rank}, not {file.rank}")
    if layout.file_bytes != file.size_bytes or layout.digest != file.layout_digest:
        raise StateError(
            f"{store.url}/{name} was written again: its size or layout is not what its writer said"
        )
    return layout
