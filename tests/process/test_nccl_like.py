"""The double keeps NCCL's promises, the unpleasant ones above all."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from fakes.nccl_like.device import DEVICE
from fakes.nccl_like.works import GARBAGE
from process.nccl_pair import SUM, WAIT_LIMIT_S, pairs

SHORT_S = 0.2
STUCK_S = 0.3


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def _raw(tensor: torch.Tensor) -> list[float]:
    """What is in memory by now, without a kernel or a host's read."""
    return list(memoryview(ctypes.string_at(tensor.data_ptr(), tensor.nbytes)).cast("f"))


def until(found: object, limit_s: float = WAIT_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not found():  # type: ignore[operator]  # a function
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_a_wait_returns_before_the_data_are_there_and_a_kernel_waits_for_them():
    with pairs("world") as (pair,):
        tensor, work = pair.alone(3.0)
        assert work.wait()
        assert not work.is_completed()
        assert _raw(tensor) == [GARBAGE] * 4
        peer = threading.Timer(SHORT_S, pair.answer, (4.0,))
        peer.start()
        began_s = time.monotonic()
        read = (tensor + 0).tolist()
        assert read == [7.0] * 4
        assert time.monotonic() - began_s > SHORT_S / 2
        peer.join()


def test_an_abort_ends_what_is_pending_with_garbage_and_no_exception():
    with pairs("world") as (pair,):
        tensor, work = pair.alone()
        threading.Timer(SHORT_S, pair.near.abort).start()
        assert (tensor * 2).tolist() == [2.0 * GARBAGE] * 4  # the main thread goes on with it
        assert work.wait()
        assert work.is_success()
        with pytest.raises(dist.DistBackendError, match="was aborted on rank 0"):
            pair.alone()


def test_a_dead_peer_is_silence_until_the_time_limit_and_the_error_shows_elsewhere():
    with pairs("world", limit_s=2 * SHORT_S) as (pair,):
        _, work = pair.alone()
        assert pair.near.get_error() is ErrorType.SUCCESS
        until(lambda: pair.near.get_error() is ErrorType.TIMEOUT)
        assert not work.is_completed()
        until(lambda: pair.near.is_known_broken)
        with pytest.raises(dist.DistBackendError, match="seen late"):
            pair.near.barrier()


@pytest.mark.parametrize("how", ["one by one", "grouped", "from two threads"])
def test_only_groups_that_are_aborted_together_come_out(how: str):
    with pairs("world", "other") as (world, other):
        works = [world.alone()[1], other.alone()[1]]

        def abort() -> None:
            if how == "from two threads":
                threading.Thread(target=other.near.abort, daemon=True).start()
            elif how == "grouped":
                world.near._group_start()
                other.near.abort()
            world.near.abort()
            if how == "grouped":
                world.near._group_end()

        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(STUCK_S if how == "one by one" else WAIT_LIMIT_S)
        assert thread.is_alive() == (how == "one by one")
        if how == "one by one":
            assert not any(work.is_completed() for work in works)
        else:
            assert all(work.host_wait(WAIT_LIMIT_S) for work in works)


def test_a_split_waits_for_all_ranks_of_its_parent_and_ends_beside_it():
    with pairs("world") as (pair,):
        child = pair.near.split_group([0])
        assert child is not None
        value = torch.ones(4)
        work = child.allreduce([value], SUM)
        assert not work.host_wait(SHORT_S)  # rank 1 has not come to the split
        assert pair.far.split_group([0]) is None
        assert (value + 0).tolist() == [1.0] * 4
        assert pair.near.comm_split_count() == 1
        child.shutdown()


def test_collectives_of_one_stream_keep_their_order():
    with pairs("world", "other") as (world, other):
        tensor, _ = world.alone(1.0)
        other.near.allreduce([tensor], SUM)  # reads what the other group has not computed yet
        peer = threading.Thread(target=other.answer, args=(10.0,))
        peer.start()
        world.answer(2.0)
        assert (tensor + 0).tolist() == [13.0] * 4
        peer.join()


_WATCHED = """
import os, sys, threading
from process.nccl_pair import pairs
with pairs("world", limit_s=0.3) as (pair,):
    tensor, work = pair.alone()
    threading.Event().wait(1.0)
    os._exit(7)
"""


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({}, -signal.SIGABRT),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, -signal.SIGABRT),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 7),
    ],
)
def test_the_watchdog_kills_at_a_time_limit_unless_it_is_configured_away(
    settings: dict[str, str], status: int
):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_NCCL")}
    path = os.pathsep.join(part for part in sys.path if part)
    ended = subprocess.run(
        [sys.executable, "-c", _WATCHED],
        env={**inherited, **settings, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == status, ended.stderr.decode()
    assert (b"collective operation timeout" in ended.stderr) == (status != 7)


def test_nothing_is_left_of_groups_that_have_ended():
    with pairs("world") as (pair,):
        pair.alone()
    assert DEVICE.groups == []
