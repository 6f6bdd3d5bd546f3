"""Checkpoints of real ranks: loaded into other kinds of sharding, and by torch without stepfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from process.reshard_workloads import STEP, load_each, save_kinds
from process.tracking_workloads import in_ranks
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import private_rank
from stepfast.checkpoint.manifest import Manifest

SAVED = ["fsdp2", "fsdp1", "fsdp1_flat", "ddp"]
Whole = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The committed checkpoints' directories, and what torch gathered of the FSDP2 one."""
    directory = tmp_path_factory.mktemp("saved")
    answers = in_ranks(2, save_kinds, directory, SAVED)
    for kind in SAVED:
        manifest = Manifest(
            job_id="job", step=STEP, generation=1, world_size=2, nproc_per_node=2,
            stepfast_version="1", torch_version="2", created_at_s=0.0,
            files=tuple(answer[kind][0] for answer in answers),
        )  # fmt: skip
        commit(DirectoryStore(directory / kind), manifest)
    return {"directory": directory, "gathered": answers[0]["fsdp2"][1]}


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*/*.safetensors"))


def assembled(directory: Path) -> Whole:
    """The whole tensors, put together by the files' own words, with safetensors alone."""
    from safetensors import safe_open

    found: Whole = {}
    original: dict[str, list[int]] = {}
    for path in files_of(directory):
        with safe_open(path, framework="pt") as file:
            sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            original |= json.loads(file.metadata().get("stepfast_shapes", "{}"))
            for name in file.keys():  # noqa: SIM118 - no dictionary
                if private_rank(name) is None:
                    part, place = file.get_tensor(name), sharding[name]
                    empty = torch.zeros(place["global_shape"], dtype=part.dtype)
                    starts = place["saved_offsets"]
                    box = [slice(a, a + n) for a, n in zip(starts, part.shape, strict=True)]
                    found.setdefault(name, empty)[tuple(box)] = part
    return {name: whole.view(original.get(name, whole.shape)) for name, whole in found.items()}


def check_parts(parts: list[Any], wanted: Whole) -> set[str]:
    names = set()
    for entry, local in parts:
        if private_rank(entry.name) is not None:
            continue
        names.add(entry.name)
        whole = wanted[entry.name]
        if entry.original_shape is not None:
            assert entry.original_shape == whole.shape
            whole = whole.reshape(-1)
        box = [slice(a, a + n) for a, n in zip(entry.offsets, entry.shape, strict=True)]
        assert torch.equal(whole[tuple(box)], local), entry
    return names


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [
        (1, [("plain", None)]),
        (2, [(kind, None) for kind in (*SAVED, "fsdp1_no_shard", "hsdp_replicated")]),
        (4, [("fsdp2", (4,)), ("hsdp", (2, 2))]),
    ],
)
def test_each_kind_loads_each_kind(
    tmp_path: Path, saved: dict[str, Any], world_size: int, kinds: list[Any]
) -> None:
    pairs = [(source, *kind) for source in SAVED for kind in kinds]
    todo = [(str(saved["directory"] / source), kind, shape) for source, kind, shape in pairs]
    wholes = {source: assembled(saved["directory"] / source) for source in SAVED}
    answers = in_ranks(world_size, load_each, tmp_path, todo)
    for number, (source, kind, _) in enumerate(pairs):
        names: set[str] = set()
        for answer in answers:
            is_resharded, parts, last_epoch = answer[number]
            names |= check_parts(parts, wholes[source])
            assert last_epoch == STEP + 2
            is_same = source == kind or {source, kind} == {"ddp", "fsdp1_no_shard"}
            assert is_resharded == (not is_same or world_size != 2), (source, kind)
        assert names == wholes[source].keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as is meant
def test_torchs_own_reader_loads_the_files_without_stepfast(saved: dict[str, Any]) -> None:
    import torch.distributed.checkpoint as dcp

    directory, gathered = saved["directory"] / "fsdp2", saved["gathered"]
    state = {name: torch.full_like(value, 77) for name, value in gathered.items()}
    (path,) = directory.glob("step-*")
    reader = dcp.HuggingFaceStorageReader(str(path))
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, value in gathered.items():
        assert torch.equal(state[name], value), name
    assert len(gathered) > 15


def test_safetensors_loads_each_file_and_the_parts_make_up_the_whole(saved: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    directory, gathered = saved["directory"] / "fsdp2", saved["gathered"]
    loaded = [load_file(path) for path in files_of(directory)]
    assert len(loaded) == 2
    sharded = 0
    for name, value in gathered.items():
        parts = [file[name] for file in loaded]
        if parts[0].shape == value.shape and parts[1].shape == value.shape:
            assert all(torch.equal(part, value) for part in parts)
        else:
            sharded += 1
            assert torch.equal(torch.cat(parts), value), name
    assert sharded > 10
    own = {name for file in loaded for name in file if name not in gathered}
    assert all(name.startswith(("stepfast.rank-00000.", "stepfast.rank-00001.")) for name in own)
    assert not set.intersection(*({n for n in file if n in own} for file in loaded))
