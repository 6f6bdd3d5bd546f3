"""Small checkpoints for the tests of the store: slots on the disk, written and committed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stepfast.checkpoint import catalog, directory, writer
from stepfast.checkpoint import commit as commits
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.commit import commit, read_layout
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import Layout, TensorSpec, private_rank
from stepfast.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    ShardFile,
    TensorInfo,
    encode_manifest,
)
from stepfast.checkpoint.overlap import true_shape
from stepfast.checkpoint.store import CheckpointStore
from stepfast.checkpoint.writer import write_slot
from stepfast.core.terms import Generation, SnapshotId, Step
from unit.torn_disk import TornDisk

WORLD_SIZE = 2
ROOT = Path("/jobs/checkpoints")  # on a disk in memory


def snap(step: int, generation: int = 1) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


class Slots:
    """Sealed slots of a job of two ranks, one pair for each snapshot, made when asked for."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._bytes: dict[Path, bytes] = {}

    def path(self, snapshot: SnapshotId, rank: int) -> Path:
        where = self._base / f"{snapshot.generation}-{snapshot.step}-{rank}"
        path = where / "slot-0.safetensors"
        if not path.exists():
            half = TensorSpec("model.weight", "F32", (4, 3), (8, 3), (4 * rank, 0))
            arena = Arena(where)
            arena.claim(
                Layout.build([half, TensorSpec("scale", "BF16", (), (), ())], 100, rank=rank)
            )
            slot = arena.free_slot()
            assert slot is not None
            chance = random.Random(f"{snapshot} {rank}")
            for entry in slot.layout.entries:
                slot.view(entry)[:] = chance.randbytes(entry.size_bytes)
            slot.write_plain(f"plain of rank {rank} at {snapshot.step}".encode())
            slot.seal(snapshot)
            arena.close()
        return path

    def content(self, snapshot: SnapshotId, rank: int) -> bytes:
        path = self.path(snapshot, rank)
        if path not in self._bytes:
            self._bytes[path] = path.read_bytes()
        return self._bytes[path]

    def write(self, store: CheckpointStore, snapshot: SnapshotId) -> tuple[ShardFile, ...]:
        return tuple(
            write_slot(store, self.path(snapshot, rank), snapshot, rank=rank, world_size=WORLD_SIZE)
            for rank in range(WORLD_SIZE)
        )

    def save(self, store: CheckpointStore, *snapshots: SnapshotId) -> Manifest:
        """Write and commit them; the last one's manifest."""
        assert snapshots
        for snapshot in snapshots:
            manifest = commit(store, manifest_of(snapshot, self.write(store, snapshot)))
        return manifest


def save_tensors(
    base: Path, specs_of_ranks: list[list[TensorSpec]], contents: list[dict[str, bytes]]
) -> tuple[DirectoryStore, Manifest]:
    """A checkpoint of these tensors, in a store of its own below `base`."""
    store, files, world_size = DirectoryStore(base / "store"), [], len(specs_of_ranks)
    for rank, specs in enumerate(specs_of_ranks):
        arena = Arena(base / f"rank-{rank}")
        arena.claim(Layout.build(specs, 10, rank=rank))
        slot = arena.free_slot()
        assert slot is not None
        for entry in slot.layout.entries:
            slot.view(entry)[:] = contents[rank][entry.name]
        slot.write_plain(b"plain")
        slot.seal(snap(5))
        files.append(write_slot(store, slot.path, snap(5), rank=rank, world_size=world_size))
        arena.close()
    return store, commit(store, manifest_of(snap(5), tuple(files)))


def manifest_of(snapshot: SnapshotId, files: tuple[ShardFile, ...], job: str = "job") -> Manifest:
    return Manifest(
        job_id=job,
        step=snapshot.step,
        generation=snapshot.generation,
        world_size=len(files),
        nproc_per_node=1,
        stepfast_version="0.1.0",
        torch_version="2.13.0",
        created_at_s=1000.0 + snapshot.step,
        files=files,
    )


def in_memory(disk: TornDisk | None = None) -> tuple[DirectoryStore, TornDisk]:
    """A store on a disk in memory."""
    disk = disk or TornDisk()
    return DirectoryStore(ROOT, disk), disk


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Several writes for each file, past the page cache, and few threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "SMALL_REQUESTS", 1)
        patch.setattr(commits, "SMALL_REQUESTS", 1)
        patch.setattr(writer, "PIECE_BYTES", 4096)
        patch.setattr(directory, "_WRITEBACK_BYTES", 4096)
        patch.setattr(directory, "DIRECT_BYTES_MIN", 4096)
        yield


def commit_unchecked(store: CheckpointStore, manifest: Manifest) -> Manifest:
    """A checkpoint that `commit` would refuse, as a program that does not look would leave it."""
    tensors: dict[str, TensorInfo] = {}
    for file in manifest.files:
        layout, _ = read_layout(store, f"{manifest.name}/{file.name}")
        for entry in layout.entries:
            if private_rank(entry.name) is None:
                tensors.setdefault(entry.name, TensorInfo(entry.dtype, true_shape(entry)))
    made = msgspec.structs.replace(manifest, tensors=tensors)
    assert store.put_if_absent(f"{made.name}/{MANIFEST_FILE}", encode_manifest(made))
    return made
