"""A throw-away process that loads torch, and what a script imports, and says how that went.

    python -P -m stepfast.train.examine [SCRIPT]

Owns: one JSON object on standard output. Does not own: its time limit and what is made of it (the
door's). Invariants: no module of the user's own is imported; no device is touched.
"""

from __future__ import annotations

import os
import sys

import msgspec

from stepfast.train.preload import script_imports, try_import


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `failure`: why torch does not load; `failed`: module and reason."""

    torch_version: str | None = None
    torch_obstacle: str | None = None
    failure: str | None = None
    imports: tuple[str, ...] = ()
    failed: dict[str, str] = {}


def examine(script: str | None) -> Examined:
    """Load it all, here and now."""
    failure = try_import("torch")
    version = obstacle = None
    if not failure:
        import torch

        from stepfast.train.torch_private import version_obstacle

        version, obstacle = str(torch.__version__), version_obstacle()
    names = tuple(script_imports(script)) if script else ()
    reasons = {name: try_import(name) for name in names}
    return Examined(
        torch_version=version,
        torch_obstacle=obstacle,
        failure=failure or None,
        imports=names,
        failed={name: reason for name, reason in reasons.items() if reason},
    )


def _main() -> None:
    # What modules say while they are imported must not stand in the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    found = examine(sys.argv[1] if len(sys.argv) > 1 else None)
    with open(answer, "wb") as out:
        out.write(msgspec.json.encode(found))


if __name__ == "__main__":
    _main()
