"""What the store holds, as the machines know it: what went is never chosen, and no list grows."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from stepfast.core.durable import CheckpointSettings, Durable
from stepfast.core.messages import CheckpointsHeld, CommitCheckpoint, CommitDone, NodeReport
from stepfast.core.node_state import CheckpointsListed, CommitEnded, FromJob
from stepfast.core.outputs import CommitShards, SendToNode
from stepfast.core.recovery import Lineage
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.events import CheckpointsVanished
from unit.core.rigs import JobRig, NodeRig

STORE = CheckpointSettings(url="store", interval_steps=4)


def at(generation: int, step: int) -> SnapshotId:
    return SnapshotId(Generation(generation), Step(step))


def done(step: int, *removed: int) -> CommitDone:
    gone = tuple(at(1, s) for s in removed)
    return CommitDone(checkpoint=at(1, step), name="n", size_bytes=1, seconds=0.1, removed=gone)


def ended(step: int, *removed: int) -> CommitEnded:
    gone = frozenset(at(1, s) for s in removed)
    return CommitEnded(checkpoint=at(1, step), name="n", size_bytes=1, seconds=0.1, removed=gone)


def test_what_the_retention_removed_is_never_chosen_whoever_still_names_it():
    durable = Durable().told_of([at(1, 4), at(1, 8)]).done(at(1, 12), [at(1, 4)])
    durable = durable.told_of([at(1, 4), at(1, 8)]).refused(at(1, 12)).refused(at(1, 8))
    assert durable.newest(Lineage()) is None
    assert durable.committed == {at(1, 8), at(1, 12)}


def test_a_damaged_one_that_was_removed_is_forgotten():
    durable = Durable().told_of([at(1, 4)]).refused(at(1, 4)).done(at(1, 8), [at(1, 4)])
    assert not durable.rejected


def test_a_long_job_remembers_a_bounded_number_of_checkpoints():
    durable = Durable()
    for step in range(8, 8_000, 4):
        durable = durable.done(at(1, step), [at(1, step - 8)])
    assert durable.committed == {at(1, 7_992), at(1, 7_996)}
    assert len(durable.removed) <= 1024


def test_the_job_tells_the_other_nodes_what_is_held_now():
    rig = JobRig(checkpoints=STORE).start()
    for message in (done(4), done(8, 4)):
        rig.from_node(0, message)
    told = [o for o in rig.outputs if isinstance(o, SendToNode)]
    assert [(o.node, o.message) for o in told] == [(1, CheckpointsHeld(checkpoints=(at(1, 8),)))]


def test_a_node_says_to_a_new_coordinator_what_it_was_told():
    rig = NodeRig(checkpoints=STORE).connect()
    rig.feed(CheckpointsListed((at(1, 4),)))
    rig.feed(FromJob(CheckpointsHeld(checkpoints=(at(1, 8), at(1, 12)))))
    assert rig.now_of(NodeReport)[-1].checkpoints == (at(1, 8), at(1, 12))


def test_what_the_node_committed_itself_is_not_lost_by_an_older_word():
    rig = NodeRig(checkpoints=STORE).connect()
    rig.feed(CheckpointsListed((at(1, 4),)))
    rig.feed(ended(12, 4))
    (told,) = rig.now_of(CommitDone)
    assert told.removed == (at(1, 4),)
    rig.feed(FromJob(CheckpointsHeld(checkpoints=(at(1, 8),))))
    assert rig.all_of(NodeReport)[-1].checkpoints == (at(1, 8), at(1, 12))


def test_a_node_that_has_not_looked_yet_looks_itself():
    rig = NodeRig(checkpoints=STORE).connect()
    rig.feed(FromJob(CheckpointsHeld(checkpoints=(at(1, 8),))))
    assert rig.state.checkpoints is None


def test_checkpoints_that_vanished_are_an_event_and_never_chosen():
    rig = JobRig(checkpoints=STORE).start()
    told = msgspec.structs.replace(done(8), vanished=(at(1, 4),))
    for message in (done(4), told, told):
        rig.from_node(0, message)
    (event,) = rig.all_of(CheckpointsVanished)
    assert (event.steps, event.url) == ((4,), "store")
    assert rig.state.durable.committed == {at(1, 8)}


def test_a_node_asks_for_what_it_knows_and_forgets_what_vanished():
    rig = NodeRig(checkpoints=STORE).connect()
    rig.feed(CheckpointsListed((at(1, 4), at(1, 8))))
    rig.feed(FromJob(CommitCheckpoint(checkpoint=at(1, 12), shards=())))
    (order,) = rig.now_of(CommitShards)
    assert order.known == {at(1, 4), at(1, 8)}
    rig.feed(replace(ended(12), vanished=frozenset({at(1, 4)})))
    assert rig.state.checkpoints == (at(1, 8), at(1, 12))
