"""A process that saves checkpoints is killed at any moment: what it committed stays whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from architecture.source_tree import PACKAGE, ROOT
from stepfast.checkpoint.catalog import committed, damaged, sweep_unfinished, verify
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.manifest import checkpoint_name

KILLS = 12


def run_and_kill(base: Path, after_s: float) -> int:
    """The last step that the process said was committed; 0: none."""
    process = subprocess.Popen(
        [sys.executable, "-m", "process.saving", str(base)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(ROOT / "tests")]),
        },
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    timer = threading.Timer(after_s, process.send_signal, [signal.SIGKILL])
    timer.start()
    said = process.stdout.read()  # all of it, up to the end
    timer.join()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    lines = [line for line in said.splitlines(keepends=True) if line.endswith("\n")]
    return int(lines[-1]) if lines else 0


def test_a_killed_writer_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    chance, last = random.Random(3), 0
    store = DirectoryStore(tmp_path / "store")
    for _ in range(KILLS):
        last = max(last, run_and_kill(tmp_path, chance.uniform(0.0, 0.15)))
        there = committed(store)
        assert damaged(store) == []
        if last:
            # It may have been killed between the commit and the word of it.
            assert there[0].step in (last, last + 1)
        for snapshot in there:
            assert verify(store, snapshot) == []
    assert last > KILLS, "the processes got somewhere"
    sweep_unfinished(store)
    whole = {checkpoint_name(snapshot.step, snapshot.generation) for snapshot in committed(store)}
    hidden = {path.parent.name for path in (tmp_path / "store").rglob(".*")}
    assert not hidden & whole, "what dead writers left beside a checkpoint is gone"
    assert len(set(store.directories()) - whole) <= 1, "the one that was being written may stay"
