"""Which slots are kept: the agent's orders count in the order in which it sent them."""

from __future__ import annotations

import socket

import pytest

from stepfast.core.durable import CheckpointSettings
from stepfast.core.messages import ProbeAnswer, RankCancel, RankCheckpointAt, RankStart, RankUnpin
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.runtime.wire import AGENT_TO_RANK
from stepfast.train.link import AgentLink
from stepfast.train.monitor import Monitor
from stepfast.train.pins import Claim, Pins
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
        assert pins.claim(SnapshotId(Generation(2), Step(9))) is Claim.PINNED


def pins() -> Pins:
    made = Pins()
    made.begin(CheckpointSettings(url="store", interval_steps=4), ())
    return made


def snap(step: int) -> SnapshotId:
    return SnapshotId(Generation(2), Step(step))


def test_what_was_cancelled_is_let_go_and_never_pinned_again():
    kept = pins()
    assert kept.claim(snap(4)) is Claim.PINNED
    assert kept.claim(snap(8)) is Claim.BUSY
    kept.hear(RankCancel(snapshot=snap(4), not_before=Step(14)))
    assert kept.held() == frozenset()
    assert not kept.seal(snap(4)), "nobody is told of it"
    assert kept.claim(snap(4)) is Claim.NOT_DUE


def test_no_step_is_due_by_its_number_before_the_one_at_which_all_go_on():
    kept = pins()
    kept.hear(RankCancel(snapshot=snap(4), not_before=Step(14)))
    kept.hear(RankCancel(snapshot=snap(8), not_before=Step(0)))
    kept.hear(RankCheckpointAt(step=Step(13)))
    assert [kept.claim(snap(s)) for s in (8, 12)] == [Claim.NOT_DUE] * 2
    assert kept.claim(snap(13)) is Claim.PINNED, "announced by itself"
    kept.hear(RankUnpin(snapshot=snap(13)))
    assert kept.claim(snap(16)) is Claim.PINNED
    kept.begin(kept.settings, ())
    assert kept.claim(SnapshotId(Generation(3), Step(8))) is Claim.PINNED, "a new generation"


def test_a_step_that_was_announced_when_it_was_over_is_said_once():
    kept = pins()
    for step in (5, 7):
        kept.hear(RankCheckpointAt(step=Step(step)))
    assert kept.passed(Step(6)) == [5]
    assert kept.passed(Step(7)) == []
    assert kept.claim(snap(7)) is Claim.PINNED


def test_a_void_snapshot_is_named_so_that_the_others_hear_of_it():
    kept = pins()
    assert kept.claim(snap(4)) is Claim.PINNED
    assert kept.drop_unsealed() == snap(4)
    assert kept.drop_unsealed() is None
    assert kept.held() == frozenset()
