"""Every kind of fault, on real processes: the job ends in the state of the job without faults."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Reference
from cluster.harness import (
    LLAMA,
    SCRIPTS,
    TINY,
    Job,
    Over,
    assert_survivors_kept,
    causes_of,
    finish,
    over_both,
    over_gloo,
    over_nccl_like,
    pids_of,
    primary_faults,
    run_job,
    running,
)
from stepfast.events import FaultSeen, GenerationOpened, NodeJoined

TWO_BY_TWO = (2, 2)
LLAMA_ARGS = ("--steps", 36, "--eval-every", 12)
TINY_ARGS = ("--steps", 60)
DISTURBED_ARGS = ("--steps", 160)  # by hand, which takes longer
RANKS = (0, 1, 3)
POINTS = ("forward", "backward", "optimizer", "boundary")
KINDS = ("exception", "kill", "exit", "segv", "hang", "stop", "gil")
UNSEEN_SECONDS = (
    1.5  # generous: milliseconds are measured by bench, here only that nobody waited for a limit
)


def fault(kind: str, rank: int, step: int, at: str = "forward", **more: object) -> list[str]:
    rest = "".join(f",{key.rstrip('_')}={value}" for key, value in more.items())
    return ["--fault", f"{kind}@rank={rank},step={step},at={at}{rest}"]


def assert_recovered_as(job: Job, expected: list[tuple[str, int]], digest: str) -> None:
    summary = job.summary()
    assert summary["status"] == "finished", summary["reason"]
    assert [(r["kind"], r["rank"]) for r in summary["recoveries"]] == expected
    assert summary["final_digest"] == digest
    assert_survivors_kept(summary)
    for generation, (kind, culprit) in enumerate(expected, start=1):
        for rank, pids in summary["pids"].items():
            kept = pids[str(generation)] == pids[str(generation + 1)]
            in_reach = kind in ("exception", "hang")
            assert kept == (int(rank) != culprit or in_reach), (kind, culprit, rank)


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        *[pytest.param(over_gloo, kind, id=kind) for kind in KINDS],
        *[
            pytest.param(
                over_nccl_like,
                kind,
                id=f"{kind}-nccl_like",
                marks=[] if kind in ("exception", "kill", "hang") else [pytest.mark.long],
            )
            for kind in KINDS
        ],
    ],
)
def test_each_kind_on_ranks_0_1_and_3(
    over: Over, kind: str, tmp_path: Path, reference_digest: Reference
):
    """Three faults in one job, each at another step and point; survivors keep their processes."""
    turn = KINDS.index(kind)
    flags = [
        part
        for i, rank in enumerate(RANKS)
        for part in fault(kind, rank, 6 + 9 * i, POINTS[(turn + i) % len(POINTS)])
    ]
    job = run_job(tmp_path, *over(LLAMA, *LLAMA_ARGS), layout=TWO_BY_TWO, flags=flags)
    digest = reference_digest(LLAMA, *LLAMA_ARGS, layout=TWO_BY_TWO)
    assert_recovered_as(job, [(kind, rank) for rank in RANKS], digest)
    for recovery in job.summary()["recoveries"]:
        assert recovery["seconds"]["interrupt"] < UNSEEN_SECONDS, recovery
        assert recovery["step"] in (6, 7, 15, 16, 24, 25), recovery
    for rank in range(4):
        for generation in range(1, 5):
            assert (job.directory / "logs" / f"rank-{rank}-gen-{generation}.log").exists()


@over_both()
def test_two_faults_at_once_and_faults_during_recovery(
    over: Over, tmp_path: Path, reference_digest: Reference
):
    """Two ranks at one step; then a second kill while the groups of the first recovery form.

    A process that dies before the fence of its turn takes that turn's snapshot with it: then the
    recovery resumes one step earlier.
    """
    flags = [
        *fault("kill", 0, 8),
        *fault("kill", 3, 8),
        *fault("exception", 1, 20, "backward"),
        *fault("kill", 2, 20, "backward"),
        *fault("kill", 1, 32),
        *fault("kill", 0, 31, "recovery"),
        *fault("exception", 2, 44),
        *fault("exception", 2, 43, "recovery"),
        *fault("stop", 3, 50),
        *fault("stop", 0, 49, "recovery"),
    ]
    job = run_job(tmp_path, *over(TINY, *TINY_ARGS), layout=TWO_BY_TWO, flags=flags)
    summary = job.summary()
    assert summary["final_digest"] == reference_digest(TINY, *TINY_ARGS, layout=(1, 4))
    assert_survivors_kept(summary)
    seen = causes_of(summary)
    for kind, rank in [
        ("kill", 0),
        ("kill", 3),
        ("kill", 2),
        ("kill", 1),
        ("stop", 3),
        ("stop", 0),
    ]:
        assert (kind, rank) in seen, seen
    # Of two that are due in one step, the first may be recovered from before the other is reached.
    assert len(summary["recoveries"]) <= 7, "a fault during a recovery joins its incident"


class Reaction:
    """Kills a rank as soon as the job's log shows something new of one type."""

    def __init__(self, job: Job, kind: type, victim: int) -> None:
        self._seen = len(job.of_type(kind))
        self._job, self._kind, self._victim = job, kind, victim

    def fire(self) -> None:
        what = f"a new {self._kind.__name__}"
        self._job.until(lambda: len(self._job.of_type(self._kind)) > self._seen, what)
        os.kill(self._job.pid_of(self._victim), signal.SIGKILL)


@over_both(long=True)
@pytest.mark.timeout(300)
def test_a_fault_in_each_phase_of_a_recovery(
    over: Over, tmp_path: Path, reference_digest: Reference
):
    """A second process dies while survivors leave, while groups form, while state is restored."""
    script, args = SCRIPTS / "fragile.py", (*DISTURBED_ARGS, "--pace-ms", 5, "--marks", tmp_path)
    with running(tmp_path, *over(script, *args), layout=TWO_BY_TWO) as job:
        for step, kind in ((10, FaultSeen), (50, GenerationOpened)):
            job.until_step(step)
            reaction = Reaction(job, kind, victim=2)
            os.kill(job.pid_of(1), signal.SIGKILL)
            reaction.fire()
            opened = len(job.of_type(GenerationOpened))
            job.until_step(step + 20)
            assert len(job.of_type(GenerationOpened)) >= opened
        (tmp_path / "restore-kills-rank-3").touch()
        os.kill(job.pid_of(0), signal.SIGKILL)
        summary = finish(job)
    assert (tmp_path / "restore-killed").exists()
    assert summary["final_digest"] == reference_digest(TINY, *DISTURBED_ARGS, layout=(1, 4))
    assert_survivors_kept(summary)
    assert ("kill", 3) in causes_of(summary)


@over_both(long=True)
def test_a_failure_that_repeats_gets_a_fresh_process(over: Over, tmp_path: Path):
    """Twice the same exception at the same step: in place first, then in a new process."""
    flags = [*fault("exception", 1, 12), *fault("exception", 1, 12)]
    job = run_job(tmp_path, *over(TINY, *TINY_ARGS), flags=flags)
    summary = job.summary()
    assert [r["kind"] for r in summary["recoveries"]] in (["exception"] * 2, ["exception"])
    first, second, third = pids_of(summary, 1)
    assert first == second != third
    assert len(set(pids_of(summary, 0))) == 1


@over_both()
def test_no_survivor_waits_whatever_it_waits_for(over: Over, tmp_path: Path):
    """Neither for a loader's stall, nor for the 30 minutes of a collective in the user's group."""
    job = run_job(tmp_path, *over(SCRIPTS / "waiting.py", tmp_path), layout=TWO_BY_TWO)
    summary = job.summary()
    assert causes_of(summary) == [("kill", 0), ("kill", 1)]
    assert_survivors_kept(summary)
    for recovery in summary["recoveries"]:
        assert recovery["seconds"]["interrupt"] < UNSEEN_SECONDS, recovery
        assert recovery["seconds"]["total"] < 10


@over_both(long=True)
def test_killing_a_store_or_a_zygote_keeps_every_rank(
    over: Over, tmp_path: Path, reference_digest: Reference
):
    with running(tmp_path, *over(TINY, *DISTURBED_ARGS, "--pace-ms", 5), layout=TWO_BY_TWO) as job:
        job.until_step(20)
        store = job.of_type(GenerationOpened)[-1].store
        stores = job.stores()
        assert stores
        for pid in stores:
            os.kill(pid, signal.SIGKILL)
        job.until_step(job.step() + 20)
        os.kill(job.pid_of(2), signal.SIGKILL)  # needs a store again
        job.until(lambda: len(job.of_type(GenerationOpened)) > 1, "a generation with another store")
        job.until_step(job.step() + 20)
        for pid in job.zygotes():
            os.kill(pid, signal.SIGKILL)
        job.until_step(job.step() + 20)
        os.kill(job.pid_of(1), signal.SIGKILL)  # needs a zygote again
        summary = finish(job)
    assert job.of_type(GenerationOpened)[-1].store != store
    assert ("kill", 1) in causes_of(summary)
    assert ("kill", 2) in causes_of(summary)
    assert {rank for kind, rank in primary_faults(job)} <= {1, 2}
    assert_survivors_kept(summary)
    assert summary["final_digest"] == reference_digest(TINY, *DISTURBED_ARGS, layout=(1, 4))
    assert len(set(pids_of(summary, 0))) == len(set(pids_of(summary, 3))) == 1


@over_both(long=True)
def test_a_killed_agent_comes_back_as_the_same_node(
    over: Over, tmp_path: Path, reference_digest: Reference
):
    with running(tmp_path, *over(TINY, *DISTURBED_ARGS, "--pace-ms", 5), layout=TWO_BY_TWO) as job:
        job.until_step(20)
        os.kill(job.agent_pid(1), signal.SIGKILL)
        summary = finish(job)
    assert [e.node for e in job.of_type(NodeJoined)].count(1) == 2
    assert ("node", None) in causes_of(summary)
    assert_survivors_kept(summary)
    assert len(set(pids_of(summary, 0))) == len(set(pids_of(summary, 1))) == 1
    assert summary["final_digest"] == reference_digest(TINY, *DISTURBED_ARGS, layout=(1, 4))


@over_both(long=True)
def test_eight_nodes_of_one_rank(over: Over, tmp_path: Path, reference_digest: Reference):
    args = ("--steps", 24)
    flags = [*fault("kill", 0, 6), *fault("exception", 7, 12, "backward"), *fault("kill", 5, 18)]
    job = run_job(tmp_path, *over(TINY, *args), layout=(8, 1), flags=flags)
    expected = [("kill", 0), ("exception", 7), ("kill", 5)]
    assert_recovered_as(job, expected, reference_digest(TINY, *args, layout=(1, 8)))


def random_schedule(seed: int) -> list[tuple[str, int, int, str]]:
    """Two to four faults: (kind, rank, step, point); those that are slow to detect are rarer."""
    chance = random.Random(seed)
    kinds = ("exception", "kill", "exit", "segv") * 3 + ("hang", "stop", "gil")
    points = (*POINTS, "recovery")
    count = chance.randint(2, 4)
    steps = sorted(chance.randint(1, 50) for _ in range(count))
    return [(chance.choice(kinds), chance.randrange(4), s, chance.choice(points)) for s in steps]


def run_schedule(over: Over, seed: int, tmp_path: Path, reference_digest: Reference) -> None:
    schedule = random_schedule(seed)
    print(f"seed {seed}: {schedule}")
    flags: list[Any] = [part for planned in schedule for part in fault(*planned)]
    job = run_job(tmp_path, *over(TINY, *TINY_ARGS), layout=TWO_BY_TWO, flags=flags)
    summary = job.summary()
    assert summary["final_digest"] == reference_digest(TINY, *TINY_ARGS, layout=(1, 4)), schedule
    assert_survivors_kept(summary)


@pytest.mark.parametrize(
    ("over", "seed"),
    [
        *[pytest.param(over_gloo, seed, id=f"{seed}") for seed in range(6)],
        *[pytest.param(over_nccl_like, seed, id=f"{seed}-nccl_like") for seed in (6, 7)],
    ],
)
def test_random_schedules(over: Over, seed: int, tmp_path: Path, reference_digest: Reference):
    run_schedule(over, seed, tmp_path, reference_digest)


@pytest.mark.long
@over_both(long=True)
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_many_random_schedules(over: Over, seed: int, tmp_path: Path, reference_digest: Reference):
    run_schedule(over, seed, tmp_path, reference_digest)
