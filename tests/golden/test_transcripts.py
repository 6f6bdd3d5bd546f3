"""What each machine answers to what it is told, as text, compared line by line.

The transcripts are in `transcripts/`: one file for each machine and story. A changed answer shows
as a diff. Where the change is intended, write them again and read the diff of the repository:

    REGENERATE_TRANSCRIPTS=1 .venv/bin/pytest tests/golden
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden.stories import job_stories, node_stories, rank_stories
from unit.core.rigs import Rig, as_text

TRANSCRIPTS = Path(__file__).parent / "transcripts"
STORIES: dict[str, Callable[[], Rig]] = {
    **{f"job-{name}": tell for name, tell in job_stories().items()},
    **{f"node-{name}": tell for name, tell in node_stories().items()},
    **{f"rank-{name}": tell for name, tell in rank_stories().items()},
}


def transcript(rig: Rig) -> str:
    """One block for each input: when, what, and the outputs as the driver performs them."""
    began = rig.log[0][0]
    lines = []
    for at, given, outputs in rig.log:
        lines.append(f"{at - began:+.3f} {told(given)}")
        lines += [f"    {as_text(output)}" for output in outputs]
    return "\n".join(lines) + "\n"


def told(given: Any) -> str:
    """An input; of those that only carry a message, the message."""
    message = getattr(given, "message", None)
    if message is None:
        return as_text(given)
    who = {"FromNode": "node", "FromLocalRank": "rank"}.get(type(given).__name__)
    sender = f" {who} {getattr(given, who)}" if who else ""
    return f"{type(given).__name__}{sender} {as_text(message)}"


@pytest.mark.parametrize("name", sorted(STORIES))
def test_the_machine_answers_as_it_did(name: str):
    path = TRANSCRIPTS / f"{name}.txt"
    found = transcript(STORIES[name]())
    if os.environ.get("REGENERATE_TRANSCRIPTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    changes = difflib.unified_diff(
        known.splitlines(), found.splitlines(), f"{name} (recorded)", f"{name} (now)", lineterm=""
    )
    assert found == known, "\n".join(["", *changes])


def test_every_transcript_has_its_story():
    recorded = {path.stem for path in TRANSCRIPTS.glob("*.txt")}
    assert recorded == set(STORIES)
