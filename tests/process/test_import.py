"""`stepfast ckpt import` as a process: it needs no torch, and may be killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

from stepfast.checkpoint.catalog import survey, verify
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.core.terms import Generation, SnapshotId, Step

WITHOUT_TORCH = """
import sys
from stepfast.cli.main import main
status = main(sys.argv[1:])
assert not {"torch", "numpy", "safetensors"} & set(sys.modules), "it loaded what it does not need"
raise SystemExit(status)
"""
# The kernel ends it, as SIGKILL would, as soon as a file of its has so many bytes.
KILLED_WHILE_WRITING = """
import resource, signal, sys
from stepfast.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
main(sys.argv[1:])
"""
SIZE = 3_000_000
LIMIT_S = 60


def model(directory: Path) -> Path:
    """A model's directory of a few megabytes, most of them a hole."""
    directory.mkdir()
    path = directory / "model.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, path.stat().st_size + SIZE)
    return directory


def import_by(code: str, source: Path, store: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, "ckpt", "import", str(source), str(store)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_one_that_is_killed_leaves_nothing_that_exists_and_the_next_one_ends(
    tmp_path: Path,
) -> None:
    source, store = model(tmp_path / "m"), DirectoryStore(tmp_path / "store")
    killed = import_by(KILLED_WHILE_WRITING, source, tmp_path / "store")
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    snapshot = SnapshotId(Generation(0), Step(0))
    assert survey(store).manifests == () and survey(store).unfinished == (snapshot,)
    remains = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert remains, "it was in the middle of a file"
    done = import_by(WITHOUT_TORCH, source, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert verify(store, snapshot) == []
    assert not any(path.exists() for path in remains)
