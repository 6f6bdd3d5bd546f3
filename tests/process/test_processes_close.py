"""The orderly end of a node's processes: asked first, then killed, nothing left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.running_node import READY_LIMIT_S, Node, below_this_process, job_directory
from stepfast.errors import OperatingError
from stepfast.runtime import spawning

pytestmark = pytest.mark.sweeps


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(job_directory(tmp_path), preload_names=())
    try:
        node.run(node.processes.wait_ready(READY_LIMIT_S))
        yield node
    finally:
        node.run(node.processes.close(0))
        node.closing.close()
        node.runner.close()
        spawning.become_subreaper(False)


def test_close_asks_then_kills_and_leaves_nothing(node: Node) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    polite, stubborn, family = (node.fork(name) for name in ("wait", "stubborn", "family"))
    node.run(node.processes.open_store())
    for rank in (polite, stubborn, family):
        assert rank.socket.recv(4) == b"here"
    started_s = time.monotonic()
    assert node.run(node.processes.close(0.3)) == []
    took_s = time.monotonic() - started_s
    print(f"closed in {took_s:.2f} s, of which 0.3 s are grace")
    assert 0.3 <= took_s < 2.0
    assert node.rank_ends[polite.pid].signal == signal.SIGTERM
    assert node.rank_ends[stubborn.pid].signal == signal.SIGKILL
    assert below_this_process() == set()
    assert node.run(node.processes.close(5)) == []
    with pytest.raises(OperatingError):
        node.run(node.processes.fork_rank(node.launch("wait")))
    with pytest.raises(OperatingError):
        node.run(node.processes.open_store())
    node.closing.close()
    # Zygote's and store's descriptors are closed as well.
    assert len(os.listdir("/proc/self/fd")) < open_before
