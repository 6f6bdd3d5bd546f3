"""A result: what was measured, on what, beside what was expected; a JSON line each, and a table.

Owns: the shape of `results/*.jsonl` and the words on the console. Does not own: measuring.
"""

import datetime
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import DETECTION, DOES_NOT_SHOW, STEP_RATIO, Case
from jobs import Measured

RESULT_VERSION = 1
QUIET_LOAD = (
    0.5  # of the last minute; above it others had the cores, and no number is worth keeping
)
_ROOT = Path(__file__).resolve().parents[1]


def surroundings(command: str) -> dict[str, Any]:
    """Hardware, versions, commit, command, date: what makes a number comparable."""
    load = os.getloadavg()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _commit(),
        "hardware": {
            "cpu": _line_of("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_kib": int(_line_of("/proc/meminfo", r"MemTotal:\s*(\d+)") or 0),
        },
        "versions": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            **{name: importlib.metadata.version(name) for name in ("torch", "stepfast")},
        },
        "load_before": load,
        "quiet": load <= QUIET_LOAD,
        "does_not_show": list(DOES_NOT_SHOW),
    }


def rows_of(case: Case, measured: Measured) -> list[dict[str, Any]]:
    """One row for each measure of the case."""
    rows = []
    for measure, samples in measured.samples_s.items():
        limit_s = case.limit_s.get(measure)
        if limit_s is not None and measure == DETECTION:
            limit_s = max(limit_s, STEP_RATIO * measured.step_s)
        median_s = statistics.median(samples)
        rows.append(
            {
                "v": RESULT_VERSION,
                "bench": "recovery",
                "system": case.system,
                "case": case.name,
                "measure": measure,
                "samples_s": [round(s, 4) for s in samples],
                "median_s": round(median_s, 4),
                "min_s": round(min(samples), 4),
                "max_s": round(max(samples), 4),
                "limit_s": limit_s if limit_s is None else round(limit_s, 4),
                "within_limit": None if limit_s is None else median_s <= limit_s,
                "sketch_s": round(case.expected_s(measure), 4),
                "sketch_parts_s": case.sketch_s[measure],
                "step_s": round(measured.step_s, 4),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people; seconds."""
    heads = ("system", "fault", "measure", "n", "median", "min", "max", "sketch", "limit", "")
    lines = [heads, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    limit = "" if row["limit_s"] is None else f"{row['limit_s']:.2f}"
    verdict = {None: "", True: "ok", False: "OVER"}[row["within_limit"]]
    numbers = (f"{row[name]:.3f}" for name in ("median_s", "min_s", "max_s", "sketch_s"))
    words = (row["system"], row["case"], row["measure"], str(len(row["samples_s"])))
    return (*words, *numbers, limit, verdict)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    words = 3  # the first columns are words, the others numbers
    return [
        cell.ljust(width) if i < words else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def _line_of(path: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return found[1] if found else None


def _commit() -> str:
    """The commit, marked where files differ from it; "unknown" outside of a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--", ":!bench/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
