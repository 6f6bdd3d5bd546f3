"""Which Python, torch and stepfast are here, and whether they suit each other.

Owns: judging versions. Does not own: reading them; torch itself is examined in another process.
"""

from __future__ import annotations

from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

PYTHON_OLDEST = (3, 11)
TORCH_OLDEST = (2, 8)
_INSTALL_TORCH = "install torch 2.8 or newer: pip install 'stepfast[train]'"


def python_version(version: tuple[int, ...]) -> Finding:
    """The interpreter that runs this."""
    text = ".".join(map(str, version[:3]))
    if version[:2] >= PYTHON_OLDEST:
        return healthy("python", text)
    return unhealthy("python", text, "use Python 3.11 or newer")


def stepfast_version(imported: str, installed: str | None) -> Finding:
    """The imported package against the installed one."""
    if installed is None:
        return unknown("stepfast", f"{imported}, not installed: found by its path")
    if installed != imported:
        evidence = f"{imported} is imported, {installed} is installed"
        return unhealthy("stepfast", evidence, "install again, or take the other out of PYTHONPATH")
    return healthy("stepfast", imported)


def torch_version(installed: str | None) -> Finding:
    """As the installed package says, without loading it."""
    if installed is None:
        return unhealthy("torch", "not installed", _INSTALL_TORCH)
    numbers = installed.split("+")[0].split(".")[:2]
    if not all(number.isdigit() for number in numbers):
        return unknown("torch", f"{installed}: a version of its own")
    if tuple(map(int, numbers)) < TORCH_OLDEST:
        return unhealthy("torch", installed, _INSTALL_TORCH)
    return healthy("torch", installed)


def torch_loads(version: str | None, obstacle: str | None, failure: str | None) -> Finding:
    """What a process that loaded torch says: its version, why models cannot be kept; or why it
    could not.
    """
    if version is None:
        evidence = f"torch does not load: {failure or 'no reason known'}"
        return unhealthy("torch loads", evidence, "run `python -c 'import torch'`, and repair that")
    if obstacle is not None:
        change = "jobs run right and recover slower; use a verified version to keep models"
        return unknown("torch loads", obstacle, change)
    return healthy("torch loads", f"{version}, its private names are verified: models are kept")
