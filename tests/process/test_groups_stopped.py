"""A peer that is stopped or killed at a bad moment: the others are out within the interrupt's
limit.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from process.groups_cluster import Cluster
from process.groups_workloads import Blocked, Collectives

WAKE_LIMIT_S = 1.0


def _wake_times_s(answers: dict[int, Any]) -> list[float]:
    assert {answer[0] for answer in answers.values()} == {"quiet"}, answers
    return [max(0.0, a[2]["left"] - a[2]["abort"]) for a in answers.values()]


def test_stopped_while_forming():
    """Whoever waits for a peer's connect, or has sent it one, comes out; nothing is abandoned."""
    cluster = Cluster(4, Collectives)
    try:
        cluster.open_generation(3)  # every process has its imports done
        cluster.answers()
        for round_number in range(8):
            stopped = round_number % 4
            survivors = [rank for rank in range(4) if rank != stopped]
            cluster.open_generation(-1)
            threading.Event().wait(0.0015 * round_number)
            cluster.signal(stopped, signal.SIGSTOP)
            threading.Event().wait(0.03)
            cluster.abort(survivors)
            wakes_s = _wake_times_s(cluster.answers(survivors))
            print(round_number, [round(wake_s * 1e3, 1) for wake_s in wakes_s])
            assert max(wakes_s) < WAKE_LIMIT_S
            cluster.replace(stopped)
        cluster.open_generation(3)
        assert {answer[0] for answer in cluster.answers().values()} == {"done"}
    finally:
        cluster.close()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("elements", [1_000, 8_000_000])
def test_stopped_or_killed_in_a_collective(number: signal.Signals, elements: int):
    """Also with a message half transferred, which Gloo forgets to tell its waiter about."""
    cluster = Cluster(4, Collectives)
    try:
        for round_number in range(2):
            victim = round_number % 4
            survivors = [rank for rank in range(4) if rank != victim]
            cluster.open_generation((-1, elements))
            threading.Event().wait(0.25 + 0.007 * round_number)
            cluster.signal(victim, number)
            threading.Event().wait(0.05)
            cluster.abort(survivors)
            wakes_s = _wake_times_s(cluster.answers(survivors))
            print(number, elements, [round(wake_s * 1e3, 1) for wake_s in wakes_s])
            assert max(wakes_s) < WAKE_LIMIT_S
            cluster.replace(victim)
    finally:
        cluster.close()


def test_blocked_in_different_groups_at_once():
    """One rank in the row group, one in the column group, one in the user's own, through a work
    handle.
    """
    cluster = Cluster(4, Blocked)
    try:
        for _ in range(3):
            cluster.open_generation(None)
            threading.Event().wait(0.3)
            cluster.abort()
            assert max(_wake_times_s(cluster.answers())) < WAKE_LIMIT_S
    finally:
        cluster.close()
