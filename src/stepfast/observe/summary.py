"""`summary.json`: a job's account, folded from its events alone.

Owns: the file's shape. Readers may rely on every field here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.events import (
    AFTER_THE_END,
    CheckpointCommitted,
    CheckpointLost,
    CheckpointRejected,
    CheckpointsVanished,
    EventLine,
    FaultSeen,
    GenerationOpened,
    JobEnded,
    Note,
    Recovered,
)
from stepfast.runtime.disk import write_own

SUMMARY_VERSION = 1


def summarize(lines: Iterable[EventLine]) -> dict[str, Any]:
    """The summary of a job so far; a job without an end is shown as `running`."""
    summary: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "status": "running",
        "exit_code": None,
        "reason": None,
        "steps": 0,
        "final_digest": None,
        "pids": {},
        "generations": [],
        "recoveries": [],
        "checkpoints": {"committed": 0, "lost": 0, "rejected": 0, "vanished": 0, "last_step": None},
        "failed_after_the_end": [],
        "faults": 0,
        "wall_s": 0.0,
    }
    first_at: float | None = None
    for line in lines:
        first_at = line.at if first_at is None else first_at
        summary["wall_s"] = round(line.at - first_at, 3)
        _take(summary, line.event)
    return summary


def _take(summary: dict[str, Any], event: object) -> None:
    match event:
        case GenerationOpened():
            for rank, pid in event.pids.items():
                summary["pids"].setdefault(str(rank), {})[str(event.generation)] = pid
            summary["generations"].append(
                {
                    "generation": event.generation,
                    "step": event.step,
                    "source": event.source,
                    "kept_model": event.kept,
                }
            )
            summary["status"] = "running"
        case FaultSeen(collateral=False):
            summary["faults"] += 1
        case CheckpointCommitted():
            summary["checkpoints"]["committed"] += 1
            summary["checkpoints"]["last_step"] = event.step
            if summary["status"] != "running":  # made durable on the way out
                summary["steps"] = max(summary["steps"], event.step)
        case CheckpointLost():
            summary["checkpoints"]["lost"] += 1
        case CheckpointsVanished():
            summary["checkpoints"]["vanished"] += len(event.steps)
        case CheckpointRejected():
            summary["checkpoints"]["rejected"] += 1
        case Recovered():
            summary["recoveries"].append(_recovery(event))
        case Note(topic=topic, rank=rank) if topic == AFTER_THE_END and rank is not None:
            if summary["status"] != "finished":
                return
            summary["failed_after_the_end"].append(rank)
            summary["exit_code"] = EXIT_TRY_AGAIN
        case JobEnded():
            summary["status"] = event.status
            summary["exit_code"] = event.exit_code
            summary["reason"] = event.reason
            summary["steps"] = event.steps
            summary["final_digest"] = event.final_digest


def _recovery(event: Recovered) -> dict[str, Any]:
    seconds = (
        "detect",
        "interrupt",
        "respawn",
        "rendezvous",
        "build",
        "restore",
        "first_step",
        "total",
    )
    return {
        "kind": event.kind,
        "rank": event.rank,
        "node": event.node,
        "step": event.step,
        "generation": event.generation,
        "resumed_step": event.resumed_step,
        "steps_lost": event.steps_lost,
        "survivors_kept_pid": event.survivors_kept_pid,
        "kept_model": event.kept_model,
        "causes": [msgspec.to_builtins(cause) for cause in event.causes],
        "seconds": {name: round(getattr(event, f"{name}_s"), 6) for name in seconds},
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write whole or not at all."""
    write_own(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
