"""Jobs on one machine do not know of each other."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

from cluster.conftest import Reference
from cluster.harness import TINY, assert_survivors_kept, causes_of, finish, running

JOBS = 3
ARGS = ("--steps", 60)


def grab_ports(over: threading.Event) -> None:
    """What lies between looking a port up and using it: somebody takes it."""
    while not over.is_set():
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            over.wait(0.02)


def test_jobs_on_one_machine_never_collide(tmp_path: Path, reference_digest: Reference):
    """Three at once, each with a fault, while another process takes ports at random."""
    over = threading.Event()
    grabber = threading.Thread(target=grab_ports, args=(over,))
    grabber.start()
    try:
        with ExitStack() as stack:
            flags = ("--fault", "kill@rank=0,step=20", "--fault", "exception@rank=1,step=40")
            jobs = [
                stack.enter_context(running(tmp_path / str(i), TINY, *ARGS, flags=flags))
                for i in range(JOBS)
            ]
            summaries = [finish(job) for job in jobs]
    finally:
        over.set()
        grabber.join()
    for summary in summaries:
        assert causes_of(summary) == [("kill", 0), ("exception", 1)]
        assert summary["final_digest"] == reference_digest(TINY, *ARGS, layout=(1, 2))
        assert_survivors_kept(summary)
