"""Which distributions an image has: `write FILE PINS` lists them as pip's constraints, and behind
them the pins of what it does not have; `check FILE` ends with 1 if one that it had is gone, or
another version now.

Owns: both looks. Does not own: installing. Invariants: the standard library alone, for it runs in
images of others; what was installed from a local file or a repository is a version like any other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

NOT_KEPT = frozenset({"stepfast"})  # an older one may be there, and is what gets replaced
_OURS = "  # not there before"
# What pip takes for a version; the system's own distributions may have others: 2.22ubuntu1.
_VERSION = re.compile(
    r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([-_.][a-z0-9]+)*)?"
)


def installed(path: list[str] | None = None) -> dict[str, str]:
    """The version of every distribution on `path`, by its normal name; None: sys.path.

    Of two copies the first on the path counts, as it does for imports.
    """
    found: dict[str, str] = {}
    for each in distributions() if path is None else distributions(path=path):
        name = each.metadata["Name"]
        if name:
            found.setdefault(normal(name), each.version)
    return found


def normal(name: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(versions: Mapping[str, str], pins: str = "") -> str:
    """One line for each distribution, sorted: `torch==2.9.1+cu130`. Then those of `pins`, lines of
    the same kind, whose names are free: a version that was tested is better than the newest.

    A version that pip could not read stands in a comment, for `changes` alone.
    """
    lines = []
    for name, version in sorted(versions.items()):
        if name not in NOT_KEPT:
            note = "" if _VERSION.fullmatch(version) else "# "
            lines.append(f"{note}{name}=={version}\n")
    for pin in pins.splitlines():
        name, is_pin, version = pin.partition("==")
        if is_pin and not pin.startswith("#") and normal(name) not in versions:
            lines.append(f"{normal(name)}=={version}{_OURS}\n")
    return "".join(lines)


def changes(before: str, versions: Mapping[str, str]) -> list[str]:
    """What is another version than the constraints say, or gone; one line for each."""
    found = []
    for line in before.splitlines():
        if line.endswith(_OURS):
            continue
        name, _, version = line.removeprefix("# ").partition("==")
        if versions.get(name) != version:
            found.append(f"{name} was {version} and is {versions.get(name, 'gone')}")
    return found


def main(arguments: list[str]) -> int:
    """`write FILE PINS` or `check FILE`; the exit code."""
    match arguments:
        case ["write", file, pins]:
            kept = constraints(installed(), Path(pins).read_text(encoding="utf-8"))
            Path(file).write_text(kept, encoding="utf-8")
            return 0
        case ["check", file]:
            changed = changes(Path(file).read_text(encoding="utf-8"), installed())
            sys.stderr.write("".join(f"{line}\n" for line in changed))
            return 1 if changed else 0
    sys.stderr.write("usage: kept_packages.py write FILE PINS | check FILE\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
