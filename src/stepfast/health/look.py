"""A throw-away process that looks at this node's devices: `python -m stepfast.health.look`.

Owns: what it looks at, in which order, and its words on standard output: JSON, one a line. A
finding is an object; a string says what is looked at next, so that whoever waits in vain knows at
what. Does not own: the deadline (`agent.gate`). Invariant: it changes nothing, and loads no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from stepfast.health import efa, nvml
from stepfast.health.verdicts import Finding, unknown

NO_GPUS = -1  # instead of a count: whatever there is, it is not for this job
_ENCODER = msgspec.json.Encoder()


def has_gpus(root: Path, expected: int) -> bool:
    """Whether there is, or should be, anything to ask the driver about."""
    if expected == NO_GPUS:
        return False
    return expected > 0 or os.path.exists(root / "dev" / "nvidiactl")


def has_fabric(root: Path, expected: int) -> bool:
    """Whether there is, or should be, an adapter to look at."""
    return expected > 0 or os.path.exists(root / "sys" / "class" / "infiniband")


def command(root: Path, gpus: int, efas: int) -> list[str]:
    """How it is started."""
    module = [sys.executable, "-P", "-m", "stepfast.health.look"]
    return [*module, "--root", str(root), "--gpus", str(gpus), "--efas", str(efas)]


def main() -> int:
    """Look, and say it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--root", type=Path, required=True, help="where dev and sys are")
    parser.add_argument("--gpus", type=int, required=True, help="so many are expected; 0: any")
    parser.add_argument("--efas", type=int, required=True, help="the same")
    given = parser.parse_args()
    if has_fabric(given.root, given.efas):
        _say("EFA adapters")
        for finding in _efa(given.root / "sys", given.efas):
            _say(finding)
    if has_gpus(given.root, given.gpus):
        files = len(list((given.root / "dev").glob("nvidia[0-9]*")))
        for finding in nvml.look(given.gpus, files, _say):
            _say(finding)
    return 0


def _efa(sys_root: Path, expected: int) -> list[Finding]:
    try:
        return efa.judged(efa.read(sys_root), expected)
    except OSError as error:
        return [unknown("efa count", f"{error.filename}: {error.strerror}")]


def _say(word: Finding | str) -> None:
    sys.stdout.buffer.write(_ENCODER.encode(word) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
