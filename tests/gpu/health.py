"""The claim about the look at a node's GPUs before it joins.

Never run on a GPU; see `gpu.bench`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.bench import Bench, Outcome
from stepfast.agent.gate import JOIN, Checks, Gate
from stepfast.health.verdicts import Verdict
from stepfast.runtime.clock import SystemClock

_STAND_IN = Path(__file__).parents[1] / "fakes" / "nvml"
_NEEDED = {"gpu driver", "gpu count"}


def node_looked_at(bench: Bench) -> Outcome:
    """A node that trains is found healthy; what NVML does not say there is listed."""
    with _machine(bench) as root:
        gate = Gate(Checks(gpus=bench.gpu_count, root=root), SystemClock())
        seen = asyncio.run(gate.look(JOIN))
    if seen is None:
        return Outcome(holds=False, reason="nothing was looked at")
    found = {f.check: f"{f.verdict.value}: {f.evidence}" for f in seen.findings}
    well = {f.check for f in seen.of(Verdict.HEALTHY)}
    holds = gate.admits(seen) and well >= _NEEDED
    unknown = ", ".join(f.check for f in seen.of(Verdict.UNKNOWN)) or "nothing"
    reason = f"{seen.verdict.value} after {seen.seconds:.2f} s; unknown: {unknown}"
    return Outcome(holds=holds, reason=reason, numbers={"seconds": seen.seconds, **found})


@contextmanager
def _machine(bench: Bench) -> Iterator[Path]:
    """This one; over the double, one with a stand-in in NVML's place."""
    if not bench.is_fake:
        yield Path("/")
        return
    root = bench.new_directory("machine")
    (root / "dev").mkdir()
    (root / "dev" / "nvidiactl").touch()
    answers = root / "machine.json"
    answers.write_text(json.dumps({"gpus": [{}] * bench.gpu_count}))
    path = os.environ.get("PYTHONPATH", "")
    ours = {"NVML_STAND_IN": str(answers), "PYTHONPATH": f"{_STAND_IN}{os.pathsep}{path}"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield root
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
