"""What an aborted collective leaves is never sealed; each rule that sees to it is needed.

Each test is made twice: with the rule, and with the rule taken away, where the poison gets through.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fakes.nccl_like.streams import Cuda
from process.nccl_pair import SUM, Pair, pairs
from stepfast.checkpoint import capture as capture_module
from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena, open_sealed
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.tensors.copier import StreamCopier, StreamCopying
from stepfast.checkpoint.tensors.local import over
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import Interrupted, OperatingError

WHOLE_COUNT = 2  # the first two snapshots are whole; from the third on one is copied beside


class Averaging:
    """A rank whose weights are averaged over all ranks at the end of each turn.

    So at the boundary the weights may still be garbage: the host is ahead of the device.
    """

    def __init__(self, directory: Path, pair: Pair) -> None:
        self.pair, self.cuda = pair, Cuda()
        self.model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.model.weight, 1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.tree = StateTree(
            {"model": self.model, "optimizer": self.optimizer},
            copiers={"cpu": StreamCopier(self.cuda)},
        )
        self.must_leave = False
        self.arena = Arena(directory, SLOTS_WITH_OVERLAP)
        self.capture = Capture(
            self.arena, self.tree, check=self._check, seal_obstacle=self._obstacle
        )
        for step in range(WHOLE_COUNT):
            self.capture.stage(SnapshotId(Generation(1), Step(step)))
            self.capture.fence()

    def _obstacle(self) -> str | None:
        if self.must_leave:
            return "the generation is over"
        error = self.pair.near.get_error()
        return None if error.name == "SUCCESS" else error.name

    def _check(self) -> None:
        if self.must_leave:
            raise Interrupted

    def turn(self, *, answered: bool) -> None:
        """Add one and average; the peer has the same weights."""
        with torch.no_grad():
            self.model.weight.add_(1.0)
        weights = self.model.weight.data
        mine = weights.clone()
        self.pair.near.allreduce([weights], SUM)
        if answered:
            self.pair.far.allreduce([mine], SUM)

    def abort(self) -> None:
        self.must_leave = True
        self.pair.near.abort()

    def sealed(self, step: int) -> list[float] | None:
        """The weights in the slot of that step."""
        for slot in self.arena.slots:
            if slot.snapshot is not None and slot.snapshot.step == step:
                read = open_sealed(slot.path, slot.snapshot)
                entry = read.layout.by_name["model.weight"]
                return over(read.view(entry), entry).flatten().tolist()
        return None


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Averaging]:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with pairs("world") as (pair,):
        yield Averaging(tmp_path, pair)


def snap(step: int, generation: int = 1) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


def test_the_copy_of_a_boundary_waits_for_the_collective_whose_result_it_copies(rank: Averaging):
    rank.turn(answered=True)
    rank.capture.stage(snap(2))
    assert rank.capture.fence() is not None
    assert rank.sealed(2) == [4.0] * 4


@pytest.mark.parametrize("has_rule", [True, False])
def test_a_copy_is_sealed_behind_its_event(
    rank: Averaging, has_rule: bool, monkeypatch: pytest.MonkeyPatch
):
    if not has_rule:
        monkeypatch.setattr(StreamCopying, "wait", lambda self, limit_s: True)
    rank.turn(answered=True)
    rank.cuda.side.hold()  # the device is behind
    rank.capture.stage(snap(2))
    threading.Timer(0.1, rank.cuda.side.release).start()
    assert rank.capture.fence() is not None
    assert (rank.sealed(2) == [4.0] * 4) == has_rule


@pytest.mark.parametrize("has_rule", [True, False])
def test_the_flag_is_looked_at_behind_the_event(
    rank: Averaging, has_rule: bool, monkeypatch: pytest.MonkeyPatch
):
    """The abort comes while the fence waits: the event passes, and what was copied is garbage."""
    if not has_rule:
        monkeypatch.setattr(Capture, "_refuse_unsound", lambda self: None)
    rank.turn(answered=False)
    rank.capture.stage(snap(2))
    threading.Timer(0.1, rank.abort).start()
    if has_rule:
        with pytest.raises(Interrupted):
            rank.capture.fence()
        assert rank.sealed(2) is None
    else:
        rank.capture.fence()
        assert rank.sealed(2) not in (None, [4.0] * 4)
    assert rank.sealed(1) == [1.0] * 4


@pytest.mark.parametrize("has_rule", [True, False])
def test_the_groups_are_asked_behind_the_event(
    rank: Averaging, has_rule: bool, monkeypatch: pytest.MonkeyPatch
):
    """The communicator breaks, nobody has heard of it yet, and no exception has come."""
    if not has_rule:
        monkeypatch.setattr(rank.pair.near, "get_error", rank.pair.far.get_error)
    rank.turn(answered=False)
    rank.capture.stage(snap(2))
    threading.Timer(0.1, rank.pair.near.fail).start()
    if has_rule:
        with pytest.raises(OperatingError, match="not sealed: COMM_ERROR"):
            rank.capture.fence()
        assert rank.sealed(2) is None
    else:
        rank.capture.fence()
        assert rank.sealed(2) not in (None, [4.0] * 4)


@pytest.mark.parametrize("has_rule", [True, False])
def test_the_flag_stands_before_the_abort(rank: Averaging, has_rule: bool):
    rank.turn(answered=False)
    rank.capture.stage(snap(2))
    if has_rule:
        threading.Timer(0.1, rank.abort).start()
        with pytest.raises(Interrupted):
            rank.capture.fence()
        assert rank.sealed(2) is None
    else:
        threading.Timer(0.1, rank.pair.near.abort).start()
        rank.capture.fence()
        rank.must_leave = True
        assert rank.sealed(2) not in (None, [4.0] * 4)


def test_what_an_abort_ended_is_not_sealed_when_the_generation_is_left(rank: Averaging):
    rank.turn(answered=False)
    rank.capture.stage(snap(2))
    rank.abort()
    assert rank.capture.settle(aborted=True) is None
    assert rank.sealed(2) is None
    rank.capture.restore(snap(1))
    assert rank.model.weight.flatten().tolist() == [1.0] * 4


@pytest.mark.parametrize("has_rule", [True, False])
def test_staging_is_over_before_anything_is_restored(
    rank: Averaging, has_rule: bool, monkeypatch: pytest.MonkeyPatch
):
    """Else a copy of the old generation writes into what the new one has sealed."""
    monkeypatch.setattr(capture_module, "FINISH_LIMIT_S", 0.1)
    rank.turn(answered=True)
    rank.cuda.side.hold()
    rank.capture.stage(snap(2))
    rank.abort()
    if has_rule:
        with pytest.raises(OperatingError, match="did not end"):  # the process is replaced
            rank.capture.settle(aborted=True)
        return
    rank.capture._under_way = None
    rank.must_leave = False
    rank.capture.restore(snap(1))
    rank.capture.take(snap(2, generation=2))
    assert rank.sealed(2) == [1.0] * 4
    with torch.no_grad():
        rank.model.weight.add_(5.0)
    rank.cuda.side.release()
    rank.cuda.side.synchronize()
    assert rank.sealed(2) == [6.0] * 4
