"""Checkpoints in torch's formats, read back by torch."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from property.layouts import SNAPSHOT, Layout, Recipe, build, save, train
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.tensors.export import ExportFormat, export
from stepfast.cli.main import main
from stepfast.errors import ConfigError, OperatingError

Whole = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    root = tmp_path_factory.mktemp("saved")
    return StoredCheckpoint.open(save(root, Layout("tp", (2, 2)), Recipe()), SNAPSHOT)


@pytest.fixture
def wanted() -> tuple[Whole, Whole]:
    """A model's state, and that of its optimizer by its parameters' names."""
    objects = build(Layout("plain"), Recipe())
    train(objects, 0)
    model, optimizer = objects["model"], objects["optimizer"]
    state = {
        f"state.{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    state |= {f"param_groups.0.{key}": optimizer.param_groups[0][key] for key in ("lr",)}
    return model.state_dict(), state


def test_a_torch_file_loads_into_a_plain_model(
    tmp_path: Path, checkpoint: StoredCheckpoint, wanted: tuple[Whole, Whole]
) -> None:
    target = tmp_path / "whole.pt"
    export(checkpoint, target, ExportFormat.TORCH)
    loaded = torch.load(target, weights_only=True)
    model = build(Layout("plain"), Recipe(seed=2))["model"]
    model.load_state_dict(loaded["model"], strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[0][name]), name
    for name, value in wanted[1].items():
        assert torch.equal(loaded["optimizer"][name], value), name
    assert loaded.keys() <= {"model", "optimizer", "scheduler"}


def test_torchs_distributed_checkpoint_loads_the_directory(
    tmp_path: Path, checkpoint: StoredCheckpoint, wanted: tuple[Whole, Whole]
) -> None:
    import torch.distributed.checkpoint as dcp

    target = tmp_path / "dcp"
    assert export(checkpoint, target, ExportFormat.DCP, objects=["model"]) == len(wanted[0])
    state = {"model": {name: torch.zeros_like(value) for name, value in wanted[0].items()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(target), no_dist=True)
    for name, value in wanted[0].items():
        assert torch.equal(state["model"][name], value), name


def test_what_exists_and_what_is_unknown_is_refused(
    tmp_path: Path, checkpoint: StoredCheckpoint
) -> None:
    with pytest.raises(ConfigError, match=r"no tensors of models; .* model, optimizer"):
        export(checkpoint, tmp_path / "x", ExportFormat.TORCH, objects=["models"])
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        export(checkpoint, tmp_path / "x", ExportFormat.TORCH)
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_directories_above_a_target_are_made_and_what_cannot_be_written_is_one_line(
    tmp_path: Path,
    checkpoint: StoredCheckpoint,
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    def export_to(target: Path) -> tuple[int, str]:
        status = main(["ckpt", "export", checkpoint.place, str(target), "--format", form])
        return status, capsys.readouterr().err

    assert export_to(tmp_path / "deep" / "er" / "model") == (0, "")
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["model"]
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "model", Path("/proc/none/model")):
        status, said = export_to(target)
        assert status in (1, 78) and said.count("\n") == 1 and str(target) in said, said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, checkpoint: StoredCheckpoint, form: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OperatingError, match="model") as raised:
            export(checkpoint, tmp_path / "model", ExportFormat(form))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_the_command_writes_the_model(
    tmp_path: Path,
    checkpoint: StoredCheckpoint,
    capsys: pytest.CaptureFixture[str],
    form: str,
    wanted: tuple[Whole, Whole],
) -> None:
    target = tmp_path / "exported"
    assert main(["ckpt", "export", checkpoint.place, str(target), "--format", form]) == 0
    assert f"{len(wanted[0])} tensors in {target}" in capsys.readouterr().out
    assert target.is_file() == (form == "torch")
