"""Files that are whole each, and together are not: refused at the commit, found by `verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.catalog import Damage, committed, verify
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.coverage import SHOWN_MAX, Coverage
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import Layout, TensorSpec, private_name
from stepfast.checkpoint.manifest import Manifest
from stepfast.checkpoint.writer import write_slot
from stepfast.errors import StateError
from unit.stored_checkpoints import commit_unchecked, manifest_of, snap

Shape = tuple[int, ...]


def part(name: str, shape: Shape, whole: Shape, offsets: Shape, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name, dtype, shape, whole, offsets)


def run_of(first: int, end: int, whole: Shape) -> TensorSpec:
    count = 1
    for size in whole:
        count *= size
    return TensorSpec("t", "F32", (end - first,), (count,), (first,), original_shape=whole)


def problems_of(*ranks: list[TensorSpec]) -> dict[str, str]:
    coverage = Coverage()
    for rank, specs in enumerate(ranks):
        coverage.add(Layout.build(specs, 10, rank=rank))
    return coverage.problems()


def written(base: Path, *ranks: list[TensorSpec]) -> tuple[DirectoryStore, Manifest]:
    """The files of all ranks, and the manifest that would be committed."""
    store, files = DirectoryStore(base / "store"), []
    for rank, specs in enumerate(ranks):
        arena = Arena(base / f"rank-{rank}")
        arena.claim(Layout.build(specs, 10, rank=rank))
        slot = arena.free_slot()
        assert slot is not None
        slot.write_plain(b"plain")
        slot.seal(snap(5))
        files.append(write_slot(store, slot.path, snap(5), rank=rank, world_size=len(ranks)))
        arena.close()
    return store, manifest_of(snap(5), tuple(files))


def test_what_is_missing_is_named_with_its_place() -> None:
    w = [part("w", (2, 2), (4, 4), (r, c)) for r in (0, 2) for c in (0, 2)]
    assert problems_of(*([p] for p in w)) == {}
    assert problems_of(*([p] for p in w[:3])) == {"w": "no rank has [2:4, 2:4] of F32 [4, 4]"}
    assert problems_of([part("w", (0, 4), (4, 4), (4, 0))], []) == {
        "w": "no rank has [0:4, 0:4] of F32 [4, 4]"
    }


def test_single_elements_and_empty_tensors() -> None:
    assert problems_of([part("one", (), (), ()), part("none", (0, 3), (0, 3), (0, 0))]) == {}
    # A rank outside of a tensor's mesh has no place in it, and no element.
    assert problems_of([part("w", (0,), (2, 2), ())], [part("w", (2, 2), (2, 2), (0, 0))]) == {}
    assert problems_of([part("w", (3,), (4,), (2,))]) == {"w": "[2:5] lies outside of F32 [4]"}


def test_flattened_runs_meet_boxes_of_the_same_tensor() -> None:
    whole = (3, 4)
    assert problems_of([run_of(0, 5, whole)], [run_of(12, 12, whole)], [run_of(5, 12, whole)]) == {}
    assert problems_of([run_of(0, 5, whole)], [run_of(6, 12, whole)]) == {
        "t": "no rank has the elements 5 to 6 in flattened order of F32 [3, 4]"
    }
    rows = part("t", (2, 4), whole, (0, 0))
    assert problems_of([rows], [run_of(8, 12, whole)]) == {}
    assert problems_of([rows], [run_of(9, 12, whole)]) == {
        "t": "no rank has [2:3, 0:1] of F32 [3, 4]"
    }


def test_ranks_agree_on_what_a_tensor_is_and_whose() -> None:
    one, other = part("w", (2,), (2,), (0,)), part("w", (3,), (3,), (0,))
    assert problems_of([one], [other]) == {"w": "rank 1 has F32 [3], rank 0 F32 [2]"}
    as_half = part("w", (2,), (2,), (0,), "BF16")
    assert problems_of([one], [as_half]) == {"w": "rank 1 has BF16 [2], rank 0 F32 [2]"}
    own = private_name(1, "rng.torch")
    assert problems_of([], [part(own, (2,), (2,), (0,))]) == {}
    assert "rank 1's own" in problems_of([part(own, (2,), (2,), (0,))], [])[own]


def test_a_commit_of_less_than_all_is_refused(tmp_path: Path) -> None:
    names = [f"w{n}" for n in range(SHOWN_MAX + 2)]
    half = [part(name, (2,), (4,), (0,)) for name in names]
    store, manifest = written(tmp_path, half, half)
    with pytest.raises(StateError, match=r"w0: no rank has \[2:4\] .*; and 2 more tensors"):
        commit(store, manifest)
    assert committed(store) == []


def test_verifying_finds_what_no_file_has(tmp_path: Path) -> None:
    store, manifest = written(tmp_path, [part("w", (2,), (4,), (0,))], [])
    commit_unchecked(store, manifest)
    (finding,) = verify(store, snap(5))
    assert (finding.name, finding.damage) == (f"{manifest.name}/manifest.json", Damage.INCOMPLETE)
    assert "w: no rank has [2:4] of F32 [4]" in finding.text


def test_what_the_manifest_states_is_what_the_files_have(tmp_path: Path) -> None:
    whole = part("w", (4,), (4,), (0,))
    made = commit(*written(tmp_path / "a", [whole, part("v", (1,), (1,), (0,))]))
    coverage = Coverage()
    coverage.add(Layout.build([part("w", (4,), (4,), (0,), "I32"), part("x", (), (), ())], 10))
    assert coverage.problems(made.tensors) == {
        "v": "no rank has it",
        "w": "it is I32 [4], and F32 [4] in the manifest",
        "x": "the manifest does not have it",
    }
