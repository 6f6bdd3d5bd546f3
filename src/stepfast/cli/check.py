"""`stepfast run --check`: where a run would go on, what it would use, what stands in its way.

Owns: the look at a job's directory, memory and checkpoint store, and the words of the table. Does
not own: the one step that is made (`core.job_check`, `train.checking`).
Invariant: whatever is looked at is left as it was; no file is made, changed or removed.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

import stepfast
from stepfast.checkpoint.arena import (
    SLOTS_TO_WRITE,
    SLOTS_WITH_OVERLAP,
    SealedSlot,
    free_bytes,
    job_slots,
    sealed_slots,
)
from stepfast.checkpoint.catalog import survey
from stepfast.checkpoint.manifest import checkpoint_name
from stepfast.checkpoint.store import open_store
from stepfast.cli.tables import aligned, size_text, span
from stepfast.config import JobConfig
from stepfast.coordinator.journal import History, read_job_id
from stepfast.core.durable import CheckpointSettings, Durable, choose_source, would_start_over
from stepfast.core.job_state import JobState
from stepfast.core.messages import JobSettings, RankChecked, TrackedObject
from stepfast.core.placement import node_of
from stepfast.core.recovery import RestorePlan
from stepfast.core.terms import Rank, SnapshotId
from stepfast.errors import OperatingError

_OF_A_NEW_JOB = "checkpoints/ in a new job directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a run of the job would find."""

    config: JobConfig
    checkpoints: CheckpointSettings
    resume: str
    job_dir: Path | None
    checkpoints_there: int
    free_bytes: int  # in the memory directory, what the job's own slots take included
    layouts: dict[Rank, str]  # of the slots that a run would read, by digest; empty: it reads none
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def slots_per_rank(self) -> int:
        """How many slots a run would lay out for each rank."""
        return SLOTS_WITH_OVERLAP + (SLOTS_TO_WRITE if self.checkpoints.url else 0)


def check_settings(settings: JobSettings) -> JobSettings:
    """The settings of the check itself: it keeps nothing, and ends at the first fault."""
    return msgspec.structs.replace(
        settings, check=True, recovery="off", faults=(), checkpoints=CheckpointSettings()
    )


def look_ahead(
    config: JobConfig, checkpoints: CheckpointSettings, history: History, job_dir: Path | None
) -> Outlook:
    """Find what a run in `job_dir` would find; None: it would get a new one."""
    obstacles: list[str] = []
    notes: list[str] = []
    durable = Durable()
    if checkpoints.url:
        durable = _stored(checkpoints.url, obstacles, notes)
    slots_dir = _slots_directory(config, job_dir)
    slots = {Rank(r): _slots_of(config, slots_dir, Rank(r)) for r in range(config.world_size)}
    held = {rank: [slot.snapshot for slot in found] for rank, found in slots.items()}
    source = choose_source(held, history.lineage, durable)
    layouts: dict[Rank, str] = {}
    resume = "nowhere: it begins at step 0"
    match source:
        case RestorePlan():
            resume = f"step {source.step}, from the slots in {slots_dir}"
            layouts = {
                rank: next(s.layout_digest for s in slots[rank] if s.snapshot == snapshot)
                for rank, snapshot in source.sources.items()
                if source.step > 0  # before the first step optimizers hold nothing yet
            }
        case SnapshotId():
            name = checkpoint_name(source.step, source.generation)
            resume = f"step {source.step}, from the checkpoint {name}"
        case None:
            if would_start_over(held, history.lineage, durable, history.steps_max):
                resume = "nowhere"
                obstacles.append(
                    "the job has made steps and nothing holds its state; it refuses to start over:"
                    " choose another --job-dir"
                )
    return Outlook(
        config=config,
        checkpoints=checkpoints,
        resume=resume,
        job_dir=job_dir,
        checkpoints_there=len(durable.committed),
        free_bytes=free_bytes(Path(config.memory_dir)) + _claimed_bytes(slots_dir),
        layouts=layouts,
        obstacles=tuple(obstacles),
        notes=tuple(notes),
    )


def _stored(url: str, obstacles: list[str], notes: list[str]) -> Durable:
    try:
        seen = survey(open_store(url))
    except (OSError, OperatingError) as error:
        obstacles.append(f"the checkpoint store cannot be used: {error}")
        return Durable()
    notes += [f"passed over: {finding.name}: {finding.text}" for finding in seen.damaged]
    if not urlsplit(url).scheme and not _may_write(Path(url)):
        obstacles.append(f"no right to write checkpoints to {url}")
    return Durable().told_of(manifest.snapshot for manifest in seen.manifests)


def _may_write(directory: Path) -> bool:
    """Whether files could be made there, or the directory itself where it is missing."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return os.access(there, os.W_OK | os.X_OK)


def _slots_directory(config: JobConfig, job_dir: Path | None) -> Path | None:
    job_id = None if job_dir is None else read_job_id(job_dir)
    if job_id is None:
        return None
    return job_slots(config.memory_dir, job_id)


def _slots_of(config: JobConfig, slots_dir: Path | None, rank: Rank) -> list[SealedSlot]:
    if slots_dir is None:
        return []
    node = node_of(rank, config.nproc_per_node)
    directory = slots_dir / f"node-{node}" / f"rank-{rank}"
    return sealed_slots(directory) if directory.is_dir() else []


def _claimed_bytes(slots_dir: Path | None) -> int:
    if slots_dir is None or not slots_dir.is_dir():
        return 0
    return sum(path.lstat().st_blocks * 512 for path in slots_dir.rglob("slot-*.safetensors"))


# --- what stands in the way -----------------------------------------------------------------------


def obstacles(outlook: Outlook, state: JobState) -> list[str]:
    """Why a run would fail although the script made its step."""
    found = list(outlook.obstacles)
    needed = needed_bytes(outlook, state.checked.values())
    if needed > outlook.free_bytes:
        found.append(
            f"the slots need {size_text(needed)} in {outlook.config.memory_dir}, and"
            f" {size_text(outlook.free_bytes)} are free; enlarge that memory, choose another"
            " --memory-dir, or run fewer ranks"
        )
    return found


def needed_bytes(outlook: Outlook, reports: Iterable[RankChecked]) -> int:
    """What the slots of all ranks take, in whole pages."""
    pages = (-(-report.slot_bytes // mmap.PAGESIZE) for report in reports)
    return sum(pages) * mmap.PAGESIZE * outlook.slots_per_rank


# --- the table ------------------------------------------------------------------------------------


def table(outlook: Outlook, state: JobState) -> list[str]:
    """What a run would use, for a person."""
    reports = [report for _, report in sorted(state.checked.items())]
    first = reports[0]
    config, limits = outlook.config, state.timeouts
    hang = (
        f"a step {limits.hang_floor_s:g} s at the least; first turns and unseen sections"
        f" {limits.hang_ceiling_s:g} s; hang = {config.hang}, recovery = {config.recovery}"
    )
    rows = [
        ("ranks", f"{config.world_size}, {config.nproc_per_node} on each of {config.nodes} nodes"),
        ("device", f"{_same(reports, lambda r: r.device)}, groups by {first.backend}"),
        ("versions", _versions(first)),
        ("first turn", f"{max(r.seconds for r in reports):.2f} s with what happens only once"),
        *[("tracked", line) for line in _tracked(reports)],
        ("loaders", ", ".join(first.loaders) or "none is tracked: data positions are not kept"),
        ("slots", _slots(outlook, reports)),
        ("snapshots", f"every {_steps(config.snapshot_interval_steps)}"),
        ("checkpoints", _due(outlook)),
        ("resumes at", outlook.resume),
        ("run.once", _kept(reports)),
        ("hang limits", hang),
        *[("note", note) for note in (*outlook.notes, *_notes(outlook, reports))],
    ]
    return ["", "checked: a run would use", *aligned(_once_each(rows)), "nothing of this was kept"]


def _once_each(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A label that comes again is left out."""
    labels = ["", *(label for label, _ in rows)]
    return [
        ("" if label == before else label, text)
        for before, (label, text) in zip(labels, rows, strict=False)
    ]


def _same(reports: list[RankChecked], of: Callable[[RankChecked], str]) -> str:
    return " or ".join(dict.fromkeys(of(report) for report in reports))


def _versions(report: RankChecked) -> str:
    verified = "verified" if report.torch_obstacle is None else "not verified: builds again"
    return (
        f"stepfast {stepfast.__version__}, torch {report.torch_version} ({verified}),"
        f" Python {platform.python_version()}"
    )


def _tracked(reports: list[RankChecked]) -> list[str]:
    """One line for each object: tensors and bytes of a rank, from the smallest to the largest."""
    by_name: dict[str, list[TrackedObject]] = {}
    for report in reports:
        for tracked in report.objects:
            by_name.setdefault(tracked.name, []).append(tracked)
    rows = [
        (
            name,
            shares[0].type,
            f"{span([s.tensors for s in shares])} tensors",
            _bytes_of(shares),
        )
        for name, shares in by_name.items()
    ]
    return aligned(rows, indent="")


def _bytes_of(shares: list[TrackedObject]) -> str:
    if not any(share.tensors or share.size_bytes for share in shares):
        return "plain values alone"
    return f"{span([share.size_bytes for share in shares], size_text)} a rank"


def _slots(outlook: Outlook, reports: list[RankChecked]) -> str:
    each = span([report.slot_bytes for report in reports], size_text)
    needed = size_text(needed_bytes(outlook, reports))
    return (
        f"{outlook.slots_per_rank} a rank of {each}: {needed} of"
        f" {size_text(outlook.free_bytes)} that are free in {outlook.config.memory_dir}"
    )


def _due(outlook: Outlook) -> str:
    settings = outlook.checkpoints
    if not settings.url:
        return "none: a lost node's state is gone"
    due = ["the last step"]
    if settings.interval_s:
        due.insert(0, f"every {settings.interval_s:g} s")
    if settings.interval_steps:
        due.insert(0, f"every {_steps(settings.interval_steps)}")
    kept = f"the newest {settings.keep_last} are kept"
    if settings.keep_every_steps:
        kept += f", and each at a multiple of {settings.keep_every_steps}"
    where = settings.url if outlook.config.checkpoints or outlook.job_dir else _OF_A_NEW_JOB
    return f"{where}; {', '.join(due)}; {kept}; {outlook.checkpoints_there} are there now"


def _kept(reports: list[RankChecked]) -> str:
    obstacles = sorted({r.keep_obstacle for r in reports if r.keep_obstacle is not None})
    if obstacles:
        return f"nothing is kept over a restart, it is built again: {'; '.join(obstacles)}"
    return f"keeps what {', '.join(reports[0].once)} built, as far as is seen before a restart"


def _notes(outlook: Outlook, reports: list[RankChecked]) -> list[str]:
    other = [r.rank for r in reports if outlook.layouts.get(r.rank, r.layout) != r.layout]
    if not other:
        return []
    text = "the slots to resume from were laid out otherwise than this script would now"
    return [f"ranks {other}: {text}: if it changed, resuming may fail"]


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
