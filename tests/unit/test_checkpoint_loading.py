"""Reading committed checkpoints: every byte verified, every damage named, nothing remembered."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.blocks import BlockHasher, is_whole
from stepfast.checkpoint.catalog import verify
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import Layout, TensorSpec
from stepfast.checkpoint.loading import CheckpointDamaged, StoredCheckpoint
from stepfast.checkpoint.manifest import Manifest, ShardFile
from stepfast.checkpoint.shard import StoredShard
from stepfast.checkpoint.writer import write_slot
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import OperatingError

SNAPSHOT = SnapshotId(Generation(2), Step(7))
BLOCK_BYTES = 512


def save(root: Path, snapshot: SnapshotId, *, rows: int = 300, seed: int = 1) -> DirectoryStore:
    """A checkpoint of two ranks with blocks so small that each file has many."""
    store, files = DirectoryStore(root / "store"), []
    for rank in range(2):
        spec = TensorSpec("model.w", "F32", (rows, 4), (2 * rows, 4), (rank * rows, 0))
        own = TensorSpec(f"stepfast.rank-{rank:05d}.rng.torch", "U8", (40,), (40,), (0,))
        layout = Layout.build([spec, own], 20, rank=rank)
        arena = Arena(root / f"slots-{snapshot.step}-{rank}")
        arena.claim(layout)
        slot = arena.free_slot()
        assert slot is not None
        for entry in layout.entries:
            slot.view(entry)[:] = random.Random(seed + rank).randbytes(entry.size_bytes)
        slot.write_plain(f"rank {rank}".encode())
        slot.seal(snapshot)
        written = write_slot(store, slot.path, snapshot, rank=rank, world_size=2)
        files.append(with_blocks(store, snapshot, written))
    manifest = Manifest(
        job_id="job", step=snapshot.step, generation=snapshot.generation, world_size=2,
        nproc_per_node=2, stepfast_version="1", torch_version="2", created_at_s=0.0,
        files=tuple(files),
    )  # fmt: skip
    commit(store, manifest)
    return store


def with_blocks(store: DirectoryStore, snapshot: SnapshotId, file: ShardFile) -> ShardFile:
    hasher = BlockHasher(BLOCK_BYTES)
    name = f"step-{snapshot.step:09d}-gen-{snapshot.generation:04d}/{file.name}"
    hasher.update(store.read(name))
    return msgspec.structs.replace(file, block_bytes=BLOCK_BYTES, blocks=hasher.digests())


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return save(tmp_path, SNAPSHOT)


def file_of(store: DirectoryStore, rank: int) -> Path:
    return store.root / f"step-000000007-gen-0002/rank-{rank:05d}-of-00002.safetensors"


def read_shard(
    checkpoint: StoredCheckpoint, rank: int, on_read: Callable[[int], object] | None = None
) -> StoredShard:
    """Every tensor into memory of its own, all at once, and the rest."""
    shard = StoredShard(checkpoint, rank, on_read)
    places = [(e, memoryview(bytearray(e.size_bytes))) for e in shard.layout.entries]
    shard.fill([*places, *((e, memoryview(bytearray(e.size_bytes))) for e, _ in places)])
    shard.check_rest()
    for entry, memory in places:
        assert memory == shard.view(entry)
    return shard


def test_whole_shards_and_parts_of_them(store: DirectoryStore) -> None:
    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    for rank in range(2):
        told: list[int] = []
        shard = read_shard(checkpoint, rank, told.append)
        assert sum(told) >= file_of(store, rank).stat().st_size
        assert shard.plain == checkpoint.plain(rank) == f"rank {rank}".encode()
        entry = shard.layout.by_name["model.w"]
        bytes_ = random.Random(1 + rank).randbytes(entry.size_bytes)
        assert bytes(shard.view(entry)) == bytes_
        wanted = [(0, 4), (100, 101), (0, entry.size_bytes), (entry.end - 9, entry.end + 40)]
        found = list(checkpoint.read_ranges((rank, *part) for part in wanted))
        everything = file_of(store, rank).read_bytes()[shard.layout.data_start :]
        assert [bytes(part) for part in found] == [everything[a:b] for a, b in wanted]
    assert [c.rank for c in checkpoint.index["model.w"]] == [0, 1]
    assert [c.entry.offsets for c in checkpoint.index["model.w"]] == [(0, 0), (300, 0)]
    assert len(checkpoint.index["stepfast.rank-00001.rng.torch"]) == 1


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(place * len(data)), len(data) - 1)] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "length": (lambda own, other: flip(own, 0), "header is damaged"),
    "header": (lambda own, other: flip(own, 0.02), ""),
    "data": (lambda own, other: flip(own, 0.4), "do not have the checksum"),
    "plain": (lambda own, other: flip(own, 0.75), ""),
    "padding": (lambda own, other: flip(own, 1), "do not have the checksum"),
    "cut": (lambda own, other: cut(own), r"bytes .* were wanted"),
    "empty": (lambda own, other: own.write_bytes(b""), r"bytes .* were wanted"),
    "gone": (lambda own, other: own.unlink(), "No such file"),
    "another rank's": (lambda own, other: own.write_bytes(other.read_bytes()), ""),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_found_and_named(store: DirectoryStore, kind: str) -> None:
    damage, words = DAMAGES[kind]
    damage(file_of(store, 1), file_of(store, 0))
    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    with pytest.raises(CheckpointDamaged, match=rf"rank-00001.*{words}") as raised:
        read_shard(checkpoint, 1)
    assert raised.value.snapshot == SNAPSHOT
    assert read_shard(checkpoint, 0).plain == b"rank 0"


def parts_of(store: DirectoryStore) -> object:
    """All that a load from another layout can read of rank 1's file."""
    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    entries = checkpoint.layout(1).entries
    read = checkpoint.read_ranges((1, e.start, e.end) for e in entries)
    return entries, [bytes(part) for part in read], checkpoint.plain(1)


def test_a_flipped_bit_is_found_or_was_in_what_nobody_reads(store: DirectoryStore) -> None:
    whole, wanted, found = file_of(store, 1).read_bytes(), parts_of(store), 0
    chance = random.Random(5)
    for _ in range(50):
        flip(file_of(store, 1), chance.random())
        with pytest.raises(CheckpointDamaged, match="rank-00001"):
            read_shard(StoredCheckpoint.open(store, SNAPSHOT), 1)
        try:
            assert parts_of(store) == wanted
        except CheckpointDamaged:
            found += 1
        file_of(store, 1).write_bytes(whole)
    assert found > 10


def test_verifying_says_which_bytes_are_wrong(store: DirectoryStore) -> None:
    path = file_of(store, 1)
    data = bytearray(path.read_bytes())
    assert verify(store, SNAPSHOT) == []
    for at, block in ((len(data) - 1, (len(data) - 1) // BLOCK_BYTES), (2 * BLOCK_BYTES, 2)):
        data[at] ^= 1  # the last block first: of two the lower one is named
        path.write_bytes(data)
        (finding,) = verify(store, SNAPSHOT)
        start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(data))
        assert f"bytes {start} to {end} are not" in finding.text


def test_swapped_files_are_those_of_other_ranks(store: DirectoryStore) -> None:
    one, other = file_of(store, 0), file_of(store, 1)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(CheckpointDamaged, match=r"rank-00000.* it is rank 1's file"):
        StoredCheckpoint.open(store, SNAPSHOT).layout(0)
    with pytest.raises(CheckpointDamaged, match="rank-0000"):
        _ = StoredCheckpoint.open(store, SNAPSHOT).index


def test_a_file_of_another_step_is_not_taken(store: DirectoryStore, tmp_path: Path) -> None:
    later = SnapshotId(Generation(2), Step(8))
    save(tmp_path, later)
    there = store.root / "step-000000008-gen-0002/rank-00000-of-00002.safetensors"
    file_of(store, 0).write_bytes(there.read_bytes())
    with pytest.raises(CheckpointDamaged, match=r"holds step 8 .* not step 7"):
        StoredCheckpoint.open(store, SNAPSHOT).layout(0)


def test_a_manifest_that_is_damaged_or_absent(store: DirectoryStore) -> None:
    missing = SnapshotId(Generation(2), Step(9))
    with pytest.raises(CheckpointDamaged, match="no such checkpoint") as raised:
        StoredCheckpoint.open(store, missing)
    assert raised.value.snapshot == missing
    flip(store.root / "step-000000007-gen-0002/manifest.json", 0.5)
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json.*checksum"):
        StoredCheckpoint.open(store, SNAPSHOT)


def test_a_store_that_fails_is_no_damage(store: DirectoryStore) -> None:
    class Failing(DirectoryStore):
        def read_into(self, name: str, start: int, *buffers: memoryview) -> None:
            raise OperatingError("the network is gone")

    checkpoint = StoredCheckpoint.open(Failing(store.root), SNAPSHOT)
    with pytest.raises(OperatingError, match="network") as raised:
        read_shard(checkpoint, 0)
    assert not isinstance(raised.value, CheckpointDamaged)


def test_another_checkpoint_in_the_same_place_is_seen(tmp_path: Path) -> None:
    store = save(tmp_path, SNAPSHOT)
    before = StoredCheckpoint.open(store, SNAPSHOT).index["model.w"]
    store.delete_below("step-000000007-gen-0002")
    save(tmp_path / "again", SNAPSHOT, rows=20, seed=9)
    (tmp_path / "again/store/step-000000007-gen-0002").rename(
        store.root / "step-000000007-gen-0002"
    )
    again = StoredCheckpoint.open(store, SNAPSHOT)
    assert again.index["model.w"] != before
    entry = again.layout(0).by_name["model.w"]
    assert bytes(read_shard(again, 0).view(entry)) == random.Random(9).randbytes(entry.size_bytes)


def test_who_is_told_of_progress_can_stop_the_reading(store: DirectoryStore) -> None:
    def stop(size_bytes: int) -> None:
        raise InterruptedError

    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    with pytest.raises(InterruptedError):
        read_shard(checkpoint, 0, stop)
    with pytest.raises(InterruptedError):
        list(checkpoint.read_ranges([(0, 0, 10)], stop))


def test_checksums_of_blocks_do_not_depend_on_the_pieces() -> None:
    data = random.Random(3).randbytes(5000)
    wanted = None
    for piece_bytes in (1, 7, 512, 513, 5000):
        hasher = BlockHasher(512)
        for start in range(0, len(data), piece_bytes):
            hasher.update(data[start : start + piece_bytes])
        digests = hasher.digests()
        assert is_whole(digests, len(data), 512) and not is_whole(digests, len(data) + 512, 512)
        assert wanted in (None, digests)
        wanted = digests
    assert not is_whole("g" * 160, 5000, 512) and not is_whole("", 5000, 0)
