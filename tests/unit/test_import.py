"""`stepfast ckpt import`: what goes in comes out bit for bit; each kind of bad input is a line."""

from __future__ import annotations

import contextlib
import json
import os
import pickle  # noqa: TID251 - torch's distributed checkpoints are pickles
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from stepfast.checkpoint.catalog import committed, survey, verify
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.foreign.source import pieces
from stepfast.checkpoint.imported import (
    Selection,
    choose,
    import_checkpoint,
    open_source,
)
from stepfast.checkpoint.layout import DTYPE_BYTES, TensorSpec
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.tensors.export import ExportFormat, export
from stepfast.checkpoint.whole import WholeCheckpoint, compare
from stepfast.cli.main import main
from stepfast.errors import StateError
from unit.stored_checkpoints import ROOT, in_memory, save_tensors, small_pieces, snap
from unit.torn_disk import AFTER, BEFORE, Crashed, Plan, TornDisk

Run = Callable[..., tuple[int, str]]
FIRST = snap(0, generation=0)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str]:
        status = main(["ckpt", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


def contents(path: Path) -> dict[str, bytes]:
    """All tensors of a source, by name."""
    source = open_source(path)
    return {
        name: b"".join(pieces(source.place, name, tensor))
        for name, tensor in source.tensors.items()
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def whole(store: Path) -> WholeCheckpoint:
    return WholeCheckpoint(StoredCheckpoint.open(DirectoryStore(store), FIRST))


def distributed(target: Path, state: dict[str, Any], **options: Any) -> Path:
    writer = options.pop("writer", dcp.FileSystemWriter)(target, **options)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=writer, no_dist=True)
    return target


def a_model() -> Tensors:
    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(5, 3).bfloat16(),
        "scale": torch.tensor(1.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "small": torch.randn(7).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }


# --- there and back ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    """A checkpoint of two ranks with every type, a scalar, an empty tensor and a tied one."""
    chance, specs, saved = random.Random(1), [[], []], [{}, {}]
    tied = chance.randbytes(24)
    for rank in (0, 1):
        for dtype, size in DTYPE_BYTES.items():
            # Truth values have two bytes only.
            half = bytes(chance.choices((0, 1), k=6)) if dtype == "BOOL" else None
            name = f"model.{dtype.lower()}.weight"
            specs[rank].append(TensorSpec(name, dtype, (2, 3), (4, 3), (2 * rank, 0)))
            saved[rank][name] = half or chance.randbytes(6 * size)
        for name, dtype, shape, content in (
            ("model.scalar", "BF16", (), b"ab"),
            ("model.empty", "F32", (0, 4), b""),
            ("model.embed", "F32", (2, 3), tied),
            ("model.head", "F32", (2, 3), tied),
            ("optimizer.state.w.step", "F32", (), b"abcd"),
        ):
            specs[rank].append(TensorSpec(name, dtype, shape, shape, (0,) * len(shape)))
            saved[rank][name] = content
    store, manifest = save_tensors(tmp_path_factory.mktemp("trained"), specs, saved)
    return StoredCheckpoint.open(store, manifest.snapshot)


@pytest.mark.parametrize("form", ["safetensors", "dcp", "torch"])
def test_what_was_exported_comes_back_bit_for_bit(
    tmp_path: Path, trained: StoredCheckpoint, run: Run, form: str
) -> None:
    target, store = tmp_path / "exported", tmp_path / "store"
    assert run("export", trained.place, target, "--format", form)[0] == 0
    status, said = run("import", target, store)
    assert status == 0, said
    assert f"{len(DTYPE_BYTES) + 4} tensors" in said and "--start-fresh" in said
    assert verify(DirectoryStore(store), FIRST) == []
    found = compare(WholeCheckpoint(trained), whole(store))
    assert [d.name for d in found if d.after is not None or d.name.startswith("model.")] == []
    assert {d.name.partition(".")[0] for d in found} == {"optimizer"}


def test_of_several_objects_the_named_one_is_taken(
    tmp_path: Path, trained: StoredCheckpoint, run: Run
) -> None:
    target = tmp_path / "all.dcp"
    export(trained, target, ExportFormat.DCP)
    status, said = run("import", target, tmp_path / "a", "--json")
    assert status == 0
    assert json.loads(said)["left_out"] == ["optimizer.state.w.step"]
    assert run("import", target, tmp_path / "b", "--prefix", "model.")[0] == 0
    assert compare(whole(tmp_path / "a"), whole(tmp_path / "b")) == []


# --- names ---------------------------------------------------------------------------------------


def test_names_are_taken_as_they_are_but_for_what_is_asked(tmp_path: Path, run: Run) -> None:
    save_file({"model.a": torch.ones(1), "model.b.c": torch.ones(1)}, tmp_path / "w.safetensors")
    for number, (flags, wanted) in enumerate(
        {
            (): ["model.model.a", "model.model.b.c"],
            ("--object", "net"): ["net.model.a", "net.model.b.c"],
            ("--prefix", "model."): ["model.a", "model.b.c"],
            ("--prefix", "model.", "--without", "b"): ["model.a"],
        }.items()
    ):
        store = tmp_path / str(number)
        assert run("import", tmp_path / "w.safetensors", store, *flags)[0] == 0
        assert whole(store).shared_names == wanted


def test_of_a_flat_state_the_bare_names_are_taken(tmp_path: Path, run: Run) -> None:
    state = {"up.weight": torch.ones(2), "optimizer": {"up.weight": torch.ones(2)}, "step": 4}
    target = distributed(tmp_path / "dcp", state)
    status, said = run("import", target, tmp_path / "store")
    assert status == 0
    assert "left out: 2 (optimizer.up.weight, step)" in said
    assert whole(tmp_path / "store").shared_names == ["model.up.weight"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prefix", "nope."), "the names begin with a: choose with --prefix"),
        (("--without", "a"), "no tensor is chosen"),
        (("--without", "b"), "nothing that --without could leave out"),
        (("--object", "a.b"), "no object can be tracked as 'a.b'"),
        (("--object", "stepfast"), "no object can be tracked as 'stepfast'"),
        (("--step", "-1"), "--step must be at least 0"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(
    tmp_path: Path, run: Run, flags: tuple[str, ...], words: str
) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    status, said = run("import", tmp_path / "w.safetensors", tmp_path / "store", *flags)
    assert status == 78 and words in said
    assert not (tmp_path / "store").exists()


# --- what others write ---------------------------------------------------------------------------


def test_a_sharded_model_is_read_by_its_index(tmp_path: Path, run: Run) -> None:
    model = a_model()
    files = {"a.safetensors": ["embed.weight", "scale"], "sub/b.safetensors": ["nothing", "small"]}
    (tmp_path / "sub").mkdir()
    for file, names in files.items():
        save_file({name: model[name] for name in names}, tmp_path / file)
    index = {name: file for file, names in files.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert contents(tmp_path) == {n: bytes_of(model[n]) for n in index}


def test_a_cache_of_hugging_face_has_links_into_its_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1f", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert contents(snapshot) == {"w": bytes_of(torch.ones(2))}


@pytest.mark.parametrize("is_consolidated", [False, True])
def test_torchs_writer_of_safetensors(tmp_path: Path, is_consolidated: bool) -> None:
    # What torch 2.13 can consolidate: two types are unknown to it, and a scalar becomes 0.
    model = {n: t for n, t in a_model().items() if n not in ("small", "flags", "scale")}
    target = distributed(
        tmp_path / "hf", model, writer=HuggingFaceStorageWriter,
        save_distributed=True, enable_consolidation=is_consolidated,
    )  # fmt: skip
    assert contents(target) == {name: bytes_of(tensor) for name, tensor in model.items()}


def write_part(path: Path, parts: dict[str, tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    sharding = {name: {"saved_offsets": offsets} for name, (_, offsets) in parts.items()}
    data = {name: part.contiguous() for name, (part, _) in parts.items()}
    save_file(data, path, metadata={"DCP_SHARDING_INFO": json.dumps(sharding)})


def test_parts_in_safetensors_files_are_put_together(tmp_path: Path, run: Run) -> None:
    w, v = torch.arange(24.0).view(4, 6), torch.arange(4)
    write_part(tmp_path / "shard-1.safetensors", {"w": (w[:3, :4], (0, 0)), "v": (v, (0,))})
    write_part(tmp_path / "shard-2.safetensors", {"w": (w[:3, 4:], (0, 4)), "v": (v, (0,))})
    write_part(tmp_path / "shard-3.safetensors", {"w": (w[3:], (3, 0))})
    assert contents(tmp_path) == {"w": bytes_of(w), "v": bytes_of(v)}
    write_part(tmp_path / "shard-2.safetensors", {"w": (w[:3, 5:], (0, 5))})
    status, said = run("import", tmp_path, tmp_path / "store")
    assert status == 1 and "the parts of w do not make up its [4, 6]" in said


def put_parts(target: Path, name: str, tensor: torch.Tensor, boxes: list[tuple[Any, ...]]) -> None:
    """A distributed checkpoint of one tensor, cut into boxes, each in a file of its own."""
    target.mkdir()
    chunks, where = [], {}
    for number, box in enumerate(boxes):
        offsets = [each.indices(size)[0] for each, size in zip(box, tensor.shape, strict=True)]
        with (target / f"__{number}_0.distcp").open("wb") as file:
            file.write(b"something before")
            torch.save(tensor[box].clone(memory_format=torch.preserve_format), file)
            length = file.tell() - 16
        chunks.append(torch_metadata.ChunkStorageMetadata(torch.Size(offsets), tensor[box].shape))
        index = torch_metadata.MetadataIndex(name, offsets)
        where[index] = _StorageInfo(f"__{number}_0.distcp", 16, length)
    properties = torch_metadata.TensorProperties.create_from_tensor(tensor)
    known = {name: torch_metadata.TensorStorageMetadata(properties, tensor.shape, chunks)}
    metadata = torch_metadata.Metadata(known, planner_data={}, storage_data=where)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))


def test_parts_of_a_distributed_checkpoint_are_put_together(tmp_path: Path) -> None:
    tensor = torch.arange(5 * 4 * 6, dtype=torch.int16).view(5, 4, 6)
    every, cuts = slice(None), (slice(0, 2), slice(2, 5))
    layouts: dict[str, list[tuple[Any, ...]]] = {
        "rows": [(cut, every, every) for cut in cuts],
        "grid": [(a, every, b) for a in cuts for b in (slice(0, 1), slice(1, 6))],
        "uneven": [(cuts[0], every, every), *((cuts[1], slice(i, i + 1), every) for i in range(4))],
        "whole": [(every, every, every)],
    }
    for kind, boxes in layouts.items():
        for order, permuted in {"": tensor, "-permuted": tensor.permute(2, 0, 1)}.items():
            target = tmp_path / f"{kind}{order}"
            moved = [tuple(box[i] for i in (2, 0, 1)) for box in boxes] if order else boxes
            put_parts(target, "w", permuted, moved)
            assert contents(target) == {"w": bytes_of(permuted)}, target.name


def test_strides_of_every_kind_are_followed(tmp_path: Path) -> None:
    base = torch.arange(60.0).view(3, 4, 5)
    state = {
        "transposed": base.transpose(0, 2), "part": base[1:, ::2, 1:4], "expanded": base[:, :1, :1]
        .expand(3, 4, 5), "shared": base, "again": base, "one": base[2, 3, 4],
        "parameter": torch.nn.Parameter(base.t().to(torch.bfloat16) if base.dim() == 2 else base),
        "half": base.to(torch.float16), "unsigned": base.to(torch.uint16),
    }  # fmt: skip
    torch.save({"model": state, "step": 3}, tmp_path / "w.pt")
    wanted = {f"model.{name}": bytes_of(value.detach()) for name, value in state.items()}
    assert contents(tmp_path / "w.pt") == wanted


# --- what is refused -----------------------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def header_of(path: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(shape: list[int], *offsets: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def link(directory: Path) -> None:
    save_file({"w": torch.ones(1)}, directory.parent / "elsewhere.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../elsewhere.safetensors")


def two(directory: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.ones(1)}, directory / name)
    (directory / "model.safetensors").unlink()


BAD_MODELS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "cut": (lambda d: truncated(d / "model.safetensors"), 1, "is cut or longer than it was"),
    "longer": (lambda d: append(d / "model.safetensors"), 1, "longer than it was"),
    "empty": (lambda d: (d / "model.safetensors").write_bytes(b""), 1, "its header is cut"),
    "header cut": (
        lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 30), 1, "its header is cut",
    ),
    "no JSON": (lambda d: header_of(d / "model.safetensors", b"{]"), 1, "no readable JSON"),
    "no dict": (lambda d: header_of(d / "model.safetensors", [1]), 1, "no JSON of names"),
    "no entry": (lambda d: header_of(d / "model.safetensors", {"a": 1}), 1, "header is damaged"),
    "names twice": (
        lambda d: header_of(d / "model.safetensors", b'{"a":1,"a":2}'), 1, "two entries 'a'",
    ),
    "overlap": (
        lambda d: header_of(
            d / "model.safetensors", {"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678"
        ), 1, "the bytes of b are not where they must be",
    ),
    "size": (
        lambda d: header_of(d / "model.safetensors", {"a": entry([3], 0, 8)}, b"12345678"),
        1, "the bytes of a are not where they must be",
    ),
    "a type": (
        lambda d: header_of(d / "model.safetensors", {"a": entry([1], 0, 1, dtype="F4")}, b"1"),
        1, "a has a type that stepfast does not keep (F4)",
    ),
    "no model": (lambda d: (d / "model.safetensors").unlink(), 78, "it is no model's directory"),
    "no index": (two, 78, "2 safetensors files and no"),
    "a link": (link, 1, "leads out of it"),
    "absent": (lambda d: with_index(d, {"w": "b.safetensors"}), 1, "No such file"),
    "above": (lambda d: with_index(d, {"w": "../m/model.safetensors"}), 1, "leads out of it"),
    "absolute": (lambda d: with_index(d, {"w": "/etc/passwd"}), 1, "which cannot be in it"),
    "no file": (lambda d: with_index(d, {"w": "."}), 1, "no regular file"),
    "not in it": (
        lambda d: with_index(d, {"v": "model.safetensors"}), 1, "which does not have it",
    ),
    "not in the index": (lambda d: with_index(d, {}), 78, "no tensor is chosen"),
    "no map": (lambda d: with_index(d, {"w": 3}), 1, "no weight_map"),
    "in two": (
        lambda d: (
            save_file({"w": torch.ones(1)}, d / "b.safetensors"),
            with_index(d, {"w": "model.safetensors", "v": "b.safetensors"}),
        ), 1, "b.safetensors, which does not have it",
    ),
    "bins": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), 78,
        "give pytorch_model.bin itself",
    ),
    "own": (lambda d: (d / "manifest.json").write_text("{}"), 78, "a checkpoint of stepfast's own"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_is_one_line_and_leaves_nothing(tmp_path: Path, run: Run, kind: str) -> None:
    spoil, status_wanted, words = BAD_MODELS[kind]
    directory = tmp_path / "m"
    directory.mkdir()
    save_file({"w": torch.arange(8.0)}, directory / "model.safetensors")
    spoil(directory)
    status, said = run("import", directory, tmp_path / "store")
    assert (status, said.count("\n")) == (status_wanted, 1)
    assert words in said and str(directory) in said
    assert not (tmp_path / "store").exists()


def spoilt_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def each_info(change: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda d: spoilt_metadata(d, lambda m: [change(i) for i in m.storage_data.values()])


BAD_DISTRIBUTED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "data cut": (lambda d: truncated(d / "__0_0.distcp"), 1, "__0_0.distcp is cut: model.w ends"),
    "data gone": (lambda d: (d / "__0_0.distcp").unlink(), 1, "No such file"),
    "data damaged": (
        lambda d: (d / "__0_0.distcp").write_bytes(b"x" * (d / "__0_0.distcp").stat().st_size),
        1, "it is cut, or nothing that torch.save wrote",
    ),
    "metadata cut": (lambda d: truncated(d / ".metadata"), 1, "no whole pickle"),
    "metadata of ranks": (
        lambda d: (d / ".metadata").rename(d / "__0.metadata"), 78, "use_collectives=True",
    ),
    "another's": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})), 1, "not as torch writes",
    ),
    "above": (each_info(lambda i: setattr(i, "relative_path", "../x")), 1, "leads out of it"),
    "absolute": (each_info(lambda i: setattr(i, "relative_path", "/x")), 1, "cannot be in it"),
    "compressed": (
        each_info(lambda i: setattr(i, "transform_descriptors", ["zstd"])), 1, "compressed",
    ),
    "negative": (each_info(lambda i: setattr(i, "offset", -5)), 1, "is cut"),
    "part lost": (
        lambda d: spoilt_metadata(d, lambda m: m.storage_data.clear()), 1, "does not say where",
    ),
    "shape": (
        lambda d: spoilt_metadata(
            d, lambda m: setattr(m.state_dict_metadata["model.w"], "size", torch.Size([9, 2]))
        ), 1, "do not make up its [9, 2]",
    ),
    "type": (
        lambda d: spoilt_metadata(
            d, lambda m: setattr(
                m.state_dict_metadata["model.w"].properties, "dtype", torch.int32
            )
        ), 1, "model.w is F32 [3, 2] in __0_0.distcp, and I32 [3, 2] in .metadata",
    ),
    "unkept": (
        lambda d: spoilt_metadata(
            d, lambda m: setattr(
                m.state_dict_metadata["model.w"].properties, "dtype", torch.complex128
            )
        ), 1, "model.w has a type that stepfast does not keep",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_DISTRIBUTED)
def test_a_bad_distributed_checkpoint_is_one_line(tmp_path: Path, run: Run, kind: str) -> None:
    spoil, status_wanted, words = BAD_DISTRIBUTED[kind]
    directory = distributed(tmp_path / "dcp", {"model": {"w": torch.ones(3, 2)}, "step": 1})
    spoil(directory)
    status, said = run("import", directory, tmp_path / "store")
    assert (status, said.count("\n")) == (status_wanted, 1), said
    assert words in said and str(directory) in said
    assert not list((tmp_path / "store").glob("*"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no zip", "it is cut, or nothing that torch.save wrote"),
        ({"w": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "conjugated"),
        ({"w": Path("x")}, "pathlib"),
        ({"w": {1: torch.ones(1)}, "w.1": torch.ones(1)}, "two tensors 'w.1'"),
        (torch.ones(2), "without a name"),
        ({"lr": 0.1}, "no tensor is chosen"),
    ],
)
def test_a_file_that_is_no_dict_of_tensors_is_refused(
    tmp_path: Path, run: Run, content: Any, words: str
) -> None:
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    status, said = run("import", path, tmp_path / "store")
    assert status in (1, 78) and words in said


def test_an_old_file_of_torchs_is_refused(tmp_path: Path, run: Run) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    status, said = run("import", tmp_path / "w.pt", tmp_path / "store")
    assert status == 1 and "nothing that torch.save wrote" in said


# --- the store -----------------------------------------------------------------------------------


def test_a_step_that_is_there_and_the_store_of_a_run_are_refused(tmp_path: Path, run: Run) -> None:
    source, store = tmp_path / "w.safetensors", tmp_path / "store"
    save_file({"w": torch.ones(2)}, source)
    assert run("import", source, store, "--step", 7)[0] == 0
    before = (store / "step-000000007-gen-0000" / "manifest.json").read_bytes()
    status, said = run("import", source, store, "--step", 7)
    assert status == 78 and "has a checkpoint of step 7 already" in said
    assert (store / "step-000000007-gen-0000" / "manifest.json").read_bytes() == before
    assert run("import", source, store, "--step", 8)[0] == 0
    status, said = run("import", source, store / "step-000000009-gen-0000")
    assert status == 78 and "give the store" in said
    job = tmp_path / "job"
    run_store, _ = save_tensors(job, [[TensorSpec("w", "U8", (1,), (1,), (0,))]], [{"w": b"x"}])
    status, said = run("import", source, run_store.url)
    assert status == 78 and "has a run's checkpoints, up to step 5" in said


def test_a_missing_source_is_one_line(tmp_path: Path, run: Run) -> None:
    status, said = run("import", tmp_path / "nope", tmp_path / "store")
    assert (status, said.count("\n")) == (78, 1)
    assert said.startswith(f"stepfast: there is no {tmp_path / 'nope'};")


def test_an_import_that_dies_anywhere_leaves_nothing_that_exists(tmp_path: Path) -> None:
    save_file(a_model(), tmp_path / "w.safetensors")
    source = open_source(tmp_path / "w.safetensors")
    chosen = choose(source, Selection())

    def do(disk: TornDisk) -> None:
        import_checkpoint(source, chosen, DirectoryStore(ROOT, disk), tracked="model")

    with small_pieces():
        _, disk = in_memory()
        do(disk)
        count = len(disk.calls)
        assert count > 15
        for at in range(count):
            for when in (BEFORE, AFTER):
                _, disk = in_memory()
                disk.plan = Plan(at, when=when)
                with contextlib.suppress(Crashed):
                    do(disk)
                assert len(disk.calls) > at
                for mode in ("kept", "lost", "torn"):
                    found = disk.after_crash(mode)
                    store = DirectoryStore(ROOT, found)
                    there = committed(store)
                    assert not there or verify(store, FIRST, threads=1) == []
                    if not there:
                        do(found)  # the same again
                    assert verify(store, FIRST, threads=1) == []


def test_what_turns_out_damaged_meanwhile_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(1 << 21)}, path)
    source = open_source(path)
    truncated(path)
    store = DirectoryStore(tmp_path / "store")
    with pytest.raises(StateError, match=r"w\.safetensors is cut"):
        import_checkpoint(source, choose(source, Selection()), store, tracked="model")
    assert survey(store).unfinished == () and store.directories() == []


def test_memory_does_not_grow_with_the_model(tmp_path: Path, run: Run) -> None:
    path, size = tmp_path / "w.safetensors", 64 << 20
    header_of(path, {"w": entry([size], 0, size, dtype="U8")})
    os.truncate(path, path.stat().st_size + size)
    tracemalloc.start()
    try:
        assert run("import", path, tmp_path / "store")[0] == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4
