"""The main job's own promises: its sizes, its weights, its data, its loss, its errors.

The example is loaded with a stand-in for `stepfast.resilient`, so that its parts are tested alone
and in one process; that it survives faults is what the process tests show.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import stepfast

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"


class StandInRun:
    """As much of `stepfast.Run` as the example uses, without recovery."""

    def __init__(self, resuming: bool = False) -> None:
        self.device = torch.device("cpu")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.resuming = resuming
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp",))
        self.sections: list[str] = []
        self.logged: list[dict[str, float]] = []

    def once(self, build: Callable[[Any], Any]) -> Any:
        return build(self)

    def track(self, **objects: Any) -> types.SimpleNamespace:
        batches = objects.pop("batches")
        return types.SimpleNamespace(batches=endless(batches), **objects)

    def steps(self, count: int) -> Iterator[int]:
        yield from range(count)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections.append(name)
        yield

    def log(self, **metrics: torch.Tensor) -> None:
        self.logged.append({name: value.item() for name, value in metrics.items()})


def endless(loader: Any) -> Iterator[Any]:
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepfast, "resilient", lambda train: train, raising=False)
        patch.setattr(stepfast, "Run", StandInRun, raising=False)
        spec = importlib.util.spec_from_file_location("train_llama_example", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@contextlib.contextmanager
def world(rank: int = 0, size: int = 1) -> Iterator[None]:
    """A process group of this process alone, or one rank of a group that moves no data."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes, and so the rank that has just ended
        torch.set_num_threads(threads)


def train(example: Any, *flags: str) -> StandInRun:
    args = example.parse_args(list(flags))
    with world():
        run = StandInRun()
        example.train(run, args, example.read_corpus(args.data))
    return run


@pytest.mark.parametrize(("name", "low", "high"), [
    ("debug", 0.8e6, 1.2e6), ("small", 24e6, 26e6), ("medium", 133e6, 135e6), ("8b", 7.9e9, 8.2e9),
])  # fmt: skip
def test_sizes_have_the_parameters_that_their_names_say(
    example: Any, name: str, low: float, high: float
) -> None:
    with torch.device("meta"):
        model = example.Llama(example.SIZES[name])
    assert low < sum(weight.numel() for weight in model.parameters()) < high


def test_loss_falls_clearly_within_60_steps(example: Any) -> None:
    run = train(example, "--steps", "60", "--eval-every", "30")
    losses = [metrics["loss"] for metrics in run.logged]
    assert 5.2 < losses[0] < 5.8  # about log(256): nothing is known yet
    assert sum(losses[-10:]) / 10 < 3.5
    assert run.sections == ["eval", "eval"]
    assert [step for step, metrics in enumerate(run.logged) if "eval_loss" in metrics] == [29, 59]


def test_two_runs_of_one_seed_are_the_same_run_and_another_seed_is_another(example: Any) -> None:
    first, second, other = (train(example, "--steps", "3", "--seed", seed).logged for seed in "112")
    assert first == second
    assert first != other


def test_accumulating_small_batches_is_one_large_batch(example: Any) -> None:
    large = train(example, "--steps", "3", "--batch-size", "4").logged
    small = train(example, "--steps", "3", "--batch-size", "2", "--accumulate", "2").logged
    for one, two in zip(large, small, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-3)


def test_only_matrices_decay_and_clipping_is_off_unless_asked_for(example: Any) -> None:
    args = example.parse_args([])
    assert args.clip_norm == 0
    with torch.device("meta"):
        model = example.Llama(example.SIZES["debug"])
    optimizer, _ = example.build_optimizer(model, args)
    decay_by_ndim = {
        weight.ndim: group["weight_decay"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert decay_by_ndim == {1: 0.0, 2: 0.1}


def test_learning_rate_warms_up_and_falls_to_a_tenth(example: Any) -> None:
    args = example.parse_args(["--steps", "100", "--lr", "1"])
    with torch.device("meta"):
        model = example.Llama(example.SIZES["debug"])
    _, schedule = example.build_optimizer(model, args)
    (factor, _) = schedule.lr_lambdas
    assert factor(0) == pytest.approx(0.1)
    assert max(factor(step) for step in range(100)) == pytest.approx(1.0, abs=0.03)
    assert factor(100) == pytest.approx(0.1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_do_not_depend_on_the_world_size(example: Any, world_size: int) -> None:
    size = example.SIZES["debug"]
    with world():
        whole = {
            name: weight.to_local().detach().clone()
            for name, weight in example.build_model(StandInRun(), size, 7).named_parameters()
        }
    for rank in range(world_size):
        with world(rank, world_size):
            for name, weight in example.build_model(StandInRun(), size, 7).named_parameters():
                shards = whole[name].chunk(world_size)
                assert torch.equal(weight.to_local(), shards[rank])


def test_weights_are_not_drawn_when_they_will_be_restored(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(example, "init_weights", lambda _model, seed: drawn.append(seed))
    with world():
        example.build_model(StandInRun(resuming=True), example.SIZES["debug"], 7)
        assert drawn == []
        example.build_model(StandInRun(), example.SIZES["debug"], 7)
    assert drawn == [7]


def test_ranks_share_every_window_once_and_never_the_held_out_ones(example: Any) -> None:
    args = example.parse_args(["--batch-size", "1", "--sequence-length", "1"])
    corpus = bytearray(range(256))  # every token is another: a window is known by its first
    seen: list[int] = []
    held_out: list[int] = []
    for rank in range(2):
        with world(rank, 2):
            batches, held_out_NT = example.build_data(StandInRun(), args, corpus)
        seen += [int(window_BT[0, 0]) for (window_BT,) in batches]
        held_out += held_out_NT[:, 0].tolist()
    assert sorted(seen) == list(range(240))
    assert sorted(held_out) == list(range(240, 248))


def test_corpus_is_the_readable_text_in_the_order_of_names(example: Any, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "image.bin").write_bytes(b"\x00\x01")
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert example.read_corpus(tmp_path) == b"first second"


def test_corpus_is_bounded(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "CORPUS_BYTES_MAX", 10)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 6)
    assert example.read_corpus(tmp_path) == b"aaaaaabbbb"


def test_too_little_text_is_an_error_that_says_what_to_change(example: Any) -> None:
    with world(), pytest.raises(ValueError, match="bytes of text are too few; give more"):
        example.build_data(StandInRun(), example.parse_args([]), bytearray(b"short"))


@pytest.mark.parametrize("exists", [True, False])
def test_no_text_is_one_clear_line(
    example: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
) -> None:
    directory = tmp_path if exists else tmp_path / "missing"
    monkeypatch.setattr(sys, "argv", ["train_llama.py", "--data", str(directory)])
    with pytest.raises(SystemExit) as stop:
        example.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"train_llama: no readable text file in --data {directory}\n"


@pytest.mark.parametrize("flag", ["--steps", "--accumulate", "--eval-every"])
def test_counts_below_one_are_refused(
    example: Any, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit):
        example.parse_args([flag, "0"])
    assert f"argument {flag}: 0 is less than 1" in capsys.readouterr().err
