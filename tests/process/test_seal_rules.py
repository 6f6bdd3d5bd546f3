"""The rank's own answer to whether what was copied may be sealed: of its monitor and its groups."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakes.nccl_like.wiring import NCCL_LIKE
from process.nccl_pair import Pair, pairs
from stepfast.core.messages import RankLeave, RankStart
from stepfast.core.rank import MainEntered, Ordered, RankInput
from stepfast.core.terms import Generation, NodeId, Rank
from stepfast.errors import Interrupted
from stepfast.train import torch_groups
from stepfast.train.backends import GLOO, Backend
from stepfast.train.groups import Groups
from stepfast.train.link import AgentLink
from stepfast.train.monitor import Monitor
from stepfast.train.pins import Pins
from stepfast.train.rank_host import RankHost
from stepfast.train.whereabouts import Whereabout
from unit.core.rigs import settings

G1 = Generation(1)


class Registered:
    """A group of torch's registry, whose part for the device is the pair's near end."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def _get_backend(self, device: torch.device) -> Any:
        return self._part

    def abort(self) -> None:
        self._part.abort()


class Seals:
    """A rank in generation 1, its orders fed by the test; `seen` is what stands in an abort."""

    def __init__(self, pair: Pair, link: AgentLink) -> None:
        self.pair, self.seen = pair, list[str | None]()
        self.monitor = Monitor(
            link,
            interrupt_grace_s=60.0,
            answer_probe=lambda probe: pytest.fail("nobody asks"),
            hear_pin=lambda message: None,
        )
        self.host = RankHost(self.monitor, Whereabout(), Pins())
        self.stand_in(NCCL_LIKE)
        self.monitor.set_abort(lambda: self.seen.append(self.host.seal_obstacle()))
        self.feed(MainEntered())
        self.feed(Ordered(_start()))

    def feed(self, given: RankInput) -> None:
        self.monitor.feed(given)

    def stand_in(self, backend: Backend) -> None:
        """The rank's groups are such ones."""
        self.host.groups = Groups(backend)


def _start() -> RankStart:
    return RankStart(
        generation=G1,
        rank=Rank(0),
        local_rank=0,
        world_size=2,
        local_world_size=2,
        node=NodeId(0),
        step=None,
        source=None,
        store_host="",
        store_port=0,
        keep=False,
        slot_directory="",
        log_path="",
        settings=settings(),
    )


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seals]:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pairs("world") as (pair,), closing(ours), closing(theirs), ExitStack() as at_end:
        registered = [Registered(pair.near)]
        monkeypatch.setattr(torch_groups, "groups", lambda: registered)
        link = AgentLink(ours)
        at_end.callback(os.close, link.wake_fd)
        seals = Seals(pair, link)
        at_end.callback(seals.host.snapshots.close)
        yield seals


def test_the_rank_must_leave_before_its_groups_are_aborted(rank: Seals):
    assert rank.host.seal_obstacle() is None
    rank.feed(Ordered(RankLeave(generation=G1)))
    assert rank.seen == ["the generation is over"]
    with pytest.raises(Interrupted):
        rank.host.check_sound()


def test_what_groups_know_to_be_wrong_is_not_sealed_and_raised(rank: Seals):
    rank.pair.near.fail()
    assert "reports COMM_ERROR" in str(rank.host.seal_obstacle())
    with pytest.raises(dist.DistBackendError, match="reports COMM_ERROR"):
        rank.host.check_sound()


def test_where_a_failed_collective_raises_a_boundary_that_was_reached_is_sound(rank: Seals):
    rank.stand_in(GLOO)
    rank.pair.near.fail()
    rank.feed(Ordered(RankLeave(generation=G1)))
    assert rank.seen == [None]


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_thread_that_aborts_is_the_devices_first(rank: Seals, is_broken: bool):
    """NCCL's abort calls the runtime: elsewhere that makes a context on the first device."""
    order: list[str] = []

    def enter() -> None:
        order.append("entered")
        if is_broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    groups = Groups(NCCL_LIKE, enter_thread=enter)
    near = rank.pair.near
    end, near.abort = near.abort, lambda: (order.append("aborted"), end())
    report = groups.abort()
    groups.dissolve()
    assert report.device_groups_aborted == 1
    assert order[:2] == ["entered", "aborted"] and order.count("aborted") == 1
