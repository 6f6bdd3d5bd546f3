"""Every kind of sharding on two ranks: there and back bit for bit, without a collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from process.tracking_workloads import KINDS, SHARDED1, in_ranks, round_trip, whole_tensors
from stepfast.checkpoint.restore import open_sealed, read_state


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_sharding_comes_back_bitwise_without_a_collective(tmp_path: Path, kind: str):
    for answer in in_ranks(2, round_trip, tmp_path, kind):
        losses, digests = answer["wanted"]
        for is_as_it_was, losses_again, digests_again in answer["found"]:
            assert is_as_it_was
            assert losses_again == losses
            assert digests_again == digests


def pieces(slot: str) -> dict[str, tuple[Any, torch.Tensor]]:
    layout, snapshot = read_state(Path(slot))
    assert snapshot is not None
    read = open_sealed(Path(slot), snapshot)
    dtypes = {"F32": torch.float32}
    return {
        entry.name: (entry, torch.frombuffer(read.view(entry), dtype=dtypes[entry.dtype]))
        for entry in layout.entries
        if entry.dtype in dtypes and entry.size_bytes
    }


OTHER = ("no_shard", "replicated", "bfloat16")  # not cut into pieces, or of other values
FLAT = [kind for kind in SHARDED1 if not any(word in kind for word in OTHER)]


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole tensors, as FSDP1 gathers them.

    Of flat parameters: with `use_orig_params` torch 2.13 gathers `exp_avg_sq` under both names.
    """
    answers = in_ranks(2, whole_tensors, tmp_path_factory.mktemp("gathered"), "fsdp1_flat")
    wanted: dict[str, Any] = answers[0]["wanted"]
    assert "model.embed.weight" in wanted and "optimizer.state.body.first.bias.exp_avg" in wanted
    return wanted


@pytest.mark.parametrize("kind", FLAT)
def test_a_flat_parameter_is_kept_as_the_original_ones(
    tmp_path: Path, gathered: dict[str, Any], kind: str
):
    """Together the ranks' pieces are what FSDP1 itself gathers: no padding, none missing."""
    found: dict[str, torch.Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for answer in in_ranks(2, whole_tensors, tmp_path, kind):
        for name, (entry, values) in pieces(answer["slot"]).items():
            if entry.original_shape is None:
                assert name == "model.body.seen" or name.endswith(".step")
                continue
            shapes[name] = entry.original_shape
            whole = found.setdefault(name, torch.full(entry.global_shape, float("nan")))
            start = entry.offsets[0]
            whole[start : start + entry.shape[0]] = values
    assert {name: found[name].view(shapes[name]).tolist() for name in found} == gathered
