"""What a store of checkpoints promises, on a disk in memory and on the machine's; what `verify`
finds; which checkpoints stay.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.checkpoint.catalog import (
    Damage,
    Retention,
    committed,
    damaged,
    load_manifest,
    prune,
    survey,
    sweep_unfinished,
    verify,
)
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import TEMPORARY_PREFIX, DirectoryStore
from stepfast.checkpoint.manifest import (
    FORMAT_VERSION,
    checkpoint_name,
    decode_manifest,
    encode_manifest,
    parse_checkpoint_name,
    shard_name,
)
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.checkpoint.writer import Pace, write_slot
from stepfast.core.terms import Generation, SnapshotId
from stepfast.errors import ConfigError, OperatingError, StateError
from stepfast.runtime.disk import SystemDisk
from stepfast.runtime.ports import Buffer
from unit.stored_checkpoints import ROOT, Slots, in_memory, manifest_of, small_pieces, snap
from unit.torn_disk import Directory, File, TornDisk


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    with small_pieces():
        yield Slots(tmp_path_factory.mktemp("slots"))


@pytest.fixture(params=["memory", "machine"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    if request.param == "memory":
        return in_memory()[0]
    return DirectoryStore(tmp_path / "some" / "where", SystemDisk())


# ------------------------------------------------------------------ the contract, on both disks


def test_an_object_is_there_when_its_writer_is_left(store: CheckpointStore) -> None:
    with store.writer("a/b", 10) as writer:
        writer.write(b"hello")
        writer.write(memoryview(bytearray(b"world")))
        assert store.names() == [] and store.size_bytes("a/b") is None
    assert store.names() == ["a/b"] and store.directories() == ["a"]
    assert store.size_bytes("a/b") == 10
    assert store.read("a/b") == b"helloworld"
    assert store.read("a/b", 4, 3) == b"owo"
    assert store.read("a/b", 10) == b""
    buffer = bytearray(4)
    store.read_into("a/b", 6, memoryview(buffer))
    assert buffer == b"orld"


def whole_pages(count: int, seed: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, count * mmap.PAGESIZE))
    memory[:] = random.Random(seed).randbytes(len(memory))
    return memory


def test_a_large_object_has_all_its_bytes_however_they_came(store: CheckpointStore) -> None:
    pages = whole_pages(300, 1)  # more than a megabyte
    pieces = [pages[: 256 * mmap.PAGESIZE], pages[256 * mmap.PAGESIZE :], pages[1:100], pages[:5]]
    with store.writer("large", sum(map(len, pieces))) as writer:
        for piece in pieces:
            writer.write(piece)
    assert store.read("large") == b"".join(pieces)


def test_what_refuses_direct_writes_late_gets_ordinary_ones() -> None:
    class Strict(TornDisk):
        """It takes the flag, and then no write with it."""

        def write(self, descriptor: int, data: Buffer) -> int:
            if descriptor in self._direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().write(descriptor, data)

    pages = whole_pages(300, 2)
    store = DirectoryStore(ROOT, Strict())
    with store.writer("large", len(pages)) as writer:
        writer.write(pages)
    assert store.read("large") == bytes(pages)


def test_an_error_leaves_what_was_there(store: CheckpointStore) -> None:
    def fail(name: str) -> None:
        with store.writer(name) as writer:
            writer.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail("a/b")
    assert store.names() == []
    with store.writer("a/b") as writer:
        writer.write(b"first")
    with pytest.raises(ZeroDivisionError):
        fail("a/b")
    assert store.read("a/b") == b"first"
    with store.writer("a/b") as writer:
        writer.write(b"second")
    assert store.read("a/b") == b"second" and store.names() == ["a/b"]


def test_put_if_absent_never_replaces(store: CheckpointStore) -> None:
    assert store.put_if_absent("a/b", b"one")
    assert not store.put_if_absent("a/b", b"two")
    assert store.read("a/b") == b"one" and store.names() == ["a/b"]
    with store.writer("a/c") as writer:
        writer.write(b"x")
    assert not store.put_if_absent("a/c", b"two")


def test_below_means_below_as_a_directory(store: CheckpointStore) -> None:
    for name in ("a/b", "ab", "a/c/d", "a.b/e"):
        assert store.put_if_absent(name, b"x")
    assert store.names() == ["a.b/e", "a/b", "a/c/d", "ab"]
    assert store.names("a") == store.names("a/") == ["a/b", "a/c/d"]
    assert store.directories() == ["a", "a.b"]
    assert store.names("nothing") == []
    store.delete_below("a")
    assert store.names() == ["a.b/e", "ab"]
    store.delete("ab")
    store.delete("ab")
    store.delete("no/such")
    store.delete_below("no")
    assert store.names() == ["a.b/e"]


def test_what_is_absent_or_too_short_is_a_state_error(store: CheckpointStore) -> None:
    assert store.names() == [] and store.directories() == []
    with pytest.raises(StateError, match=r"a/b: No such file"):
        store.read("a/b")
    assert store.put_if_absent("a/b", b"four")
    with pytest.raises(StateError, match="bytes 2 to 5 were wanted, it has 4"):
        store.read("a/b", 2, 3)
    with pytest.raises(StateError, match="were wanted, it has 4"):
        store.read_into("a/b", 1, memoryview(bytearray(9)))
    with pytest.raises(StateError, match="were wanted"):
        store.read("a/b", 5)
    with pytest.raises(StateError):
        store.read("a")


def test_remains_of_dead_writers_are_hidden_and_swept(store: CheckpointStore) -> None:
    assert store.put_if_absent("a/b", b"x")
    dead = store.writer("a/c")
    dead.__enter__()
    dead.write(b"half")
    assert store.names() == ["a/b"]
    store.delete_remains("a")
    assert store.names() == ["a/b"] and store.read("a/b") == b"x"
    with pytest.raises(OperatingError):
        dead.__exit__(None, None, None)
    assert store.names() == ["a/b"]


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/..", ".a", "a b", "a\n"])
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(AssertionError):
        in_memory()[0].read(name)


# ------------------------------------------------------------------ of the machine's disk alone


def test_files_belong_to_whom_any_output_would(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        DirectoryStore(tmp_path / "s").put_if_absent("a/b", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "s" / "a" / "b").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "s" / "a").stat().st_mode & 0o777 == 0o750
    assert [p.name for p in (tmp_path / "s" / "a").iterdir()] == ["b"]


def test_a_file_system_without_links_has_put_if_absent_too(tmp_path: Path) -> None:
    class WithoutLinks(SystemDisk):
        def link(self, source: str, target: str) -> None:
            raise PermissionError(1, "Operation not permitted")

    for disk in (WithoutLinks(), TornDisk()):
        if isinstance(disk, TornDisk):
            disk.has_links = False
        store = DirectoryStore(tmp_path, disk)
        assert store.put_if_absent("a/b", b"one")
        assert not store.put_if_absent("a/b", b"two")
        assert store.read("a/b") == b"one" and store.names() == ["a/b"]


def test_a_link_whose_answer_was_lost_counts(tmp_path: Path) -> None:
    class LosesAnswers(SystemDisk):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            super().link(source, target)

    store = DirectoryStore(tmp_path, LosesAnswers())
    assert store.put_if_absent("a/b", b"one")
    assert store.read("a/b") == b"one"


def test_what_is_no_file_is_no_object(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="pipe: not a regular file"):
        DirectoryStore(tmp_path).read("pipe")
    (tmp_path / "file").write_bytes(b"x")
    assert DirectoryStore(tmp_path / "file").names() == []
    with pytest.raises(OperatingError, match="file/a/b: Not a directory"):
        DirectoryStore(tmp_path / "file").put_if_absent("a/b", b"x")


def test_a_place_above_that_may_not_be_opened_is_passed_over(tmp_path: Path) -> None:
    class Closed(SystemDisk):
        def sync_directory(self, path: str) -> None:
            if Path(path) in tmp_path.parents:
                raise PermissionError(13, "Permission denied")
            super().sync_directory(path)

    assert DirectoryStore(tmp_path, Closed()).put_if_absent("a/b", b"x")


def test_a_url_leads_to_its_store(tmp_path: Path) -> None:
    assert open_store(tmp_path).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}/with%20space").url == f"{tmp_path}/with space"
    assert open_store("relative/path").url == str(Path.cwd() / "relative/path")
    for url in ("http://x/y", "file://host/path", ""):
        with pytest.raises(ConfigError):
            open_store(url)


# ------------------------------------------------------------------ names and manifests


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_a_checkpoints_name_is_read_back(step: int, generation: int) -> None:
    name = checkpoint_name(step, generation)
    assert parse_checkpoint_name(name) == snap(step, generation)


@pytest.mark.parametrize(
    "name",
    ["step-5-gen-0001", "step-000000005-gen-1", "step-000000005", "x", "step-00000000５-gen-0001"],
)
def test_only_the_one_spelling_is_a_checkpoints_name(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_any_changed_byte_of_a_manifest_is_found(slots: Slots) -> None:
    manifest = slots.save(in_memory()[0], snap(5))
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert '"model.weight": {' in data.decode()
    for at in range(len(data)):
        with pytest.raises(StateError):
            decode_manifest(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StateError):
            decode_manifest(data[:at])
    with pytest.raises(StateError):
        decode_manifest(data + b" ")


def test_a_manifest_of_a_newer_format_says_so(slots: Slots) -> None:
    manifest = slots.save(in_memory()[0], snap(5))
    newer = msgspec.structs.replace(manifest, format_version=FORMAT_VERSION + 1)
    with pytest.raises(StateError, match="install a newer one"):
        decode_manifest(encode_manifest(newer))


def test_a_link_leads_nothing_out_of_the_store(slots: Slots, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "theirs").write_bytes(b"theirs")
    store = DirectoryStore(tmp_path / "store")
    slots.save(store, snap(5))
    (store.root / checkpoint_name(6, 1)).symlink_to(elsewhere)
    with pytest.raises(OperatingError, match="a link, or no directory"):
        slots.write(store, snap(6))
    shard = store.root / checkpoint_name(5, 1) / shard_name(0, 2)
    shard.unlink()
    shard.symlink_to(elsewhere / "theirs")
    assert [f.name.endswith(shard.name) for f in verify(store, snap(5))] == [True]
    slots.save(store, snap(7), snap(8))
    assert prune(store, Retention(keep_last=1)) == [snap(5), snap(7)]
    assert [path.name for path in elsewhere.iterdir()] == ["theirs"]
    assert (elsewhere / "theirs").read_bytes() == b"theirs"


def test_a_manifest_names_files_of_its_own_directory_alone(slots: Slots) -> None:
    manifest = slots.save(in_memory()[0], snap(5))
    for name in ("../x", "a/b", ".hidden", "manifest.json", manifest.files[1].name):
        first = msgspec.structs.replace(manifest.files[0], name=name)
        files = (first, manifest.files[1])
        with pytest.raises(StateError):
            decode_manifest(encode_manifest(msgspec.structs.replace(manifest, files=files)))


def test_an_entry_without_a_checksum_is_refused(slots: Slots) -> None:
    """In a manifest that is whole otherwise: its own checksum is right."""
    manifest = slots.save(in_memory()[0], snap(5))
    whole = encode_manifest(manifest)
    assert decode_manifest(whole) == manifest
    first, second = manifest.files
    for empty in ({"blocks": ""}, {"blocks": second.blocks[1:]}, {"blocks": "x" * 16}):
        files = (first, msgspec.structs.replace(second, **empty))
        with pytest.raises(StateError, match=second.name):
            decode_manifest(encode_manifest(msgspec.structs.replace(manifest, files=files)))
    with pytest.raises(StateError, match="exactly one file"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, files=())))


def test_a_stale_handle_is_opened_again(slots: Slots) -> None:
    class Stale(TornDisk):
        """Each name leads to a file that is no more, once."""

        def __init__(self, disk: TornDisk) -> None:
            super().__init__(disk.root)
            self.met: set[str] = set()

        def open(self, path: str) -> int:
            if path not in self.met:
                self.met.add(path)
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().open(path)

    store, disk = in_memory()
    manifest = slots.save(store, snap(5))
    stale = DirectoryStore(ROOT, Stale(disk))
    assert load_manifest(stale, snap(5)) == manifest
    assert verify(stale, snap(5)) == []


# ------------------------------------------------------------------ writing and committing


def test_a_checkpoint_holds_the_slots_and_what_they_are(slots: Slots, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    manifest = slots.save(store, snap(50, 3))
    directory = tmp_path / "step-000000050-gen-0003"
    assert sorted(p.name for p in directory.iterdir()) == [
        "manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors",
    ]  # fmt: skip
    for rank in range(2):
        path = directory / shard_name(rank, 2)
        assert path.read_bytes() == slots.content(snap(50, 3), rank)
        assert open_sealed(path, snap(50, 3)).plain == f"plain of rank {rank} at 50".encode()
    assert {n: (t.dtype, t.shape) for n, t in manifest.tensors.items()} == {
        "model.weight": ("F32", (8, 3)),
        "scale": ("BF16", ()),
    }
    assert load_manifest(store, snap(50, 3)) == manifest
    assert committed(store) == [snap(50, 3)] and verify(store, snap(50, 3)) == []


def test_a_slot_that_is_taken_back_leaves_nothing(slots: Slots, tmp_path: Path) -> None:
    path = tmp_path / "slot-0.safetensors"
    content = slots.content(snap(5), 0)
    store = DirectoryStore(tmp_path / "store")

    def write(spoil: Callable[[], object]) -> None:
        path.write_bytes(content)
        write_slot(store, path, snap(5), rank=0, world_size=2, progress=lambda done, total: spoil())

    def patch(at: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)

    spoils = {
        "taken back": lambda: patch(50, b"unsealed......"),
        "was cut": lambda: os.truncate(path, 100),
        "checksum is wrong": lambda: patch(len(content) - 4096 + 30, b"other"),
    }
    for words, spoil in spoils.items():
        with pytest.raises(StateError, match=words):
            write(spoil)
        assert store.names() == []
    write(lambda: None)
    assert store.read(store.names()[0]) == content


def test_only_a_slot_of_that_snapshot_is_written(slots: Slots) -> None:
    store = in_memory()[0]
    with pytest.raises(StateError, match="holds step 5 of generation 1, not step 6"):
        write_slot(store, slots.path(snap(5), 0), snap(6), rank=0, world_size=2)
    with pytest.raises(StateError, match="No such file"):
        write_slot(store, ROOT / "none", snap(6), rank=0, world_size=2)
    assert store.names() == []


def test_the_pace_is_held(slots: Slots) -> None:
    class Time:
        now_s = 100.0

        def monotonic(self) -> float:
            return self.now_s

        def wall(self) -> float:
            return self.now_s

        def sleep(self, seconds: float) -> None:
            self.now_s += seconds

    time = Time()
    pace = Pace(1000.0, time, time.sleep)
    path = slots.path(snap(5), 0)
    write_slot(in_memory()[0], path, snap(5), rank=0, world_size=2, pace=pace)
    assert time.now_s == pytest.approx(100 + path.stat().st_size / 1000)


def test_progress_may_stop_a_write(slots: Slots) -> None:
    store = in_memory()[0]

    def stop(done: int, total: int) -> None:
        assert 0 < done <= total
        raise OperatingError("stopped")

    with pytest.raises(OperatingError, match="stopped"):
        write_slot(store, slots.path(snap(5), 0), snap(5), rank=0, world_size=2, progress=stop)
    assert store.names() == []


def test_what_is_not_whole_is_not_committed(slots: Slots) -> None:
    store, disk = in_memory()
    files = slots.write(store, snap(5))
    with pytest.raises(StateError, match="exactly one file"):
        commit(store, msgspec.structs.replace(manifest_of(snap(5), files), files=files[:1]))
    name = str(ROOT / checkpoint_name(5, 1) / files[1].name)
    kept = bytes(disk.file(name).data)
    for content, words in ((kept[:-1], "bytes, not the"), (b"", "length makes no sense")):
        disk.file(name).data[:] = content
        with pytest.raises(StateError, match=words):
            commit(store, manifest_of(snap(5), files))
    disk.unlink(name)
    with pytest.raises(StateError, match="is missing"):
        commit(store, manifest_of(snap(5), files))
    write_slot(store, slots.path(snap(5), 1), snap(5), rank=1, world_size=2)
    disk.file(name).data[:] = slots.content(snap(6), 1)
    with pytest.raises(StateError, match="holds step 6 of generation 1, not step 5"):
        commit(store, manifest_of(snap(5), files))
    assert committed(store) == []


def test_another_jobs_checkpoint_is_never_written_to(slots: Slots) -> None:
    store = in_memory()[0]
    mine = slots.save(store, snap(5))
    assert slots.save(store, snap(5)) == mine  # the same again is fine
    foreign = msgspec.structs.replace(mine.files[0], blocks="0" * len(mine.files[0].blocks))
    theirs = manifest_of(snap(5), (foreign, mine.files[1]), job="theirs")
    with pytest.raises(StateError, match=r"another checkpoint's \(job job\)"):
        commit(store, theirs)
    store.delete(f"{mine.name}/manifest.json")
    commit(store, theirs)
    with pytest.raises(StateError, match="committed already, with other bytes"):
        slots.write(store, snap(5))
    assert [f.damage for f in verify(store, snap(5))] == [Damage.DIGEST]


# ------------------------------------------------------------------ damage is found and named


def corrupt(disk: TornDisk, chance: random.Random) -> tuple[set[str], str]:
    """Do one thing to one of two checkpoints; which objects `verify` must name, and what it was."""
    folder = checkpoint_name(20, 1)
    directory = disk._at(str(ROOT / folder))
    assert isinstance(directory, Directory)
    name = chance.choice(sorted(directory.names))
    file = directory.names[name]
    assert isinstance(file, File)
    full = f"{folder}/{name}"
    kind = chance.choice(["flip", "truncate", "delete", "rename", "swap", "append", "foreign"])
    match kind:
        case "flip":
            file.data[chance.randrange(len(file.data))] ^= 1 << chance.randrange(8)
        case "truncate":
            del file.data[chance.randrange(len(file.data)) :]
        case "append":
            file.data += chance.randbytes(chance.randint(1, 100))
        case "delete":
            del directory.names[name]
        case "rename":
            directory.names[f"x{name}"] = directory.names.pop(name)
            return {full} | ({f"{folder}/x{name}"} if name != "manifest.json" else set()), kind
        case "foreign":
            directory.names["rank-00002-of-00003.safetensors"] = File(bytearray(file.data))
            return {f"{folder}/rank-00002-of-00003.safetensors"}, kind
        case "swap":
            other = chance.choice(["here", "there"])
            there = disk._at(str(ROOT / checkpoint_name(10, 1)))
            assert isinstance(there, Directory)
            if other == "there":  # that of another checkpoint
                directory.names[name] = there.names[name]
                return {full}, kind
            one, two = (shard_name(rank, 2) for rank in range(2))
            names = directory.names
            names[one], names[two] = names[two], names[one]
            return {f"{folder}/{one}", f"{folder}/{two}"}, kind
    return {full}, kind


def test_hundreds_of_random_corruptions_are_all_found_and_named(slots: Slots) -> None:
    store, disk = in_memory()
    slots.save(store, snap(10), snap(20))
    seen: dict[tuple[str, Damage], int] = {}
    for seed in range(700):
        hurt = disk.after_crash("kept")
        expected, kind = corrupt(hurt, random.Random(seed))
        damaged_store = DirectoryStore(ROOT, hurt)
        findings = verify(damaged_store, snap(20), threads=1)
        assert {finding.name for finding in findings} == expected, f"seed {seed}: {kind}"
        assert all(finding.text for finding in findings)
        for finding in findings:
            seen[kind, finding.damage] = seen.get((kind, finding.damage), 0) + 1
        # The other one is whole, and what has no good manifest does not exist.
        assert verify(damaged_store, snap(10), threads=1) == []
        is_there = not any(finding.damage == Damage.MANIFEST for finding in findings)
        assert committed(damaged_store) == ([snap(20)] if is_there else []) + [snap(10)]
    assert {damage for _, damage in seen} == set(Damage) - {Damage.UNREADABLE, Damage.INCOMPLETE}
    assert len({kind for kind, _ in seen}) == 7


def test_a_file_that_the_disk_cannot_read_is_named(slots: Slots) -> None:
    class BadSector(TornDisk):
        def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
            if start + len(buffer) > 4096:
                raise OSError(5, "Input/output error")
            return super().read_into(descriptor, start, buffer)

    store, disk = in_memory()
    slots.save(store, snap(5))
    findings = verify(DirectoryStore(ROOT, BadSector(disk.root)), snap(5))
    assert [f.damage for f in findings] == [Damage.UNREADABLE] * 2
    assert all("Input/output error" in f.text for f in findings)


def test_a_manifest_of_another_checkpoint_counts_for_nothing(slots: Slots) -> None:
    store, disk = in_memory()
    slots.save(store, snap(10), snap(20))
    ours, theirs = (f"{checkpoint_name(step, 1)}/manifest.json" for step in (20, 10))
    disk.file(str(ROOT / ours)).data[:] = disk.file(str(ROOT / theirs)).data
    assert committed(store) == [snap(10)]
    (finding,) = damaged(store)
    assert finding.name == ours and "the manifest of step-000000010" in finding.text
    assert verify(store, snap(20)) == [finding]
    # It may be all that is left to find out what happened: nobody removes it.
    assert prune(store, Retention(keep_last=1)) == [] and sweep_unfinished(store) == []
    assert ours in store.names()


def test_verifying_tells_its_progress(slots: Slots) -> None:
    store = in_memory()[0]
    manifest = slots.save(store, snap(5))
    told: list[tuple[int, int]] = []
    assert verify(store, snap(5), lambda done, total: told.append((done, total))) == []
    assert told[-1] == (manifest.size_bytes, manifest.size_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# ------------------------------------------------------------------ which ones stay


def kept_of(retention: Retention, *snapshots: SnapshotId) -> list[int]:
    surplus = retention.surplus(snapshots)
    return [s.step for s in snapshots if s not in surplus]


def test_the_newest_and_every_so_many_steps_stay() -> None:
    line = [snap(step) for step in range(10, 101, 10)]
    assert kept_of(Retention(), *line) == [90, 100]
    assert kept_of(Retention(keep_last=1), *line) == [100]
    assert kept_of(Retention(keep_last=1, keep_every_steps=40), *line) == [40, 80, 100]
    assert kept_of(Retention(keep_last=99), *line) == [s.step for s in line]
    assert kept_of(Retention()) == []


def test_a_branch_that_the_job_left_takes_no_place() -> None:
    left = [snap(80, 1), snap(90, 1)]
    line = [snap(60, 1), snap(70, 1), snap(75, 2)]
    assert kept_of(Retention(keep_last=2), *line, *left) == [70, 75, 90]
    assert kept_of(Retention(keep_last=2), *line, *left, snap(80, 2)) == [75, 80]
    assert kept_of(Retention(keep_last=2, keep_every_steps=10), *line, *left) == [60, 70, 75, 90]


@given(
    st.sets(st.tuples(st.integers(0, 200), st.integers(1, 5)), min_size=1),
    st.integers(1, 5),
    st.integers(0, 50),
)
def test_the_newest_ones_stay_whatever_there_is(
    pairs: set[tuple[int, int]], keep_last: int, keep_every_steps: int
) -> None:
    snapshots = {snap(*pair) for pair in pairs}
    retention = Retention(keep_last=keep_last, keep_every_steps=keep_every_steps)
    surplus = retention.surplus(snapshots)
    stay = snapshots - set(surplus)
    assert set(sorted(snapshots)[-keep_last:]) <= stay
    assert retention.surplus(stay) == [], "twice is the same as once"


def test_pruning_removes_checkpoints_and_touches_nothing_else(slots: Slots) -> None:
    store, disk = in_memory()
    slots.save(store, snap(10), snap(20), snap(30), snap(40))
    store.put_if_absent("notes/manifest.json", b"mine")
    store.put_if_absent("step-10/readme", b"mine")
    before = store.names()
    plan = prune(store, Retention(), dry_run=True, protected=[snap(20)])
    assert plan == [snap(10)] and store.names() == before
    assert prune(store, Retention(), protected=[snap(20)]) == [snap(10)]
    assert committed(store) == [snap(40), snap(30), snap(20)]
    assert prune(store, Retention()) == [snap(20)]
    assert prune(store, Retention()) == []
    assert store.directories() == [
        "notes", "step-000000030-gen-0001", "step-000000040-gen-0001", "step-10",
    ]  # fmt: skip
    unlinked = [path for call, path in disk.calls if call == "unlink" and "000000010" in path]
    visible = [path for path in unlinked if TEMPORARY_PREFIX not in path]
    assert visible[0].endswith("manifest.json"), "what is half removed does not exist"


def test_what_cannot_be_removed_is_in_no_others_way(slots: Slots, tmp_path: Path) -> None:
    class Stuck(SystemDisk):
        is_stuck = True

        def unlink(self, path: str) -> None:
            if self.is_stuck and checkpoint_name(10, 1) in path and TEMPORARY_PREFIX not in path:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().unlink(path)

    disk = Stuck()
    store = DirectoryStore(tmp_path, disk)
    slots.save(store, snap(10), snap(20), snap(30), snap(40))
    with pytest.raises(OperatingError, match=checkpoint_name(10, 1)):
        prune(store, Retention())
    assert committed(store) == [snap(40), snap(30), snap(10)], "it alone is left for later"
    disk.is_stuck = False
    assert prune(store, Retention()) == [snap(10)]


def test_only_what_nobody_will_commit_is_swept(slots: Slots) -> None:
    store = in_memory()[0]
    slots.save(store, snap(20))
    begun = [snap(10), snap(19), snap(30), snap(15, 2), snap(40, 2)]
    for snapshot in begun:
        slots.write(store, snapshot)
    assert list(survey(store).unfinished) == sorted(begun)
    assert sweep_unfinished(store, in_flight=[snap(19)]) == [snap(10)]
    assert sweep_unfinished(store, generation=Generation(2)) == [snap(19), snap(30)]
    assert list(survey(store).unfinished) == [snap(15, 2), snap(40, 2)]
    assert committed(store) == [snap(20)] and verify(store, snap(20)) == []


def test_where_no_directory_can_be_made_one_line_says_so() -> None:
    """Below /proc the kernel says that something is missing, though what is above is there."""
    store = DirectoryStore(Path("/proc/nothing/here"))
    with pytest.raises(OperatingError, match=r"^/proc/nothing/here/a: No such file or directory$"):
        store.put_if_absent("a", b"1")
