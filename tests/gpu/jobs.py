"""Claims about whole jobs and their groups: what a recovery keeps, gives back, and ends in.

Never run on a GPU; see `gpu.bench`. Over the double these are jobs on the CPU with Gloo.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cluster.harness import Job, pids_of, run_job
from gpu.bench import Bench, NotRun, Outcome
from stepfast.core.terms import Generation, Rank
from stepfast.train.backends import GLOO, NCCL
from stepfast.train.groups import Groups, Membership

_SCRIPT = Path(__file__).parent / "scripts" / "recovering.py"
GROWTH_BYTES_MAX = 16 << 20
EARLY = 5  # what the first recoveries make once is no leak
_ABORTS = 5


def _job(bench: Bench, name: str, *arguments: object, ranks: int | None = None) -> _Ran:
    directory = bench.new_directory(name)
    count = ranks or (2 if bench.is_fake else min(bench.gpu_count, 8))
    flags = ("--device", bench.device_type, "--restarts-per-hour", 10_000)
    job = run_job(
        directory, _SCRIPT, directory, *arguments, layout=(1, count), flags=flags, limit_s=1500
    )
    lines = [(directory / f"held-{rank}.jsonl").read_text().splitlines() for rank in range(count)]
    return _Ran(job, [[json.loads(line) for line in of_rank] for of_rank in lines])


class _Ran:
    """A job that is over: its summary, and what each rank held at each start."""

    def __init__(self, job: Job, held: list[list[dict[str, Any]]]) -> None:
        self.summary = job.summary()
        self.held = held

    def recoveries_s(self) -> list[float]:
        return [r["seconds"]["total"] for r in self.summary["recoveries"]]


def context_kept(bench: Bench) -> Outcome:
    """An exception of one rank: every process goes on, and nobody makes a context again."""
    ran = _job(bench, "context", "--failures", 3)
    kept = all(r["survivors_kept_pid"] for r in ran.summary["recoveries"])
    pids = {rank: len(set(pids_of(ran.summary, rank))) for rank in range(len(ran.held))}
    first_s = max(of_rank[0]["entered_s"] for of_rank in ran.held)
    later_s = max(line["entered_s"] for of_rank in ran.held for line in of_rank[1:])
    numbers = {
        "first_use_ms": round(first_s * 1e3, 2),
        "later_use_ms": round(later_s * 1e3, 2),
        "recoveries_ms": [round(s * 1e3) for s in ran.recoveries_s()],
    }
    reason = f"{len(ran.recoveries_s())} recoveries, {max(pids.values())} process a rank"
    return Outcome(holds=kept and set(pids.values()) == {1}, reason=reason, numbers=numbers)


def memory_flat(bench: Bench) -> Outcome:
    """What the device's memory holds behind the last recovery, against the fifth."""
    ran = _job(bench, "flat", "--failures", bench.recoveries)
    recoveries = len(ran.recoveries_s())
    if recoveries != bench.recoveries:
        return Outcome(holds=False, reason=f"{recoveries} recoveries of {bench.recoveries}")
    early = min(EARLY, recoveries - 1)
    grown = {
        name: max(of_rank[-1].get(name, 0) - of_rank[early].get(name, 0) for of_rank in ran.held)
        for name in ("device_bytes", "allocated_bytes")
    }
    numbers = {"recoveries": recoveries, **{f"grown_{k}": v for k, v in grown.items()}}
    reason = f"{recoveries} recoveries: {grown['device_bytes']} bytes more on the device"
    return Outcome(holds=max(grown.values()) <= GROWTH_BYTES_MAX, reason=reason, numbers=numbers)


def bitwise_resume(bench: Bench) -> Outcome:
    """The same job with failures and without; where they differ, whether two without do as well."""
    failing = _job(bench, "failing", "--failures", 2)
    spared = _job(bench, "spared", "--failures", 2, "--spared")
    digests = [ran.summary["final_digest"] for ran in (failing, spared)]
    numbers = {"recoveries": len(failing.recoveries_s()), "digests": digests}
    if digests[0] == digests[1]:
        holds = len(failing.recoveries_s()) == 2
        return Outcome(holds=holds, reason="the same state, bit for bit", numbers=numbers)
    again = _job(bench, "again", "--failures", 2, "--spared").summary["final_digest"]
    reason = "another state than without failures"
    if again != digests[1]:
        reason = "two runs without failures differ: the kernels are not deterministic here"
    return Outcome(holds=False, reason=reason, numbers=numbers)


def device_error_replaced(bench: Bench) -> Outcome:
    """A sticky error in one rank: its process is replaced, the job goes on, others keep theirs."""
    ran = _job(bench, "sticky", "--failures", 1, "--how", "device")
    changed = [r for r in range(len(ran.held)) if len(set(pids_of(ran.summary, r))) > 1]
    (recovery,) = ran.summary["recoveries"]
    holds = changed == [recovery["rank"]] and recovery["survivors_kept_pid"]
    reason = f"rank {recovery['rank']} failed; replaced were {changed}"
    numbers = {"recovery_ms": round(recovery["seconds"]["total"] * 1e3)}
    return Outcome(holds=holds, reason=reason, numbers=numbers)


def nccl_abort(bench: Bench) -> Outcome:
    """A world is aborted from another thread's place and made again, in one process."""
    backend = GLOO if bench.is_fake else NCCL
    backend.prepare(os.environ)
    if dist.is_initialized():
        raise NotRun("this process is in a process group already")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = Groups(backend)
    form_s, abort_s, dissolve_s = [], [], []
    for number in range(1, _ABORTS + 1):
        membership = Membership(
            generation=Generation(number),
            rank=Rank(0),
            world_size=1,
            store_host="127.0.0.1",
            store_port=server.port,
            forming_timeout_s=60.0,
        )
        began = time.perf_counter()
        groups.form(membership, lambda: False)
        one = torch.ones(1, device=bench.device)
        dist.all_reduce(one)
        assert one.item() == 1.0, "an all-reduce of one rank is the identity"
        form_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        report = groups.abort()
        abort_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        groups.dissolve()
        dissolve_s.append(time.perf_counter() - began)
    wanted = 0 if bench.is_fake else 1
    holds = report.device_groups_aborted == wanted
    numbers = {
        "form_ms": [round(s * 1e3, 1) for s in form_s],
        "abort_ms": [round(s * 1e3, 1) for s in abort_s],
        "dissolve_ms": [round(s * 1e3, 1) for s in dissolve_s],
    }
    reason = f"{_ABORTS} worlds, the slowest abort {max(abort_s) * 1e3:.0f} ms"
    return Outcome(holds=holds, reason=reason, numbers=numbers)


def nccl_peers(bench: Bench) -> Outcome:
    """A rank raises while the others wait for it in a collective: they are woken and go on."""
    ran = _job(bench, "peers", "--failures", 4)
    recoveries = ran.summary["recoveries"]
    kept = all(r["survivors_kept_pid"] for r in recoveries)
    slowest_s = max(r["seconds"]["interrupt"] for r in recoveries)
    reason = f"{len(recoveries)} recoveries, the slowest interrupt {slowest_s * 1e3:.0f} ms"
    numbers = {"interrupt_ms": [round(r["seconds"]["interrupt"] * 1e3) for r in recoveries]}
    return Outcome(holds=kept and len(recoveries) == 4, reason=reason, numbers=numbers)
