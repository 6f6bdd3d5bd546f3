"""`stepfast run --check`: a step is made, everything is said, and nothing is left or changed."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.harness import STEPFAST, TINY, Command, run_job

SIZE = ("--nproc-per-node", 2)


def everything_in(*directories: Path) -> dict[str, tuple[int, bytes]]:
    """Each file's time of change and content."""
    files = (p for d in directories for p in d.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


def check(directory: Path, *flags: object, script: Path = TINY) -> tuple[int, str]:
    """The exit code and what was said; nothing may be left of it."""
    shared = set(os.listdir("/dev/shm"))
    with Command(directory, [*STEPFAST, "run", "--check", *SIZE, *flags, script]) as command:
        code = command.wait()
        command.assert_nothing_left()
    assert not list(command.temporary.glob("stepfast*")), "the check's own directory is gone"
    assert not any(command.working.iterdir()), "no job directory was made"
    left = {n for n in os.listdir("/dev/shm") if n.startswith("stepfast-")} - shared
    assert not left, f"slots are left: {left}"
    return code, command.console


def test_a_check_says_what_a_run_would_use_and_leaves_nothing(tmp_path: Path):
    code, said = check(tmp_path / "new")
    assert code == 0, said
    rows = ("FSDPSequential", "AdamW", "resumes at   nowhere: it begins at step 0", "keeps what")
    for text in (*rows, "4 a rank of", "a new job directory; every 600 s, the last step", "gloo"):
        assert text in said, f"{text}\n{said}"
    # An existing job, stopped in order: its newest state is a checkpoint, and it stays as it was.
    with_faults = ("--fault", "exception@rank=0,step=2", "--recovery", "off")
    job = run_job(tmp_path / "old", TINY, "--steps", 4, flags=with_faults, expected=1)
    before = everything_in(job.directory)
    code, said = check(tmp_path / "again", "--job-dir", job.directory)
    assert code == 0, said
    assert "resumes at   step 2, from the checkpoint step-000000002-gen-0001" in said
    assert "1 are there now" in said
    # A script that tracks more than that checkpoint has would be refused.
    more = tmp_path / "more.py"
    more.write_text(TINY.read_text().replace("run.track(", "run.track(extra={'count': 1}, "))
    code, said = check(tmp_path / "more", "--job-dir", job.directory, script=more)
    assert code == 78, said
    assert said.count("--start-fresh extra") == 1 and "(ranks 0, 1)" in said.splitlines()[-1]
    assert everything_in(job.directory) == before


def test_a_script_that_is_wrong_ends_a_check_with_78(tmp_path: Path):
    script = tmp_path / "wrong.py"
    script.write_text(
        "import stepfast\n"
        "@stepfast.resilient\n"
        "def train(run):\n"
        "    for step in run.steps(3):\n"
        "        pass\n"
        "train()\n"
    )
    code, said = check(tmp_path / "check", script=script)
    assert code == 78, said
    assert "nothing is tracked" in said.splitlines()[-1]
