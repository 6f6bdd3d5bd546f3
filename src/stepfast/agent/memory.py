"""The directory of a node's slots belongs to one layout of the world.

Owns: whether what a killed run left there is of this layout; setting it aside where it is not.
Does not own: the slots themselves (`checkpoint.arena`), what the job resumes from (`core`).

A directory that another process removes while the job runs is made again.

Invariants: slots of another layout are never seen by a rank; they are removed only when the job has
chosen where it goes on, and are there again for a run of their own layout until then.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stepfast.checkpoint.arena import make_private, sealed_slots
from stepfast.core.quantities import counted

_LAYOUT_FILE = "layout"
HINT = "run with that layout again, or choose another --job-dir to begin anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What killed runs left on a node, for a run of one layout.

    `own` is the directory with what is of that layout, wherever it lies before it is settled;
    `is_held`: there are slots in it. `other` has slots of another layout, which `problem` names.
    """

    own: Path | None
    is_held: bool
    other: Path | None
    problem: str | None


NO_MEMORY = Memory(own=None, is_held=False, other=None, problem=None)


def look(slot_root: Path, layout: str) -> Memory:
    """What `settle_layout` would find; nothing is changed."""
    own: Path | None = slot_root
    other = _aside(slot_root)
    if _newest_step(slot_root) is None:
        if _layout_of(other) == layout:
            own, other = other, slot_root
    elif _layout_of(slot_root) != layout:
        own, other = None, slot_root
    step = _newest_step(other)
    problem = (
        f"memory holds step {step} of another layout ({_layout_of(other) or 'unknown'}),"
        f" which this one ({layout}) cannot read"
    )
    return Memory(
        own=own,
        is_held=own is not None and _newest_step(own) is not None,
        other=None if step is None else other,
        problem=None if step is None else problem,
    )


def settle_layout(slot_root: Path, layout: str) -> Memory:
    """Make `slot_root` that of `layout`; slots of another one are set aside."""
    found, aside = look(slot_root, layout), _aside(slot_root)
    if found.other == slot_root:
        shutil.rmtree(aside, ignore_errors=True)
        slot_root.rename(aside)
    elif found.own == aside:
        shutil.rmtree(slot_root, ignore_errors=True)
        aside.rename(slot_root)
    make_private(slot_root)
    (slot_root / _LAYOUT_FILE).write_text(f"{layout}\n")
    return look(slot_root, layout)


def layout_words(world_size: int, nproc_per_node: int) -> str:
    """What a layout of the world is called."""
    return f"{counted(world_size, 'rank')}, {nproc_per_node} per node"


def mend(slot_root: Path, layout: str) -> None:
    """Say again whose the directory is, where another process removed it or that word."""
    if (slot_root / _LAYOUT_FILE).exists():
        return
    for directory in (slot_root.parent, slot_root):
        make_private(directory)
    (slot_root / _LAYOUT_FILE).write_text(f"{layout}\n")


def holds_nothing(job_slots: Path) -> bool:
    """Whether no node of this machine left a slot of the job, of whatever layout."""
    return all(_newest_step(node) is None for node in job_slots.glob("node-*"))


def has_set_aside(slot_root: Path) -> bool:
    """Whether slots of another layout wait for the job's choice."""
    return _aside(slot_root).exists()


def remove_set_aside(slot_root: Path) -> None:
    """The job has chosen where it goes on: their space is needed."""
    shutil.rmtree(_aside(slot_root), ignore_errors=True)


def _aside(slot_root: Path) -> Path:
    return slot_root.with_name(f"{slot_root.name}-of-another-layout")


def _layout_of(directory: Path) -> str:
    try:
        return (directory / _LAYOUT_FILE).read_text().strip()
    except OSError:
        return ""


def _newest_step(directory: Path) -> int | None:
    slots = (slot for rank in directory.glob("rank-*") for slot in sealed_slots(rank))
    return max((slot.snapshot.step for slot in slots), default=None)
