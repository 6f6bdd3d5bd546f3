"""A process that saves checkpoints until it is killed: `python -m process.saving BASE`.

It says a line before it begins, and the step of each checkpoint once it is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepfast.checkpoint.catalog import Retention, committed, prune, sweep_unfinished
from stepfast.checkpoint.directory import DirectoryStore
from unit.stored_checkpoints import Slots, snap


def main(base: Path) -> None:
    """Save, prune, sweep, and so on."""
    store, slots = DirectoryStore(base / "store"), Slots(base / "slots")
    there = committed(store)
    step = there[0].step if there else 0
    print("begins", flush=True)
    while True:
        step += 1
        slots.save(store, snap(step))
        print(step, flush=True)
        prune(store, Retention())
        sweep_unfinished(store)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
