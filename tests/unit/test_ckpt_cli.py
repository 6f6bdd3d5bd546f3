"""`stepfast ckpt`: what it says about real stores, and its exit codes; tensors put together."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.checkpoint.catalog import committed
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.export import INDEX_FILE, export_safetensors
from stepfast.checkpoint.layout import TensorSpec
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.manifest import Manifest
from stepfast.checkpoint.whole import WholeCheckpoint, compare
from stepfast.cli.main import main
from stepfast.errors import StateError
from unit.stored_checkpoints import Slots, save_tensors, snap

Run = Callable[..., tuple[int, str]]
ROWS, COLUMNS = 6, 4
WHOLE = random.Random(7).randbytes(ROWS * COLUMNS * 4)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str]:
        status = main(["ckpt", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job directory with checkpoints at steps 10, 20 and 30."""
    store = DirectoryStore(tmp_path / "job" / "checkpoints")
    Slots(tmp_path / "slots").save(store, snap(10), snap(20), snap(30))
    return tmp_path / "job"


def box(rows: range, columns: range) -> tuple[TensorSpec, bytes]:
    """A part of the matrix `w`, by a slow and obvious way."""
    shape, offsets = (len(rows), len(columns)), (rows.start, columns.start)
    cells = [(r * COLUMNS + c) * 4 for r in rows for c in columns]
    content = b"".join(WHOLE[cell : cell + 4] for cell in cells)
    return TensorSpec("w", "F32", shape, (ROWS, COLUMNS), offsets), content


def save_boxes(base: Path, *boxes: tuple[range, range]) -> WholeCheckpoint:
    parts = [box(*one) for one in boxes]
    return whole_of(
        *save_tensors(base, [[spec] for spec, _ in parts], [{"w": content} for _, content in parts])
    )


def whole_of(store: DirectoryStore, manifest: Manifest) -> WholeCheckpoint:
    return WholeCheckpoint(StoredCheckpoint.open(store, manifest.snapshot))


def cuts_of(size: int) -> st.SearchStrategy[list[range]]:
    """Ways to cut a dimension, parts of nothing among them."""
    inner = st.lists(st.integers(0, size), max_size=2).map(sorted)
    return inner.map(
        lambda cuts: [range(a, b) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    )


@settings(max_examples=40)
@given(rows=cuts_of(ROWS), columns=cuts_of(COLUMNS), is_doubled=st.booleans())
def test_a_tensor_is_put_together_from_any_parts(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[range],
    columns: list[range],
    is_doubled: bool,
) -> None:
    boxes = [(r, c) for r in rows for c in columns] * (2 if is_doubled else 1)
    stored = save_boxes(tmp_path_factory.mktemp("boxes"), *boxes)
    assert stored.whole("w") == WHOLE


def test_a_tensor_with_a_part_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"not whole: w: no rank has \[2:3, 0:4\] of F32 \[6, 4\]"):
        save_boxes(tmp_path, (range(2), range(COLUMNS)), (range(3, 6), range(COLUMNS)))


def test_slices_of_a_flattened_tensor_are_put_together(tmp_path: Path) -> None:
    cuts = [0, 5, 5, 23, 24]
    specs, contents = [], []
    for first, end in itertools.pairwise(cuts):
        shape = (ROWS, COLUMNS)
        spec = TensorSpec("w", "F32", (end - first,), (24,), (first,), original_shape=shape)
        specs.append([spec])
        contents.append({"w": WHOLE[first * 4 : end * 4]})
    flat = whole_of(*save_tensors(tmp_path / "flat", specs, contents))
    assert flat.whole("w") == WHOLE and flat.info("w").shape == (ROWS, COLUMNS)
    assert compare(flat, save_boxes(tmp_path / "one", (range(ROWS), range(COLUMNS)))) == []


def test_layouts_differ_and_tensors_do_not(tmp_path: Path) -> None:
    every = range(COLUMNS)
    two = save_boxes(tmp_path / "two", (range(3), every), (range(3, 6), every))
    four = save_boxes(
        tmp_path / "four",
        *((r, c) for r in (range(2), range(2, 6)) for c in (range(1), range(1, 4))),
    )
    one = save_boxes(tmp_path / "one", (range(ROWS), every))
    assert compare(two, four) == compare(four, one) == compare(two, two) == []


def test_what_differs_is_named(tmp_path: Path, run: Run) -> None:
    def spec(name: str, dtype: str = "U8") -> TensorSpec:
        return TensorSpec(name, dtype, (2,), (2,), (0,))

    save_tensors(
        tmp_path / "a",
        [[spec("same"), spec("bytes"), spec("gone"), spec("type")]],
        [{"same": b"ab", "bytes": b"ab", "gone": b"ab", "type": b"ab"}],
    )
    save_tensors(
        tmp_path / "b",
        [[spec("same"), spec("bytes"), spec("new"), spec("type", "I8")]],
        [{"same": b"ab", "bytes": b"aB", "new": b"ab", "type": b"ab"}],
    )
    status, said = run("diff", tmp_path / "a" / "store", tmp_path / "b" / "store")
    assert status == 1
    assert said.splitlines()[2:] == [
        "changed  bytes",
        "removed  gone U8 [2]",
        "added    new U8 [2]",
        "changed  type U8 [2] -> I8 [2]",
        "4 differences",
    ]


def test_listing_tells_all_there_is(job: Path, run: Run) -> None:
    (job / "checkpoints" / "step-000000040-gen-0001").mkdir()
    spoiled = job / "checkpoints" / "step-000000010-gen-0001" / "manifest.json"
    spoiled.write_bytes(b"{}")
    status, said = run("ls", job)
    assert status == 0
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["STEP", "30", "20"]
    assert lines[3].startswith("damaged: step-000000010-gen-0001/manifest.json: ")
    assert lines[4] == "not committed: step-000000040-gen-0001"
    status, said = run("ls", job / "checkpoints" / "step-000000020-gen-0001")
    assert [line.split()[0] for line in said.splitlines()] == ["STEP", "20"], "not its siblings"
    assert run("ls", spoiled.parent)[1].count("\n") == 2
    status, said = run("ls", job / "checkpoints", "--json")
    listed = json.loads(said)
    assert [one["step"] for one in listed["checkpoints"]] == [30, 20]
    assert listed["unfinished"] == ["step-000000040-gen-0001"]


def test_a_checkpoint_is_shown_by_step_by_name_or_the_newest(job: Path, run: Run) -> None:
    def step_of(*words: object) -> int:
        status, said = run("show", *words, "--json")
        assert status == 0, said
        return int(json.loads(said)["manifest"]["step"])

    assert step_of(job) == 30
    assert step_of(job, 20) == step_of(job, "step-000000020-gen-0001") == 20
    assert step_of(job / "checkpoints" / "step-000000010-gen-0001") == 10
    status, said = run("show", f"file://{job}")
    assert status == 0
    assert "step 30 of generation 1, job job" in said
    assert "model.weight  F32   [8, 3]" in said and "rank-00001-of-00002.safetensors" in said


def test_verifying_says_what_is_damaged(job: Path, run: Run) -> None:
    status, said = run("verify", job)
    assert status == 0 and said.count(": whole, ") == 3
    path = job / "checkpoints" / "step-000000020-gen-0001" / "rank-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, said = run("verify", job)
    assert status == 1 and said.count(": whole, ") == 2
    assert "DAMAGED step-000000020-gen-0001/rank-00001-of-00002.safetensors: digest: " in said
    assert f"bytes 0 to {len(data)} are not those that were written" in said
    assert run("verify", job, "30")[0] == 0
    status, said = run("verify", job, "20", "--json", "--threads", "1")
    assert status == 1 and json.loads(said)["findings"][0]["damage"] == "digest"


def test_pruning_keeps_what_it_is_told_to(job: Path, run: Run) -> None:
    store = DirectoryStore(job / "checkpoints")
    status, said = run("prune", job, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert (status, said) == (
        0,
        (
            "kept by the rule: the newest 1 and each at a multiple of 20 steps\n"
            "would remove step-000000010-gen-0001\n"
        ),
    )
    assert len(committed(store)) == 3
    status, said = run("prune", job, "--keep-last", 1, "--json")
    assert json.loads(said)["removed"] == ["step-000000010-gen-0001", "step-000000020-gen-0001"]
    assert committed(store) == [snap(30)]
    assert run("prune", job) == (0, "kept by the rule: the newest 2\nnothing to remove\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["ls", "{0}/none"], 78, "there is no directory {0}/none"),
        (["ls", "{0}/file"], 78, "{0}/file is a file; give a store"),
        (["show", "{0}/job", "15"], 78, "there is no checkpoint '15' in"),
        (["prune", "{0}/job", "--keep-last", "0"], 78, "--keep-last must be at least 1"),
        (["prune", "{0}/job/checkpoints/step-000000010-gen-0001"], 78, "works on a whole store"),
        (["verify", "{0}"], 1, "there is no checkpoint in {0}"),
        (["diff", "{0}", "{0}"], 1, "there is no whole checkpoint in {0}"),
        (["ls", "ftp://x"], 78, "ftp:// is no store of checkpoints"),
        (["ls", "s3:/bucket/a"], 78, "one slash behind its scheme: s3://bucket/a"),
        (["ls", "file:/x"], 78, "one slash behind its scheme: file:///x"),
    ],
)
def test_what_cannot_work_is_one_line(
    job: Path, run: Run, words: list[str], status: int, said: str
) -> None:
    (job.parent / "file").write_text("no store")
    given = run(*(word.format(job.parent) for word in words))
    assert given[0] == status
    assert said.format(job.parent) in given[1] and given[1].count("\n") == 1


def test_equal_checkpoints_have_no_difference(job: Path, run: Run) -> None:
    status, said = run("diff", job, job)
    assert status == 0 and said.endswith("no difference\n")
    status, said = run("diff", job / "checkpoints" / "step-000000010-gen-0001", job, "--json")
    names = [one["name"] for one in json.loads(said)["differences"]]
    assert status == 1
    assert names == ["model.weight", "scale", "plain values of rank 0", "plain values of rank 1"]


def test_a_model_is_exported_whole(tmp_path: Path, run: Run) -> None:
    """Read again by the format's specification alone."""
    rows = [range(2), range(2, 6)]
    parts = [box(r, range(COLUMNS)) for r in rows]
    specs, contents = [], []
    for rank, (spec, content) in enumerate(parts):
        mine = msgspec.structs.replace(spec, name="model.layer.w")
        bias = TensorSpec("model.bias", "BF16", (2,), (2,), (0,))
        other = TensorSpec("optimizer.state.w", "U8", (1,), (1,), (0,))
        specs.append([mine, bias, other])
        contents.append({mine.name: content, bias.name: b"bias", other.name: bytes([rank])})
    store, manifest = save_tensors(tmp_path, specs, contents)
    target = tmp_path / "model"
    status, said = run("export", store.url, target, "--json")
    assert status == 0, said
    index = json.loads((target / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": len(WHOLE) + 4}
    assert sorted(index["weight_map"]) == ["bias", "layer.w"]
    assert read_model(target) == {"layer.w": ("F32", [6, 4], WHOLE), "bias": ("BF16", [2], b"bias")}
    assert sorted(json.loads(said)["files"]) == sorted(path.name for path in target.iterdir())
    assert run("export", store.url, target)[0] == 78
    status, said = run("export", store.url, tmp_path / "other", "--object", "net")
    assert status == 78 and "has no tensors of 'net'; it has those of model, opt" in said
    # In files no bigger than asked for.
    many = tmp_path / "many"
    checkpoint = whole_of(store, manifest)
    done: list[tuple[int, int]] = []
    tell = lambda *bytes_: done.append(bytes_)  # noqa: E731 - one line of a test
    export_safetensors(checkpoint, many, file_bytes_max=50, progress=tell)
    assert len(list(many.glob("model-*-of-00002.safetensors"))) == 2
    assert read_model(many) == read_model(target) and done[-1] == (100, 100)


def read_model(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
        assert header.pop("__metadata__") == {"format": "pt"}
        assert (8 + size) % 8 == 0
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], data[start:end])
        assert max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    return found
