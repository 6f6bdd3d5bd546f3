"""The directory of a node's slots belongs to one layout of the world.

Owns: whether what a killed run left there is of this layout; setting it aside where it is not.
Does not own: the slots themselves (`checkpoint.arena`), what the job resumes from (`core`).

Invariants: slots of another layout are never seen by a rank; they are removed only when the job has
chosen where it goes on, and are there again for a run of their own layout until then.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from stepfast.checkpoint.arena import make_private, sealed_slots

_LAYOUT_FILE = "layout"
HINT = "run with that layout again, or choose another --job-dir to begin anew"


def settle_layout(slot_root: Path, layout: str) -> str | None:
    """Make `slot_root` that of `layout`; what it says of slots that were set aside, if any were."""
    aside = _aside(slot_root)
    is_held = has_slots(slot_root)
    if is_held and _layout_of(slot_root) != layout:
        shutil.rmtree(aside, ignore_errors=True)
        slot_root.rename(aside)
    elif not is_held and _layout_of(aside) == layout:
        shutil.rmtree(slot_root, ignore_errors=True)
        aside.rename(slot_root)
    make_private(slot_root)
    (slot_root / _LAYOUT_FILE).write_text(f"{layout}\n")
    step = _newest_step(aside)
    if step is None:
        return None
    return (
        f"memory holds step {step} of another layout ({_layout_of(aside) or 'unknown'}),"
        f" which this one ({layout}) cannot read"
    )


def has_slots(slot_root: Path) -> bool:
    """Whether the ranks of this layout left anything."""
    return _newest_step(slot_root) is not None


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
