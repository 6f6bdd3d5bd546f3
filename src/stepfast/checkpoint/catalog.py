"""The checkpoints of a store: which there are, whether they are whole, which go.

Owns: listing, verifying, retention, sweeping. Does not own: who decides that a checkpoint is loaded
(`core.recovery`), loading it (`loading`).

Invariants:
- A checkpoint is listed only if its manifest can be read and is that of its directory.
- The newest one is never removed, nor are the last so many before it, nor what the caller protects.
- What can never be gone on from costs nothing its place.
- A job removes what it committed itself, and what nobody committed; a person any.
- Its manifest goes first: what is half removed does not exist, and the next sweep ends it.
- Names that are not ours are never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from functools import partial
from threading import Lock

import msgspec

from stepfast.checkpoint.blocks import BlockHasher, first_difference
from stepfast.checkpoint.commit import read_layout
from stepfast.checkpoint.coverage import Coverage, listed
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    Manifest,
    ShardFile,
    checkpoint_name,
    decode_manifest,
    parse_checkpoint_name,
)
from stepfast.checkpoint.parallel import SMALL_REQUESTS, in_parallel
from stepfast.checkpoint.store import CheckpointStore
from stepfast.checkpoint.writer import Progress, no_progress
from stepfast.core.terms import NO_GENERATION, Generation, SnapshotId
from stepfast.errors import OperatingError, StateError

VERIFY_PIECE_BYTES = 8 << 20
VERIFY_THREADS = 4


class Damage(StrEnum):
    """What can be wrong with a checkpoint."""

    MANIFEST = "manifest"  # torn, unreadable, or that of another checkpoint
    MISSING = "missing"  # a file that the manifest names
    SIZE = "size"  # it is cut, or longer than it was
    DIGEST = "digest"  # its bytes are not those that were written
    FOREIGN = "foreign"  # a file that the manifest does not name
    INCOMPLETE = "incomplete"  # files that are whole have not all of a tensor, or other ones
    UNREADABLE = "unreadable"  # the store has it and cannot give it


class Finding(msgspec.Struct, frozen=True, order=True):
    """One thing that is wrong; `name` is the object's name in the store."""

    name: str
    damage: Damage
    text: str


class Survey(msgspec.Struct, frozen=True):
    """What is in a store. `manifests` newest first; `unfinished` have no manifest."""

    manifests: tuple[Manifest, ...]
    damaged: tuple[Finding, ...]
    unfinished: tuple[SnapshotId, ...]

    def lacks(self, known: Iterable[SnapshotId]) -> frozenset[SnapshotId]:
        """Which of these checkpoints are not there at all; a damaged one is."""
        there = {_manifest_name(manifest.snapshot) for manifest in self.manifests}
        there.update(finding.name for finding in self.damaged)
        return frozenset(s for s in known if _manifest_name(s) not in there)


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints stay: the `keep_last` newest, and of older ones each whose step is a
    multiple of `keep_every_steps` (0: none of them).

    At least two by default, so that there is one to fall back to if the newest cannot be read.
    """

    keep_last: int = 2
    keep_every_steps: int = 0

    def __post_init__(self) -> None:
        """The newest one always stays."""
        assert self.keep_last >= 1, "the newest checkpoint is always kept"
        assert self.keep_every_steps >= 0, "every so many steps, or 0"

    def surplus(
        self, snapshots: Collection[SnapshotId], void: Collection[SnapshotId] = ()
    ) -> list[SnapshotId]:
        """Those of `snapshots` that need not stay, oldest first.

        One that a newer generation has reached again is a branch that the job left; `void` ones are
        known to be of such a branch, or damaged. They take no place from the others, and go when
        they are not among the newest: until then one can look at them.
        """
        newest_first = sorted(snapshots, reverse=True)
        kept = set(newest_first[: self.keep_last])
        line: list[SnapshotId] = []
        for snapshot in newest_first:
            if snapshot not in void and (not line or snapshot.step < line[-1].step):
                line.append(snapshot)
        kept.update(line[: self.keep_last])
        if self.keep_every_steps:
            kept.update(s for s in line if s.step % self.keep_every_steps == 0)
        return [snapshot for snapshot in reversed(newest_first) if snapshot not in kept]


def survey(store: CheckpointStore) -> Survey:
    """Everything of ours in the store. A manifest that is damaged is a finding and no error; an
    OperatingError says that the store itself cannot be asked now.
    """
    found = [s for name in store.directories() if (s := parse_checkpoint_name(name)) is not None]
    look = partial(_look_at, store)
    read = list(in_parallel(look, sorted(found), SMALL_REQUESTS))
    manifests = [m for m in read if isinstance(m, Manifest)]
    return Survey(
        manifests=tuple(sorted(manifests, key=lambda m: m.snapshot, reverse=True)),
        damaged=tuple(f for f in read if isinstance(f, Finding)),
        unfinished=tuple(s for s in read if isinstance(s, SnapshotId)),
    )


def newest_generation(store: CheckpointStore) -> Generation:
    """The newest one that anything of ours in the store has, committed or not."""
    found = (parse_checkpoint_name(name) for name in store.directories())
    return max((s.generation for s in found if s is not None), default=NO_GENERATION)


def committed(store: CheckpointStore) -> list[SnapshotId]:
    """The checkpoints that exist, newest first: by generation, then by step."""
    return [manifest.snapshot for manifest in survey(store).manifests]


def damaged(store: CheckpointStore) -> list[Finding]:
    """The directories whose manifest is there and worth nothing."""
    return list(survey(store).damaged)


def load_manifest(store: CheckpointStore, snapshot: SnapshotId) -> Manifest:
    """The manifest of one checkpoint; StateError names it and what is wrong with it."""
    name = _manifest_name(snapshot)
    size_bytes = store.size_bytes(name)
    if size_bytes is None:
        raise StateError(f"{store.url}/{name}: there is no such checkpoint")
    if size_bytes > MANIFEST_BYTES_MAX:
        raise StateError(f"{store.url}/{name}: {size_bytes} bytes are no manifest")
    try:
        manifest = decode_manifest(store.read(name))
    except StateError as error:
        raise StateError(f"{store.url}/{name}: {error}") from error
    if manifest.snapshot != snapshot:
        raise StateError(f"{store.url}/{name}: it is the manifest of {manifest.name}")
    return manifest


def verify(
    store: CheckpointStore,
    snapshot: SnapshotId,
    progress: Progress = no_progress,
    threads: int = VERIFY_THREADS,
) -> list[Finding]:
    """Read all of a checkpoint and say everything that is wrong with it; nothing, if it is whole.

    `progress(done, total)` is told the bytes, from several threads, one at a time.
    """
    directory = checkpoint_name(snapshot.step, snapshot.generation)
    try:
        manifest = load_manifest(store, snapshot)
    except StateError as error:
        return [Finding(_manifest_name(snapshot), Damage.MANIFEST, str(error))]
    known = {f"{directory}/{file.name}" for file in manifest.files} | {_manifest_name(snapshot)}
    findings = [
        Finding(name, Damage.FOREIGN, "the manifest does not name this file")
        for name in store.names(directory)
        if name not in known
    ]
    count, coverage = _Count(manifest.size_bytes, progress), Coverage()
    are_all_right = True
    look = partial(_verify_file, store, manifest, count)
    for found in in_parallel(look, manifest.files, threads):
        if isinstance(found, Finding):
            findings.append(found)
            are_all_right = False
        else:
            coverage.add(found)
    # Else what is missing together says nothing new.
    if are_all_right and (problems := coverage.problems(manifest.tensors)):
        text = f"its files are not all of it: {listed(problems)}"
        findings.append(Finding(_manifest_name(snapshot), Damage.INCOMPLETE, text))
    return sorted(findings)


def prune(
    store: CheckpointStore,
    retention: Retention,
    *,
    protected: Collection[SnapshotId] = (),
    void: Collection[SnapshotId] = (),
    job_id: str | None = None,
    dry_run: bool = False,
    seen: Survey | None = None,
) -> list[SnapshotId]:
    """Remove what need not stay and is not `protected`; returns what that was, oldest first.

    `void` ones take no place from the others. With `job_id`, checkpoints that other jobs committed
    count for nothing, and stay. One that cannot be removed is in no other's way: the first of such
    errors comes at the end. `seen`: what the store holds, for whom has just looked.
    """
    manifests = (survey(store) if seen is None else seen).manifests
    there = [m.snapshot for m in manifests if job_id in (None, m.job_id)]
    surplus = [s for s in retention.surplus(there, void) if s not in protected]
    failures = []
    for snapshot in () if dry_run else surplus:
        try:
            _remove(store, snapshot)
        except OperatingError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return surplus


def sweep_unfinished(
    store: CheckpointStore,
    *,
    generation: Generation | None = None,
    in_flight: Collection[SnapshotId] = (),
) -> list[SnapshotId]:
    """Remove what was begun and never committed; returns what that was.

    Swept is what is older than the newest checkpoint, or of an older generation than `generation`,
    the one that runs now; never what is `in_flight`, and what is neither may yet be committed. Of
    what is committed only hidden remains of dead writers go.
    """
    seen = survey(store)
    newest = seen.manifests[0].snapshot if seen.manifests else None
    swept = []
    for snapshot in seen.unfinished:
        is_passed = newest is not None and snapshot < newest
        is_of_the_past = generation is not None and snapshot.generation < generation
        if snapshot in in_flight or not (is_passed or is_of_the_past):
            continue
        # Asked again at the last moment, for whom nobody told of what is in flight.
        if store.size_bytes(_manifest_name(snapshot)) is None:
            _remove(store, snapshot)
            swept.append(snapshot)
    for manifest in seen.manifests:
        if manifest.snapshot not in in_flight:
            store.delete_remains(manifest.name)
    return swept


def _remove(store: CheckpointStore, snapshot: SnapshotId) -> None:
    """The manifest first, and durably: from there on the checkpoint does not exist.

    Also where none is seen: whoever removed it may have died before that was durable.
    """
    store.delete(_manifest_name(snapshot))
    store.delete_below(checkpoint_name(snapshot.step, snapshot.generation))


class _Count:
    """Bytes done, added up over threads."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress
        self._lock = Lock()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            self._progress(self._done_bytes, self._total_bytes)


def _manifest_name(snapshot: SnapshotId) -> str:
    return f"{checkpoint_name(snapshot.step, snapshot.generation)}/{MANIFEST_FILE}"


def _look_at(store: CheckpointStore, snapshot: SnapshotId) -> Manifest | Finding | SnapshotId:
    name = _manifest_name(snapshot)
    try:
        if store.size_bytes(name) is None:
            return snapshot
        return load_manifest(store, snapshot)
    except StateError as error:
        return Finding(name, Damage.MANIFEST, str(error))


def _verify_file(
    store: CheckpointStore, manifest: Manifest, count: _Count, file: ShardFile
) -> Finding | Layout:
    name = f"{manifest.name}/{file.name}"
    try:
        size_bytes = store.size_bytes(name)
        if size_bytes is None:
            return Finding(name, Damage.MISSING, "the file is not there")
        if size_bytes != file.size_bytes:
            text = f"it has {size_bytes} bytes, and was written with {file.size_bytes}"
            return Finding(name, Damage.SIZE, text)
        if (wrong := _wrong_bytes(store, name, file, count)) is not None:
            text = f"bytes {wrong.start} to {wrong.stop} are not those that were written"
            return Finding(name, Damage.DIGEST, text)
        layout, held = read_layout(store, name)
        if held != manifest.snapshot or layout.digest != file.layout_digest:
            return Finding(name, Damage.DIGEST, "it is the file of another checkpoint")
    except StateError as error:
        return Finding(name, Damage.UNREADABLE, str(error))
    return layout


def _wrong_bytes(store: CheckpointStore, name: str, file: ShardFile, count: _Count) -> range | None:
    """The first block that has not its checksum; None: all of them have."""
    hasher, done = BlockHasher(file.block_bytes), 0
    buffer = memoryview(bytearray(min(VERIFY_PIECE_BYTES, file.size_bytes)))
    while done < file.size_bytes:
        piece = buffer[: min(VERIFY_PIECE_BYTES, file.size_bytes - done)]
        store.read_into(name, done, piece)
        hasher.update(piece)
        done += len(piece)
        count.add(len(piece))
    number = first_difference(hasher.digests(), file.blocks)
    if number is None:
        return None
    start = number * file.block_bytes
    return range(start, min(start + file.block_bytes, file.size_bytes))
