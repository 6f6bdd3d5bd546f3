"""How jobs end: exit codes, last words, refusals, signals; nothing is left behind any of them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import (
    SCRIPTS,
    STEPFAST,
    TINY,
    Command,
    Job,
    pids_of,
    primary_faults,
    run_job,
    running,
)
from stepfast.events import FaultSeen, JobEnded, JobOpened, NodeJoined

USER_ERROR, TRY_AGAIN = 78, 1
FAILING = SCRIPTS / "failing.py"
STOP_LIMIT_S = 10.0  # promised for each phase
HURRY_LIMIT_S = 4.0


# --- the user's bugs -----------------------------------------------------------------------------


def assert_last_words(job: Command, *, error: str, cause: str) -> None:
    """The first failing rank's traceback, then one line of cause, and nothing behind it."""
    assert "stepfast: job failed" in job.last_lines[-1], job.last_lines[-12:]
    assert cause in job.last_lines[-1]
    assert error in job.last_lines[-2], job.last_lines[-12:]
    if "ScriptError" not in error:  # which says itself what to change
        assert "Traceback (most recent call last):" in job.last_lines[-60:]


def test_the_same_exception_at_the_same_step_ends_the_job_as_a_user_error(tmp_path: Path):
    job = run_job(tmp_path, FAILING, expected=USER_ERROR)
    assert primary_faults(job) == [("exception", 1)] * 3
    assert_last_words(job, error="ValueError: the user's own bug", cause="rank 1")
    assert "step 12" in job.last_lines[-1]
    first, second, third = pids_of(job.summary(), 1)
    assert first == second != third
    assert job.summary()["status"] == "failed"


def test_the_first_traceback_is_last_on_the_console(tmp_path: Path):
    """Although the script tears its groups down in `finally` while the other rank waits."""
    job = run_job(tmp_path, FAILING, "--tear-down", "--rank", 0, expected=USER_ERROR)
    assert_last_words(job, error="ValueError: the user's own bug", cause="rank 0")


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("import", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("build", "ValueError: the user's own bug"),
        ("exit", "ScriptError: the script ended with 'the script does not want to'"),
    ],
)
def test_an_error_before_the_first_step_ends_the_job_at_once(at: str, error: str, tmp_path: Path):
    job = run_job(tmp_path, FAILING, "--at", at, expected=USER_ERROR)
    assert_last_words(job, error=error, cause="before the job's first step")
    assert job.summary()["recoveries"] == []
    assert job.summary()["steps"] == 0


def test_a_memory_error_is_never_a_user_error(tmp_path: Path):
    """The same place each time, until the budget is spent: try again elsewhere."""
    flags = ("--restarts-per-hour", 4)
    job = run_job(tmp_path, FAILING, "--kind", "memory", flags=flags, expected=TRY_AGAIN)
    assert len(primary_faults(job)) > 3
    assert_last_words(job, error="MemoryError", cause="budget")


def test_a_rank_that_exits_before_the_first_step_leaves_nothing(tmp_path: Path):
    flags = ("--restarts-per-hour", 2)
    args = ("--at", "build", "--kind", "exit")
    job = run_job(tmp_path, FAILING, *args, flags=flags, expected=TRY_AGAIN)
    assert set(primary_faults(job)) == {("exit", 1)}
    assert "stepfast: job failed: rank 1" in job.last_lines[-1]


def test_ranks_may_finish_at_different_times(tmp_path: Path):
    """Rank 1 fails behind its last step, then rank 0 needs long for its last export."""
    args = ("--at", "behind the loop", "--slow-s", 6, "--marks", tmp_path)
    job = run_job(tmp_path, FAILING, *args)
    summary = job.summary()
    assert summary["status"] == "finished"
    assert summary["steps"] == 30
    assert primary_faults(job) == [("exception", 1)]


# --- refusals before anything starts -------------------------------------------------------------


def refusal(tmp_path: Path, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """The one line with which a command refuses; it has to be fast and to leave nothing."""
    with Command(tmp_path, [*STEPFAST, *arguments], environment=environment) as command:
        assert command.wait(30) == USER_ERROR, command.console
        command.assert_nothing_left()
        assert len(command.last_lines) == 1, command.console
        return command.last_lines[0]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    script = tmp_path / "good.py"
    script.write_text("print('never run')\n")
    return script


def test_a_bad_command_line_is_one_clear_line(tmp_path: Path, good: Path):
    assert "--no-such-flag" in refusal(tmp_path, "run", "--no-such-flag", "1", good)
    assert "nothing.py" in refusal(tmp_path, "run", tmp_path / "nothing.py")
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\ndef f(:\n")
    line = refusal(tmp_path, "run", bad)
    assert "bad.py" in line
    assert "line 2" in line
    assert "vanish" in refusal(tmp_path, "run", "--fault", "vanish@rank=0,step=1", good)
    assert "ranks 0 to 1" in refusal(
        tmp_path, "run", "--nproc-per-node", 2, "--fault", "kill@rank=2,step=1", good
    )
    assert "nodes" in refusal(tmp_path, "run", "--nodes", "many", good)


def test_unknown_settings_are_refused_by_name(tmp_path: Path, good: Path):
    line = refusal(tmp_path, "run", good, environment={"STEPFAST_NPROC_PER_NOD": "2"})
    assert "STEPFAST_NPROC_PER_NOD" in line
    assert "nproc_per_node" in line
    (tmp_path / "cwd" / "stepfast.toml").write_text("nodez = 2\n")
    line = refusal(tmp_path, "run", good)
    assert "nodez" in line
    assert "'nodes'" in line


def test_a_port_in_use_is_named(tmp_path: Path, good: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert address in refusal(tmp_path, "run", "--listen", address, good)


def test_a_finished_job_directory_is_refused(tmp_path: Path):
    """And `--summary` copies its account."""
    copy = tmp_path / "copy.json"
    job = run_job(tmp_path, TINY, "--steps", 3, flags=("--summary", copy))
    assert json.loads(copy.read_bytes()) == job.summary()
    flags = ("--nproc-per-node", 2, "--job-dir", tmp_path / "job")
    before = (tmp_path / "job" / "summary.json").read_bytes()
    line = refusal(tmp_path / "again", "run", *flags, TINY, "--steps", 3)
    assert "finished" in line
    assert (tmp_path / "job" / "summary.json").read_bytes() == before


@pytest.fixture
def small_memory_dir(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_too_small_a_memory_dir_is_a_clear_error(tmp_path: Path, small_memory_dir: Path):
    job = run_job(tmp_path, TINY, flags=("--memory-dir", small_memory_dir), expected=TRY_AGAIN)
    assert "stepfast: job failed" in job.last_lines[-1]
    assert str(small_memory_dir) in job.last_lines[-1], job.last_lines[-1]
    assert list(small_memory_dir.iterdir()) == []


# --- parts started by hand -----------------------------------------------------------------------


def coordinator(tmp_path: Path, *flags: object, environment: dict[str, str] | None = None) -> Job:
    arguments = [*STEPFAST, "coordinator", "--job-dir", tmp_path / "job", *flags]
    return Job(tmp_path, arguments, environment=environment)


def port_of(job: Job) -> int:
    """Where the coordinator listens, as it says itself."""
    found = job.until(lambda: re.search(r"listening on \S+:(\d+)\n", job.console), "it listens")
    assert found is not None
    return int(found[1])


def agent(
    tmp_path: Path,
    port: int,
    node: int,
    *flags: object,
    script: Path,
    args: tuple[object, ...] = (),
) -> Command:
    where = ("--coordinator", f"127.0.0.1:{port}", "--node", node)
    return Command(tmp_path / f"agent-{node}", [*STEPFAST, "agent", *where, *flags, script, *args])


def test_off_loopback_a_token_is_needed_and_a_wrong_one_refused(tmp_path: Path):
    """And the job's failure reaches every process by its exit code."""
    listen = ("--listen", "0.0.0.0:0", "--nodes", 2)
    assert "token" in refusal(tmp_path / "bare", "coordinator", *listen)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the right one\n")
    wrong.write_text("another\n")
    for file in (right, wrong):
        file.chmod(0o440)  # as a pod with an fsGroup sees a Secret
    with coordinator(tmp_path, *listen, "--token-file", right) as job:
        port = port_of(job)
        with (
            agent(tmp_path / "w", port, 0, "--token-file", wrong, script=FAILING) as refused,
            agent(tmp_path / "n", port, 0, script=FAILING) as bare,
        ):
            for stranger in (refused, bare):
                assert stranger.wait(30) == USER_ERROR
                assert "token" in stranger.last_lines[-1]
                stranger.assert_nothing_left()
        with (
            agent(tmp_path, port, 0, "--token-file", right, script=FAILING) as first,
            agent(tmp_path, port, 1, "--token-file", right, script=FAILING) as second,
        ):
            assert job.wait() == USER_ERROR
            assert first.wait(20) != 0
            assert second.wait(20) != 0
            for part in (job, first, second):
                part.assert_nothing_left()
    assert_last_words(job, error="ValueError: the user's own bug", cause="rank 1")
    assert "the right one" not in job.console + (job.directory / "events.jsonl").read_text()


def test_a_stop_while_a_node_is_missing_ends_all_parts(tmp_path: Path):
    """A stop of the coordinator while it waits for a node that never comes."""
    with coordinator(tmp_path, "--nodes", 2) as job:
        port = port_of(job)
        with agent(tmp_path, port, 0, script=TINY) as only:
            job.until(lambda: job.of_type(NodeJoined), "a node has joined")
            began = time.monotonic()
            job.process.send_signal(signal.SIGTERM)
            assert job.wait(STOP_LIMIT_S) == 128 + signal.SIGTERM
            assert only.wait(STOP_LIMIT_S) != 0
            assert time.monotonic() - began < STOP_LIMIT_S
            only.assert_nothing_left()
            job.assert_nothing_left()
    assert job.summary()["status"] == "stopped"


# --- signals -------------------------------------------------------------------------------------


def stop_and_check(job: Job, number: signal.Signals, limit_s: float = STOP_LIMIT_S) -> None:
    """One signal: everything is over within the limit, with the signal's code."""
    began = time.monotonic()
    job.process.send_signal(number)
    code = job.wait(limit_s)
    print(f"{number.name}: {time.monotonic() - began:.2f} s")
    assert code == 128 + number, job.console[-3000:]
    job.assert_nothing_left()
    assert job.summary()["status"] == "stopped"
    assert [e.status for e in job.of_type(JobEnded)] == ["stopped"]


PHASES = ("starting", "running", "recovering", "finishing")


@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_signal_is_obeyed_in_every_phase(phase: str, tmp_path: Path):
    """Waiting for a node that never comes is the test of parts started by hand."""
    script, args, flags = TINY, ("--steps", 100_000), ("--fault", "hang@rank=1,step=5,at=recovery")
    if phase == "finishing":
        script, args = FAILING, ("--at", "behind the loop", "--slow-s", 600, "--marks", tmp_path)
        (tmp_path / "behind").touch()
    if phase == "recovering":
        flags = (*flags, "--fault", "kill@rank=0,step=5")
    with running(tmp_path, script, *args, flags=flags) as job:
        match phase:
            case "starting":
                job.until(lambda: job.of_type(JobOpened), "the job is open")
            case "running":
                job.until_step(10)
            case "recovering":
                job.until(lambda: job.of_type(FaultSeen), "a fault")
                job.until(
                    lambda: len(job.notes("fault injected")) == 2, "a rank hangs while forming"
                )
            case "finishing":
                job.until_step(29)
        number = signal.SIGINT if PHASES.index(phase) % 2 else signal.SIGTERM
        stop_and_check(job, number)


def test_a_second_signal_is_faster_and_a_running_jobs_directory_is_refused(tmp_path: Path):
    """The script ignores every polite request: its clean-up never ends."""
    script = SCRIPTS / "stubborn.py"
    with running(tmp_path, script, flags=("--checkpoints", "none")) as job:
        job.until_step(3)
        flags = ("--nproc-per-node", 2, "--job-dir", job.directory)
        assert "running job" in refusal(tmp_path / "second", "run", *flags, TINY)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: job.of_type(JobEnded), "the first signal was heard", 5)
        began = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        code = job.wait(HURRY_LIMIT_S)
        print(f"second signal: {time.monotonic() - began:.2f} s")
        assert code != 0
        job.assert_nothing_left()
