"""Every limit comes from few inputs, in one order; phases get what they were seen to take."""

from __future__ import annotations

import pytest

from stepfast.core.timeouts import FIRST_TURN, SETUP, TURN, LearnedLimits, solve_timeouts
from stepfast.errors import ConfigError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_limits_keep_their_order(device: str):
    t = solve_timeouts(device=device)
    assert t.interrupt_grace_s < t.interrupt_deadline_s < t.forming_limit_s <= t.hang_ceiling_s
    assert t.probe_deadline_s * 4 < t.hang_floor_s <= t.hang_ceiling_s
    assert t.heartbeat_interval_s * 4 <= t.node_silence_s


def test_the_floor_depends_on_the_device():
    assert solve_timeouts(device="cpu").hang_floor_s == 2.0
    assert solve_timeouts(device="cuda").hang_floor_s == 60.0
    assert solve_timeouts(device="cpu", hang_floor_s=7.0).hang_floor_s == 7.0


def test_slow_heartbeats_make_silence_longer():
    assert solve_timeouts(device="cpu", heartbeat_interval_s=0.1).node_silence_s == 10.0
    assert solve_timeouts(device="cpu", heartbeat_interval_s=3.0).node_silence_s == 60.0


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s"),
        ({"heartbeat_interval_s": -1.0}, "heartbeat_interval_s"),
        ({"hang_floor_s": 0.4}, "hang_floor_s"),
        ({"hang_floor_s": 50.0, "hang_ceiling_s": 40.0}, "hang_ceiling_s"),
        ({"hang_ceiling_s": 20.0}, "hang_ceiling_s"),
    ],
)
def test_a_set_that_contradicts_itself_is_refused_by_name(inputs, named: str):
    with pytest.raises(ConfigError, match=named):
        solve_timeouts(device="cpu", **inputs)


def limits() -> LearnedLimits:
    return LearnedLimits(solve_timeouts(device="cpu", hang_ceiling_s=60.0))


@pytest.mark.parametrize("phase", [TURN, FIRST_TURN, SETUP, "section:eval"])
def test_a_phase_never_seen_gets_the_ceiling(phase: str):
    assert limits().limit_s(phase) == 60.0
    assert limits().learn("section:other", 1.0).limit_s(phase) == 60.0


def test_a_turn_gets_four_times_the_longest_seen():
    learned = limits().learn(TURN, 1.0).learn(TURN, 3.0).learn(TURN, 0.5)
    assert learned.limit_s(TURN) == 12.0


def test_short_turns_get_the_floor():
    assert limits().learn(TURN, 0.01).limit_s(TURN) == 2.0


def test_phases_seen_rarely_get_a_floor_five_times_higher():
    for phase in (FIRST_TURN, SETUP, "section:eval"):
        assert limits().learn(phase, 0.01).limit_s(phase) == 10.0


def test_no_limit_is_above_the_ceiling():
    assert limits().learn(TURN, 50.0).limit_s(TURN) == 60.0


def test_long_ago_is_forgotten():
    learned = limits().learn(TURN, 10.0)
    for _ in range(64):
        learned = learned.learn(TURN, 1.0)
    assert learned.limit_s(TURN) == 4.0


def test_learning_changes_nothing_that_is_held_elsewhere():
    before = limits()
    before.learn(TURN, 1.0)
    assert before.limit_s(TURN) == 60.0


def test_a_loader_may_stall_ten_floors():
    assert limits().data_limit_s() == 20.0
    low = solve_timeouts(device="cpu", hang_floor_s=10.0, hang_ceiling_s=60.0)
    assert LearnedLimits(low).data_limit_s() == 60.0
