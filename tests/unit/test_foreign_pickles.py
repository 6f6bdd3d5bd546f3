"""Pickles of others are read as data: whatever they say, nothing of it happens."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle  # noqa: TID251 - it is what has to be refused
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from stepfast.checkpoint.foreign import dcp as foreign_dcp
from stepfast.checkpoint.foreign.dcp import METADATA_FILE, read_dcp
from stepfast.checkpoint.foreign.inert import read_inert
from stepfast.checkpoint.foreign.source import pieces
from stepfast.checkpoint.foreign.torch_file import read_torch_file
from stepfast.checkpoint.imported import open_source
from stepfast.cli.main import main
from stepfast.errors import StateError, StepfastError

Payload = Callable[[Path], Any]


class Calls:
    """Unpickled, it calls."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._what = function, arguments

    def __reduce__(self) -> Any:
        return self._what

    def __call__(self) -> None:
        """What is called is a call's result: pickle wants to see that it could be."""


class Registered:
    """A class with an extension code of this process."""


def touching(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def by_state(marker: Path) -> Any:
    """A class of DCP's own, whose state calls."""
    index = MetadataIndex("w")
    object.__setattr__(index, "offset", Calls(os.system, f"touch {marker}"))
    return index


# What a pickle may name, and the name by which it is refused.
PAYLOADS: dict[str, Payload] = {
    "posix.system": lambda marker: Calls(os.system, f"touch {marker}"),
    "builtins.eval": lambda marker: Calls(eval, touching(marker)),
    "builtins.exec": lambda marker: Calls(exec, touching(marker)),
    "builtins.getattr": lambda marker: Calls(
        Calls(getattr, Calls(__import__, "os"), "system"), f"touch {marker}"
    ),
    "builtins.__import__": lambda marker: Calls(__import__, "antigravity"),
    "torch.storage._load_from_bytes": lambda marker: Calls(
        torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, f"touch {marker}"))
    ),
    "copyreg._reconstructor": lambda marker: Calls(copyreg._reconstructor, dict, object, None),
    "torch._utils._rebuild_tensor_v2": lambda marker: Calls(torch._utils._rebuild_tensor_v2, 1),
    "torch.serialization.load": lambda marker: Calls(torch.load, str(marker)),
}


def metadata_with(payload: Any) -> Iterator[bytes]:
    """`.metadata` files with the payload at each place where they hold something."""
    good = {"w": BytesStorageMetadata()}
    info = {MetadataIndex("w"): _StorageInfo("__0_0.distcp", 0, 1)}
    yield pickle.dumps(payload)
    yield pickle.dumps(Metadata(good, planner_data=payload, storage_data=info))
    yield pickle.dumps(Metadata({"w": payload}, storage_data=info))
    yield pickle.dumps(Metadata(good, storage_data=info, storage_meta=StorageMeta(payload)))
    yield pickle.dumps(Metadata(good, storage_data={MetadataIndex("w"): payload}))
    yield pickle.dumps(Metadata(good, storage_data=info, version=payload), protocol=2)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_metadata_file_that_would_call_is_refused_by_name(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    for raw in metadata_with(PAYLOADS[name](marker)):
        (tmp_path / METADATA_FILE).write_bytes(raw)
        with pytest.raises(StateError, match="refused") as raised:
            read_dcp(tmp_path)
        assert f"{name.rpartition('.')[2]}'" in str(raised.value)  # older protocols rename modules
        assert "\n" not in str(raised.value)
    assert not marker.exists()


def test_the_payloads_would_have_worked(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for name in ("posix.system", "builtins.exec", "builtins.getattr"):
        for raw in list(metadata_with(PAYLOADS[name](marker)))[:2]:
            pickle.loads(raw)  # our own payload, to show that a refusal of it means something
            assert marker.exists()
            marker.unlink()


def test_a_class_of_its_own_whose_state_calls_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    raw = pickle.dumps(Metadata({}, storage_data={by_state(marker): _StorageInfo("x", 0, 1)}))
    (tmp_path / METADATA_FILE).write_bytes(raw)
    with pytest.raises(StateError, match=r"posix\.system"):
        read_dcp(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"(S'touch x'\nios\nsystem\n.", "os.system"),
        (b"cos\nsystem\n(S'touch x'\ntR.", "os.system"),
        (b"(cos\nsystem\nS'touch x'\no.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.", "torch.Size.__class__"),
        (b"\x80\x04\x8c\x01aK\x01\x93.", "no text"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00x.", "BYTEARRAY8"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x09N.", "newer Python"),
        (b"\x80\x02}K\x01K\x02\x86b.", "plain value"),  # a state for a dict
        (b"\x80\x02]K\x01K\x02R.", "calls what is no plain name"),
        (b"\x80\x02ctorch\nSize\nK\x01R.", "calls what is no plain name"),
        (b"\x80\x02}K\x01a.", "no list"),
        (b"\x80\x02]K\x01K\x02s.", "no dict"),
        (b"", "no whole pickle"),
        (b"\x80\x02K\x01", "no whole pickle"),
        (b"\x80\x02h\x07.", "no whole pickle"),
        (b"\x80\x02\x86.", "no whole pickle"),
        (b"\x80\x02.", "no whole pickle"),
        (b"\xff\xff", "no whole pickle"),
    ],
)
def test_each_way_to_call_or_to_be_torn_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(StateError) as raised:
        read_inert(raw, {"torch.Size"}, "PLACE")
    assert words in str(raised.value)
    assert "PLACE" in str(raised.value)


@settings(max_examples=200)
@given(raw=st.binary(max_size=60))
def test_noise_is_a_value_or_a_state_error(raw: bytes) -> None:
    for start in (b"", b"\x80\x04", b"(", b"\x80\x02}("):
        try:
            read_inert(start + raw, foreign_dcp.ADMITTED, "PLACE")
        except StateError:
            pass


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small distributed checkpoint of torch's own."""
    target = tmp_path_factory.mktemp("dcp")
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    return target


def test_a_damaged_directory_is_one_error_whatever_was_damaged(saved: Path, tmp_path: Path) -> None:
    chance, files = random.Random(3), {path.name: path.read_bytes() for path in saved.iterdir()}
    whole = 0
    for turn in range(300):
        name = chance.choice(sorted(files))
        raw = bytearray(files[name])
        for _ in range(chance.choice((1, 1, 4))):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        if turn % 5 == 0:
            del raw[chance.randrange(len(raw)) :]
        for other, content in files.items():
            (tmp_path / other).write_bytes(raw if other == name else content)
        with contextlib.suppress(StepfastError):
            source = open_source(tmp_path)
            for tensor_name, tensor in source.tensors.items():
                assert len(b"".join(pieces("x", tensor_name, tensor))) == tensor.size_bytes
            whole += 1
    assert 0 < whole < 300  # some damage lies where nothing is read


def test_protocols_of_older_and_newer_pythons_are_read(saved: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    raws = [pickle.dumps(metadata, protocol) for protocol in range(2, 6)]
    # As Python 3.13 has it: its paths lie in another module.
    newer = raws[2].replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    assert newer != raws[2]
    for raw in [*raws, newer[:2] + newer[11:]]:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / METADATA_FILE).write_bytes(raw)
        source = read_dcp(tmp_path)
        assert source.owners == {"model.w": "model"}
        content = b"".join(pieces("x", "w", source.tensors["model.w"]))
        assert content == torch.arange(6.0).numpy().tobytes()


def zip_with(pickled: bytes, storages: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
    return target.getvalue()


@pytest.mark.parametrize(
    "name", ["posix.system", "builtins.eval", "torch.storage._load_from_bytes"]
)
def test_a_data_file_that_would_call_is_refused_by_name(
    saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "executed"
    evil = zip_with(pickle.dumps({"w": PAYLOADS[name](marker)}), {})
    (tmp_path / "w.pt").write_bytes(evil)
    with pytest.raises(StateError) as raised:
        read_torch_file(tmp_path / "w.pt")
    assert repr(name) in str(raised.value)
    metadata = dcp.FileSystemReader(saved).read_metadata()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(evil)
    target = tmp_path / "dcp"
    target.mkdir()
    (target / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    (target / "__0_0.distcp").write_bytes(evil)
    assert main(["ckpt", "import", str(target), str(tmp_path / "store")]) == 1
    assert repr(name) in capsys.readouterr().err
    assert not marker.exists()
    assert not list((tmp_path / "store").rglob("*.*"))


def test_what_an_extension_code_means_is_not_asked(tmp_path: Path) -> None:
    copyreg.add_extension(Registered.__module__, "Registered", 240)
    try:
        raw = pickle.dumps({"w": Registered}, 2)
        assert b"\x82\xf0" in raw
        with pytest.raises(StateError, match="EXT1"):
            read_inert(raw, {"torch.Size"}, "PLACE")
    finally:
        copyreg.remove_extension(Registered.__module__, "Registered", 240)


def test_dicts_are_read_as_pairs_and_nothing_is_hashed() -> None:
    value = read_inert(pickle.dumps(OrderedDict(a=[1, (2, None)])), {"collections.OrderedDict"}, "")
    assert value.items.items == [("a", [1, (2, None)])]
