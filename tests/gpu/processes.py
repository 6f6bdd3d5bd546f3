"""Claims about processes: errors that stay, a kill beside live contexts, a fork before CUDA.

Never run on a GPU; see `gpu.bench`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from gpu.bench import Bench, NotRun, Outcome
from stepfast.core.faults import ErrorClass

RETURNED_LIMIT_S = 10.0
_SLACK_BYTES = 64 << 20
STICKY_KINDS = ("device assert", "illegal access")


def sticky_errors(bench: Bench) -> Outcome:
    """Each error is met by a child of its own: it is told as what it is, and stays or does not."""
    found: dict[str, dict[str, Any]] = {}
    for kind in (*STICKY_KINDS, "out of memory"):
        with bench.start_child("sticky", kind) as child:
            found[kind] = child.says()
    wrong = [kind for kind, told in found.items() if not _is_right(kind, told)]
    skipped = [kind for kind, told in found.items() if "skipped" in told]
    reason = f"not as expected: {', '.join(wrong)}" if wrong else "told, and stay as they should"
    if skipped:
        reason += f"; not provoked: {', '.join(skipped)}"
    return Outcome(holds=not wrong, reason=reason, numbers=found)


def _is_right(kind: str, told: dict[str, Any]) -> bool:
    if "skipped" in told:
        return True
    is_sticky = kind in STICKY_KINDS
    wanted = ErrorClass.DEVICE if is_sticky else ErrorClass.MEMORY
    return bool(told["error_class"] == wanted.value and told.get("goes_on") is not is_sticky)


def sigkill_beside_contexts(bench: Bench) -> Outcome:
    """Two processes on one GPU; one is killed: the other goes on, and the memory comes back."""
    free_before, _ = bench.cuda.mem_get_info()
    with bench.start_child("hold") as victim, bench.start_child("hold") as survivor:
        victim.says()
        survivor.says()
        free_held, _ = bench.cuda.mem_get_info()
        killed_at = time.monotonic()
        os.kill(victim.process.pid, signal.SIGKILL)
        reached = survivor.says()["number"]
        gaps_s = []
        for _ in range(20):
            asked_at = time.monotonic()
            survivor.says(10.0)
            gaps_s.append(time.monotonic() - asked_at)
        victim.process.wait()
        share = max(0, free_before - free_held) // 2
        returned_s = _until_free(bench, free_held + share - _SLACK_BYTES, killed_at)
    if returned_s is None:
        return Outcome(holds=False, reason="the killed process's memory did not come back")
    numbers = {
        "survivor_at": reached,
        "longest_gap_ms": round(max(gaps_s) * 1e3, 1),
        "held_bytes_each": share,
        "returned_s": round(returned_s, 3),
    }
    reason = f"the survivor went on; memory came back after {returned_s:.2f} s"
    return Outcome(holds=True, reason=reason, numbers=numbers)


def _until_free(bench: Bench, wanted_bytes: int, since: float) -> float | None:
    while (waited_s := time.monotonic() - since) < RETURNED_LIMIT_S:
        if bench.cuda.mem_get_info()[0] >= wanted_bytes:
            return waited_s
        time.sleep(0.01)
    return None


def fork_before_cuda(bench: Bench) -> Outcome:
    """A process that has loaded what a zygote does, and looked for devices, may fork."""
    with bench.start_child("fork") as child:
        told = child.says()
    if told["child"].startswith("failed"):
        return Outcome(holds=False, reason=f"the fork {told['child']}", numbers=told)
    holds = told["harm_before"] == "" and told["harm_after"] == "initialises CUDA"
    seconds = float(told["child"])
    reason = f"the fork had its context after {seconds:.2f} s; the harm is seen once it is done"
    return Outcome(holds=holds, reason=reason, numbers=told)


def ecc_error(bench: Bench) -> Outcome:
    """There is no way for a process to make one."""
    raise NotRun("an uncorrectable ECC error cannot be provoked by a process without privileges")
