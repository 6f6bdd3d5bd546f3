"""Nodes and ranks as levels: the last word of each node, and nothing from before it was away."""

from __future__ import annotations

import pytest

from stepfast.core.membership import Membership, is_fresh, is_ready_to_start
from stepfast.core.messages import NodeReport, RankReport, RankState
from stepfast.core.terms import Generation, NodeId, Rank


def report_of(number: int, state: RankState, generation: int = 0) -> RankReport:
    return RankReport(
        rank=Rank(number),
        state=state,
        pid=1000 + number,
        incarnation=1,
        generation=Generation(generation),
    )


def joined(*numbers: int) -> Membership:
    members = Membership()
    for n in numbers:
        members = members.joined(NodeId(n), host=f"host-{n}", pid=10 + n, now=1.0, ranks=(Rank(n),))
    return members


def told(members: Membership, number: int, state: RankState, store: int | None = 7000):
    report = NodeReport(
        node=NodeId(number),
        ranks=(report_of(number, state),),
        heard=Generation(0),
        store_port=store,
    )
    return members.reported(report)


def test_a_report_replaces_the_one_before():
    members = told(told(joined(0), 0, RankState.STARTING), 0, RankState.READY)
    assert members.ranks[Rank(0)].state is RankState.READY
    assert told(members, 0, RankState.READY) == members


def test_a_node_that_is_back_counts_for_nothing_until_it_reports():
    members = told(joined(0, 1), 0, RankState.READY)
    back = members.lost(NodeId(0), 2.0).joined(
        NodeId(0), host="host-0", pid=99, now=3.0, ranks=(Rank(0),)
    )
    assert back.ranks[Rank(0)].state is RankState.ABSENT
    assert back.nodes[NodeId(0)].lost_at is None
    assert not back.nodes[NodeId(0)].can_host_store


def test_who_is_away_or_gone_can_not_be_told_anything():
    members = joined(0, 1, 2).lost(NodeId(1), 2.0).said_goodbye(NodeId(2))
    assert members.connected_nodes == (0,)
    assert members.nodes[NodeId(1)].lost_at == 2.0


def test_generations_meet_at_the_nodes_in_turn():
    members = joined(0, 1)
    assert members.store_host(Generation(1)) is None
    members = told(told(members, 0, RankState.READY), 1, RankState.READY)
    assert [members.store_host(Generation(g)) for g in range(4)] == [0, 1, 0, 1]
    assert members.store_taken(NodeId(0)).store_host(Generation(2)) == 1
    assert members.lost(NodeId(1), 2.0).store_host(Generation(1)) == 0


@pytest.mark.parametrize(
    ("state", "generation", "left", "ready"),
    [
        (RankState.READY, 0, 3, True),
        (RankState.QUIET, 3, 3, True),
        (RankState.QUIET, 2, 3, True),  # it never got to generation 3
        (RankState.QUIET, 4, 3, False),
        (RankState.ACTIVE, 3, 3, False),
        (RankState.RETURNED, 3, 3, False),
        (RankState.STARTING, 0, 3, False),
        (RankState.ABSENT, 0, 3, False),
        (RankState.GONE, 3, 3, False),
    ],
)
def test_who_is_ready_to_start(state, generation: int, left: int, ready: bool):
    assert is_ready_to_start(report_of(0, state, generation), Generation(left)) is ready


def test_fresh_is_who_was_in_no_generation():
    assert is_fresh(report_of(0, RankState.READY))
    assert not is_fresh(report_of(0, RankState.QUIET, 1))
