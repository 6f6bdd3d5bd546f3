"""Connections and groups of the user's own survive an interrupt."""

from __future__ import annotations

import socketserver
import threading
from collections import Counter
from pathlib import Path

from cluster.harness import SCRIPTS, assert_survivors_kept, run_job


class _Friend(socketserver.StreamRequestHandler):
    """Answers each line; every connection is one entry of `lines`."""

    def handle(self) -> None:
        lines: list[bytes] = []
        self.server.lines.append(lines)  # type: ignore[attr-defined]  # ours
        for line in self.rfile:
            lines.append(line)
            self.wfile.write(b"ok\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    lines: list[list[bytes]]


def test_the_users_connection_and_group_survive_interrupts(tmp_path: Path):
    """The faults strike where the other rank waits in the job's group: in one of the user's own,
    which nobody may touch, it could only be replaced."""
    with _Server(("127.0.0.1", 0), _Friend) as server:
        server.lines = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            flags = [
                *("--fault", "exception@rank=0,step=8,at=backward"),
                *("--fault", "exception@rank=1,step=16"),
                *("--fault", "exception@rank=0,step=24,at=boundary"),
            ]
            args = (tmp_path, server.server_address[1])
            job = run_job(tmp_path, SCRIPTS / "befriending.py", *args, flags=flags)
        finally:
            server.shutdown()
            thread.join()
    summary = job.summary()
    assert len(summary["recoveries"]) == 3
    assert_survivors_kept(summary)
    assert len(server.lines) == 2, "a rank had to connect again"
    for lines in server.lines:
        steps = Counter(int(line.split()[1]) for line in lines)
        assert set(steps) == set(range(40))
