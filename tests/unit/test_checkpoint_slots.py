"""Slot files: format, seal, which slot is free, and what is left after a death at any line."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.agent.memory import settle_layout
from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.arena import (
    Arena,
    Slot,
    invalidate,
    needed_bytes,
    sealed_slots,
    slot_of,
)
from stepfast.checkpoint.layout import Layout, TensorSpec, parse_header
from stepfast.checkpoint.restore import open_sealed
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import OperatingError, ScriptError, StateError


def snap(step: int, generation: int = 1) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


def layout_of(*names: str, plain_bytes: int = 100) -> Layout:
    return Layout.build(
        [TensorSpec(name, "F32", (2, 3), (4, 3), (2, 0)) for name in names], plain_bytes
    )


def fill(slot: Slot, value: int, snapshot: SnapshotId, plain: bytes = b"plain") -> None:
    slot.unseal()
    for entry in slot.layout.entries:
        view = slot.view(entry)
        view[:] = bytes([value]) * len(view)
    slot.write_plain(plain)
    slot.seal(snapshot)


def take(
    arena: Arena, layout: Layout, step: int, protected: frozenset[SnapshotId] = frozenset()
) -> Slot:
    arena.claim(layout)
    slot = arena.free_slot(protected)
    assert slot is not None
    fill(slot, step, snap(step))
    return slot


def read_safetensors(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """An independent reader of the format, by its specification."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    data, tensors, position = raw[8 + length :], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        assert start == position, "holes are not allowed"
        tensors[name], position = data[start:end], end
    assert position == len(data), "every byte belongs to a tensor"
    return tensors, metadata


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "rank-0"


def test_a_slot_is_a_safetensors_file_with_sharding_metadata(directory: Path) -> None:
    slot = take(Arena(directory), layout_of("a", "b"), 7)
    tensors, metadata = read_safetensors(slot.path)
    assert tensors["a"] == bytes([7]) * 24
    assert json.loads(metadata["DCP_SHARDING_INFO"])["a"]["saved_offsets"] == [2, 0]
    assert set(json.loads(metadata["DCP_SHARDING_INFO"])) == set(tensors)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert slot.path.stat().st_mode & 0o777 == 0o600


def test_torch_reads_the_header_as_its_own(directory: Path) -> None:
    """With the part of torch's reader that needs no safetensors library."""
    from torch.distributed.checkpoint import _hf_utils

    slot = take(Arena(directory), layout_of("a"), 7)
    with slot.path.open("rb") as file:
        metadata, data_start = _hf_utils._get_safetensors_file_metadata(file)
    assert metadata["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert data_start == slot.layout.data_start
    sharding = _hf_utils._get_dcp_custom_metadata(metadata)
    assert sharding is not None
    assert sharding["a"][_hf_utils.SAVED_OFFSETS_KEY] == [2, 0]


def test_a_directory_that_cannot_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OperatingError, match=r"file/rank-0: Not a directory"):
        Arena(tmp_path / "file" / "rank-0")
    (tmp_path / "slot-0.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OperatingError, match=r"slot-0\.safetensors: Too many"):
        Arena(tmp_path).claim(layout_of("a"))


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """In a place where everybody may write, somebody else may have made the name before."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OperatingError, match=r"rank-0 is a link"):
        Arena(tmp_path / "rank-0")
    (tmp_path / "node-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OperatingError, match=r"node-0 is a link"):
        settle_layout(tmp_path / "node-0", "a layout")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_sealing_changes_the_seal_and_no_other_byte(directory: Path) -> None:
    slot = take(Arena(directory), layout_of("a"), 1)
    sealed = slot.path.read_bytes()
    slot.unseal()
    unsealed = slot.path.read_bytes()
    changed = [i for i, (x, y) in enumerate(zip(sealed, unsealed, strict=True)) if x != y]
    assert min(changed) >= layouts.SEAL_START and max(changed) < layouts.SEAL_END
    read_safetensors(slot.path)


@given(
    st.lists(
        st.tuples(
            st.text(min_size=1), st.sampled_from(sorted(layouts.DTYPE_BYTES)), st.integers(0, 5)
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    )
)
def test_a_header_says_everything_about_its_layout(rows: list[tuple[str, str, int]]) -> None:
    rows = [row for row in rows if row[0] not in ("__metadata__", layouts.private_name(0, "plain"))]
    layout = Layout.build([TensorSpec(n, d, (k, 2), (9, 2), (k, 0)) for n, d, k in rows], 10)
    assert parse_header(layout.header) == layout
    assert layout.data_start % layouts.DATA_ALIGNMENT_BYTES == 0
    assert all(entry.start % layouts.DTYPE_BYTES[entry.dtype] == 0 for entry in layout.entries)


def test_a_flattened_tensor_keeps_its_own_shape_in_the_header() -> None:
    spec = TensorSpec("a", "F32", (4,), (6,), (2,), original_shape=(2, 3))
    bare = TensorSpec("b", "F32", (6,), (6,), (0,))
    layout = Layout.build([spec, bare], 10)
    parsed = parse_header(layout.header)
    assert parsed == layout and parsed.by_name["a"].original_shape == (2, 3)
    assert parsed.specs == {"a": spec, "b": bare}
    assert b'"stepfast_shapes":"{\\"a\\":[2,3]}"' in layout.header
    other = Layout.build([msgspec.structs.replace(spec, original_shape=(3, 2)), bare], 10)
    none = Layout.build([msgspec.structs.replace(spec, original_shape=None), bare], 10)
    assert len({layout.digest, other.digest, none.digest}) == 3
    assert b"stepfast_shapes" not in none.header
    names = (b'\\"a\\":[2', b'\\"c\\":[2')
    for before, after in [(b"[2,3]", b"[3,2]"), (b"[2,3]", b"[2,9]"), names]:
        assert before in layout.header
        with pytest.raises(ValueError, match="digest does not match"):
            parse_header(layout.header.replace(before, after))
    wrong = Layout.build([msgspec.structs.replace(spec, original_shape=(2, 2))], 10)
    with pytest.raises(ValueError, match="original shape of 'a'"):
        parse_header(wrong.header)


def test_one_name_for_two_tensors_is_refused() -> None:
    with pytest.raises(ScriptError, match="'a'"):
        layout_of("a", "a")


def test_every_torn_seal_reads_as_unsealed(directory: Path) -> None:
    digest = layout_of("a").digest
    old, new = layouts.seal_bytes(snap(5), digest), layouts.seal_bytes(snap(6), digest)
    for before, after in ((layouts.UNSEALED, new), (old, layouts.UNSEALED), (old, new)):
        for cut in range(len(before)):
            torn = after[:cut] + before[cut:]
            if torn not in (before, after):
                assert layouts.parse_seal(torn, digest) is None
    assert layouts.parse_seal(new, "another digest") is None


def test_the_newest_and_the_protected_slots_are_never_free(directory: Path) -> None:
    arena, layout = Arena(directory, slot_count=3), layout_of("a")
    for step in range(3):
        take(arena, layout, step)
    assert arena.free_slot(frozenset({snap(0), snap(1)})) is None
    free = arena.free_slot(frozenset({snap(0)}))
    assert free is not None and free.snapshot == snap(1)
    oldest = arena.free_slot()
    assert oldest is not None and oldest.snapshot == snap(0)


def test_a_new_layout_spares_the_newest_slot(directory: Path) -> None:
    arena = Arena(directory)
    small = take(arena, layout_of("a"), 0)
    take(arena, layout_of("a", "b"), 1)
    assert [(s.snapshot, s.layout_digest) for s in sealed_slots(directory)] == [
        (snap(0), small.layout.digest),
        (snap(1), layout_of("a", "b").digest),
    ]
    take(arena, layout_of("a", "b"), 2)
    assert arena.laid_count == 4
    take(arena, layout_of("a", "b"), 3)
    assert arena.laid_count == 4
    assert sum(path.stat().st_size for path in directory.iterdir()) <= needed_bytes(
        layout_of("a", "b"), 2
    )


def test_a_fresh_arena_adopts_what_a_dead_one_left(directory: Path) -> None:
    layout = layout_of("a")
    first = take(Arena(directory), layout, 3)
    later = Arena(directory)
    newest = later.newest()
    assert newest is not None and newest.path == first.path
    later.claim(layout)
    assert later.laid_count == 0
    assert take(later, layout, 4).path != first.path


@pytest.mark.parametrize(
    "damage", ["truncate", "extend", "header", "foreign", "empty", "link", "fifo"]
)
def test_damaged_and_foreign_files_are_no_slots(directory: Path, damage: str) -> None:
    layout = layout_of("a")
    path = take(Arena(directory), layout, 1).path
    raw = path.read_bytes()
    if damage in ("link", "fifo"):
        path.rename(directory / "elsewhere")
        path.symlink_to(directory / "elsewhere") if damage == "link" else os.mkfifo(path)
    else:
        changed = {
            "truncate": raw[:-1],
            "extend": raw + b"x",
            "header": raw.replace(b'"F32"', b'"F16"', 1),
            "foreign": b"not a slot at all" * 100,
            "empty": b"",
        }
        path.write_bytes(changed[damage])
    assert sealed_slots(directory) == []
    with pytest.raises(StateError, match="slot-0"):
        open_sealed(path, snap(1))


def test_opening_checks_the_seal_and_the_plain_values(directory: Path) -> None:
    slot = take(Arena(directory), layout_of("a"), 1)
    read = open_sealed(slot.path, snap(1))
    assert read.plain == b"plain"
    read.check_still_sealed()
    with pytest.raises(StateError, match="step 1 of generation 1, not step 2"):
        open_sealed(slot.path, snap(2))
    slot.view(slot.layout.plain)[25] ^= 1
    with pytest.raises(StateError, match="checksum"):
        open_sealed(slot.path, snap(1))
    slot.unseal()
    with pytest.raises(StateError, match="not sealed"):
        open_sealed(slot.path, snap(1))
    with pytest.raises(StateError, match="unsealed while"):
        read.check_still_sealed()
    with pytest.raises(StateError, match="No such file"):
        open_sealed(directory / "slot-9.safetensors", snap(1))


def test_an_opened_generation_invalidates_what_older_ones_ran_ahead(directory: Path) -> None:
    arena, layout = Arena(directory, slot_count=3), layout_of("a")
    for step in (4, 5, 6):
        take(arena, layout, step)
    gone = invalidate(directory, newer_than_step=Step(5), before_generation=Generation(2))
    assert gone == [snap(6)]
    assert invalidate(directory, newer_than_step=Step(5), before_generation=Generation(2)) == []
    newest = arena.newest()
    assert newest is not None and newest.snapshot == snap(5)
    slot = arena.free_slot()
    assert slot is not None
    fill(slot, 6, snap(6, generation=2))
    assert invalidate(directory, newer_than_step=Step(5), before_generation=Generation(2)) == []


def test_a_full_memory_says_what_is_needed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(directory)
    take(arena, layout_of("a"), 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    arena.claim(layout_of("a", "b"))
    with pytest.raises(
        OperatingError, match=r"bytes needed .* bytes free in .*rank-0; enlarge"
    ) as caught:
        arena.free_slot()
    assert "\n" not in str(caught.value)
    assert [slot.snapshot for slot in sealed_slots(directory)] == [snap(1)]


class Died(BaseException):
    pass


def test_whatever_line_it_dies_on_the_newest_snapshot_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write of a capture, re-laying too, is the last one once; then another process looks."""
    writes = [(os, "pwrite"), (os, "posix_fallocate"), (os, "ftruncate")]
    slot_writes = [(Slot, name) for name in ("unseal", "view", "write_plain", "seal")]
    big = layout_of("a", "b", plain_bytes=5000)
    deaths = 0
    for fatal in range(100):
        directory = tmp_path / f"{fatal}"
        arena = Arena(directory)
        take(arena, layout_of("a"), 1)
        take(arena, layout_of("a"), 2)
        count = iter(range(1000))
        with monkeypatch.context() as patch:
            for owner, name in (*writes, *slot_writes):
                patch.setattr(owner, name, _dying(getattr(owner, name), count, fatal))
            try:
                take(arena, big, 3)
            except Died:
                deaths += 1
            else:
                break
        copy = shutil.copytree(directory, tmp_path / f"{fatal}-seen")
        newest = sealed_slots(copy)[-1]
        assert newest.snapshot in (snap(2), snap(3))
        read = open_sealed(newest.path, newest.snapshot)
        for entry in read.layout.entries:
            assert set(read.view(entry)) == {newest.snapshot.step}
        # The survivor goes on with the same arena, a replacement with a new one.
        for successor, step in ((arena, 4), (Arena(copy), 4)):
            assert take(successor, big, step).snapshot == snap(4)
            assert sealed_slots(successor.directory)[-1].snapshot == snap(4)
    assert deaths > 10


def _dying(
    function: Callable[..., object], count: Iterator[int], fatal: int
) -> Callable[..., object]:
    def call(*args: object, **options: object) -> object:
        number = next(count)
        if fatal == 2 * number:
            raise Died
        result = function(*args, **options)
        if fatal == 2 * number + 1:
            raise Died
        return result

    return call


@pytest.mark.parametrize("whole", [True, False])
def test_slots_that_another_process_removes_are_laid_anew(directory: Path, whole: bool) -> None:
    """All with their directory, as systemd's RemoveIPC does, or one file, as a cleaner does."""
    arena, layout = Arena(directory / "node" / "rank"), layout_of("weight")
    for step in (1, 2):
        take(arena, layout, step)
    assert arena.drop_removed() == []
    if whole:
        shutil.rmtree(directory)
    else:
        (directory / "node" / "rank" / "slot-1.safetensors").unlink()
    assert len(arena.drop_removed()) == (2 if whole else 1)
    take(arena, layout, 3)
    assert max(s.snapshot.step for s in sealed_slots(arena.directory)) == 3
    for made in (directory, directory / "node", arena.directory) if whole else ():
        assert made.stat().st_mode & 0o777 == 0o700


def test_a_slot_that_another_file_took_the_name_of_is_removed(directory: Path) -> None:
    arena = Arena(directory)
    slot = take(arena, layout_of("weight"), 1)
    copy = slot.path.with_name("copy")
    copy.write_bytes(slot.path.read_bytes())
    copy.replace(slot.path)
    assert arena.drop_removed() == [slot.path]


def test_who_looks_for_a_slot_of_a_removed_directory_hears_why(directory: Path) -> None:
    directory.mkdir()
    with pytest.raises(StateError, match=r"no slot holds step 5 any more$"):
        slot_of(directory, snap(5))
    directory.rmdir()
    with pytest.raises(StateError, match="was removed while the job ran"):
        slot_of(directory, snap(5))
