"""Which slots are kept: the agent's orders count in the order in which it sent them."""

from __future__ import annotations

import socket

import pytest

from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import ProbeAnswer, RankCheckpointAt, RankStart, RankUnpin
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.runtime.wire import AGENT_TO_RANK
from stepfast.train.link import AgentLink
from stepfast.train.monitor import Monitor
from stepfast.train.pins import Pins
from unit.core.rigs import settings

WRITTEN = SnapshotId(Generation(1), Step(8))
START = RankStart(
    generation=Generation(2),
    rank=Rank(0),
    local_rank=0,
    world_size=1,
    local_world_size=1,
    node=NodeId(0),
    step=Step(8),
    source=WRITTEN,
    store_host="127.0.0.1",
    store_port=1,
    keep=True,
    slot_directory="slots",
    log_path="log",
    settings=settings(checkpoints=CheckpointSettings(url="store", interval_steps=4)),
    pinned=(WRITTEN,),
)


def _no_probe(number: int) -> ProbeAnswer:
    pytest.fail("nobody asks")


def test_what_the_agent_says_behind_a_start_counts_however_late_the_main_thread_wakes():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        pins = Pins()
        monitor = Monitor(
            AgentLink(ours), interrupt_grace_s=1.0, answer_probe=_no_probe, hear_pin=pins.hear
        )
        for message in (START, RankUnpin(snapshot=WRITTEN), RankCheckpointAt(step=Step(9))):
            theirs.send(AGENT_TO_RANK.encode(message))
        monitor._hear()
        assert pins.settings.interval_steps == 4
        assert pins.held() == frozenset()
        assert pins.is_due(Step(9))
        assert pins.try_pin(SnapshotId(Generation(2), Step(12)))
