"""What a script, a limit or a full disk does around stepfast ends in one line, and spoils no
slot.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from stepfast.checkpoint.arena import sealed_slots

# Lays slots when the script has closed everything, then prints as scripts do.
_CLOSES_ALL = """
import os, sys
from pathlib import Path
os.closerange(0, 3)
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.layout import Layout, TensorSpec
from stepfast.core.terms import SnapshotId
arena = Arena(Path(sys.argv[1]))
arena.claim(Layout.build([TensorSpec("weight", "F32", (64,), (64,), (0,))], 100))
slot = arena.free_slot()
slot.write_plain(b"plain")
slot.seal(SnapshotId(1, 5))
for descriptor in (1, 2):
    os.write(descriptor, b"printed by the script " * 100)
"""

SCRIPT = """
import resource
import stepfast
import torch

@stepfast.resilient
def train(run):
    model = torch.nn.Linear(1, 1)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(1):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        open("large", "wb").write(bytes(2 << 20))
    except OSError as error:
        print("not written:", error.strerror)

train()
"""


def run_job(
    tmp_path: Path, limit: int = resource.RLIMIT_CORE, value: int = 0
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stepfast", "run", "--job-dir", "job", "train.py"]
    return subprocess.run(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
    )


def test_what_a_script_prints_with_closed_descriptors_goes_into_no_slot(tmp_path: Path):
    directory = tmp_path / "rank-0"
    subprocess.run([sys.executable, "-c", _CLOSES_ALL, str(directory)], timeout=30, check=True)
    assert [slot.snapshot.step for slot in sealed_slots(directory)] == [5]
    assert all(b"printed" not in path.read_bytes() for path in directory.iterdir())


def test_a_file_that_grows_too_large_is_an_error_of_the_script_and_no_death(tmp_path: Path):
    done = run_job(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "not written: File too large" in done.stdout


def test_too_few_descriptors_are_refused_with_the_number(tmp_path: Path):
    done = run_job(tmp_path, resource.RLIMIT_NOFILE, 24)
    assert done.returncode == 78
    (line,) = done.stdout.splitlines()
    assert line.startswith("stepfast: 24 open files are allowed") and "ulimit -n 1024" in line
    assert not (tmp_path / "job").exists()


def test_a_log_that_cannot_grow_ends_the_job_with_one_line(tmp_path: Path):
    """As a full disk does: the limit lets the first event through, and not the second."""
    done = run_job(tmp_path, resource.RLIMIT_FSIZE, 330)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == f"stepfast: cannot write {tmp_path}/job/events.jsonl: File too large"
