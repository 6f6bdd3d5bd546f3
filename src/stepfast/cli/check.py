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
from stepfast.agent.first_look import judge, refuse_without_store
from stepfast.agent.memory import NO_MEMORY, Memory, layout_words, look
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
from stepfast.checkpoint.owner import StoreOwner, StoreTaken
from stepfast.checkpoint.store import open_store
from stepfast.cli.tables import aligned, span
from stepfast.config import JobConfig
from stepfast.coordinator.journal import History, read_job_id
from stepfast.core.durable import CheckpointSettings, Durable, choose_source, would_start_over
from stepfast.core.job_state import JobState
from stepfast.core.messages import JobSettings, RankChecked, TrackedObject
from stepfast.core.node_state import CheckpointsListed, StoreUnusable
from stepfast.core.placement import node_of
from stepfast.core.quantities import counted, numbered, size_text
from stepfast.core.recovery import RestorePlan
from stepfast.core.terms import JobId, Rank, SnapshotId
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
    checkpoint: SnapshotId | None  # that a run would resume from
    obstacles: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def slots_per_rank(self) -> int:
        """How many slots a run would lay out for each rank."""
        return SLOTS_WITH_OVERLAP + (SLOTS_TO_WRITE if self.checkpoints.url else 0)


def check_settings(settings: JobSettings, outlook: Outlook) -> JobSettings:
    """The settings of the check itself: it keeps nothing, and ends at the first fault."""
    checkpoint = outlook.checkpoint
    return msgspec.structs.replace(
        settings,
        check=True,
        check_against=None if checkpoint is None else (outlook.checkpoints.url, checkpoint),
        recovery="off",
        faults=(),
        checkpoints=CheckpointSettings(start_fresh=outlook.checkpoints.start_fresh),
    )


def look_ahead(
    config: JobConfig, checkpoints: CheckpointSettings, history: History, job_dir: Path | None
) -> Outlook:
    """Find what a run in `job_dir` would find; None: it would get a new one."""
    slots_dir = _slots_directory(config, job_dir)
    memories = [_memory_of(config, slots_dir, node) for node in range(config.nodes)]
    found = _Found()
    durable = Durable()
    if checkpoints.url:
        durable = found.look_into_store(checkpoints, _job_id(config, job_dir), memories)
    found.add(refuse_without_store(memory, checkpoints) for memory in memories)
    slots = {Rank(r): _slots_of(config, memories, Rank(r)) for r in range(config.world_size)}
    held = {rank: [slot.snapshot for slot in sealed] for rank, sealed in slots.items()}
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
            resume = found.checkpoint_words(source)
        case None:
            over = would_start_over(held, history.lineage, durable, history.steps_max)
            if over and not found.obstacles:  # a refused store ends a run before it looks for one
                found.obstacles.append(
                    "the job has made steps and nothing holds its state; it refuses to start over:"
                    " choose another --job-dir"
                )
    if found.obstacles and source is None:
        resume = "nowhere"
    return Outlook(
        config=config,
        checkpoints=checkpoints,
        resume=resume,
        job_dir=job_dir,
        checkpoints_there=len(durable.committed),
        free_bytes=free_bytes(Path(config.memory_dir)) + _claimed_bytes(slots_dir),
        layouts=layouts,
        checkpoint=source if isinstance(source, SnapshotId) else None,
        obstacles=tuple(found.obstacles),
        notes=tuple(dict.fromkeys((*_said(memories), *found.notes))),
    )


class _Found:
    """What is said of the store, and of every node's memory beside it, by those who judge a run."""

    def __init__(self) -> None:
        self.obstacles: list[str] = []
        self.notes: list[str] = []
        self._job_of: dict[SnapshotId, str] = {}  # of checkpoints of other jobs

    def look_into_store(
        self, checkpoints: CheckpointSettings, job_id: JobId | None, memories: list[Memory]
    ) -> Durable:
        url = checkpoints.url
        try:
            store = open_store(url)
            StoreOwner(store, job_id).wait_until_free()
            seen = survey(store)
        except StoreTaken as error:
            self.obstacles.append(str(error))
            return Durable()
        except (OSError, OperatingError) as error:
            self.obstacles.append(f"the checkpoint store cannot be used: {error}")
            return Durable()
        if not urlsplit(url).scheme and not _may_write(Path(url)):
            self.obstacles.append(f"no right to write checkpoints to {url}")
        self._job_of = {m.snapshot: m.job_id for m in seen.manifests if m.job_id != job_id}
        self.add(judge(url, seen, m, is_strict=checkpoints.is_strict) for m in memories)
        return Durable().told_of(manifest.snapshot for manifest in seen.manifests)

    def add(self, answers: Iterable[CheckpointsListed | StoreUnusable | None]) -> None:
        """Nodes that say the same are heard once."""
        for answer in answers:
            match answer:
                case StoreUnusable(reason) if reason not in self.obstacles:
                    self.obstacles.append(reason)
                case CheckpointsListed(problems=problems):
                    texts = [f"passed over: {problem}" for problem in problems]
                    self.notes += [text for text in texts if text not in self.notes]

    def checkpoint_words(self, source: SnapshotId) -> str:
        name = checkpoint_name(source.step, source.generation)
        words = f"step {source.step}, from the checkpoint {name}"
        return f"{words} of job {self._job_of[source]}" if source in self._job_of else words


def _may_write(directory: Path) -> bool:
    """Whether files could be made there, or the directory itself where it is missing."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return os.access(there, os.W_OK | os.X_OK)


def _job_id(config: JobConfig, job_dir: Path | None) -> JobId | None:
    """What a run would be called; None: it would make a name."""
    there = None if job_dir is None else read_job_id(job_dir)
    return there or (JobId(config.job_id) if config.job_id else None)


def _slots_directory(config: JobConfig, job_dir: Path | None) -> Path | None:
    job_id = _job_id(config, job_dir)
    return None if job_id is None else job_slots(config.memory_dir, job_id)


def _memory_of(config: JobConfig, slots_dir: Path | None, node: int) -> Memory:
    if slots_dir is None:
        return NO_MEMORY
    return look(slots_dir / f"node-{node}", layout_words(config.world_size, config.nproc_per_node))


def _said(memories: list[Memory]) -> list[str]:
    return [memory.problem for memory in memories if memory.problem is not None]


def _slots_of(config: JobConfig, memories: list[Memory], rank: Rank) -> list[SealedSlot]:
    own = memories[node_of(rank, config.nproc_per_node)].own
    directory = None if own is None else own / f"rank-{rank}"
    return sealed_slots(directory) if directory is not None and directory.is_dir() else []


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


def misfits(state: JobState) -> list[str]:
    """Why the checkpoint would be refused; what several ranks say is said once."""
    ranks_by_text: dict[str, list[Rank]] = {}
    for rank, report in sorted(state.checked.items()):
        if report.misfits:
            ranks_by_text.setdefault(report.misfits, []).append(rank)
    return [f"{text} ({numbered('rank', ranks)})" for text, ranks in ranks_by_text.items()]


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
    nodes = f"each of {config.nodes} nodes" if config.nodes > 1 else "the only node"
    hang = (
        f"a step {limits.hang_floor_s:g} s at the least; first turns and unseen sections"
        f" {limits.hang_ceiling_s:g} s; hang = {config.hang}, recovery = {config.recovery}"
    )
    rows = [
        ("ranks", f"{config.world_size}, {config.nproc_per_node} on {nodes}"),
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
            _tensors_of(shares),
            _bytes_of(shares),
        )
        for name, shares in by_name.items()
    ]
    return aligned(rows, indent="")


def _tensors_of(shares: list[TrackedObject]) -> str:
    counts = {share.tensors for share in shares}
    return counted(min(counts), "tensor") if len(counts) == 1 else f"{span([*counts])} tensors"


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
    remarks = list(dict.fromkeys(remark for report in reports for remark in report.remarks))
    other = [r.rank for r in reports if outlook.layouts.get(r.rank, r.layout) != r.layout]
    if not other:
        return remarks
    text = "the slots to resume from were laid out otherwise than this script would now"
    return [*remarks, f"{numbered('rank', other)}: {text}: if it changed, resuming may fail"]


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
