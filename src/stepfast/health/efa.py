"""EFA adapters, by the kernel's files: how many, and what their own counters say.

Owns: reading and judging them. Does not own: what else of InfiniBand there is; a port's state is
not looked at, for EFA's driver always calls it active.

Never run on a machine with EFA: tested with trees of files that look like its.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stepfast.core.quantities import counted
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

_VENDOR = "0x1d0f"  # Amazon
_DEVICES = tuple(f"0xefa{number}" for number in range(4))
_DEAD = "no_completion_cmds"  # commands to the adapter that it never answered
_WORTH_SAYING = ("cmds_err", "create_qp_err", "reg_mr_err", "create_cq_err", "create_ah_err")
_REPLACE = "replace the node"
_NAMED_MAX = 4


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter; `counters` None: they could not be read, for this reason."""

    name: str
    counters: dict[str, int] | None
    reason: str = ""


def read(sys: Path) -> list[Adapter]:
    """The adapters below /sys. Raises OSError where they cannot be listed."""
    devices = sys / "class" / "infiniband"
    if not devices.is_dir():
        return []
    return [_adapter(path) for path in sorted(devices.iterdir()) if _is_efa(path)]


def _is_efa(device: Path) -> bool:
    vendor, kind = (_word(device / "device" / name) for name in ("vendor", "device"))
    return vendor == _VENDOR and (kind in _DEVICES or not kind)


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip().lower()
    except OSError:
        return ""


def _adapter(device: Path) -> Adapter:
    try:
        files = sorted((device / "hw_counters").iterdir())
        words = {file.name: file.read_text(errors="replace").strip() for file in files}
    except OSError as error:
        reason = f"{error.filename or device}: {error.strerror}"
        return Adapter(name=device.name, counters=None, reason=reason)
    numbers = {name: int(word) for name, word in words.items() if word.isdigit()}
    return Adapter(name=device.name, counters=numbers)


def judged(adapters: list[Adapter], expected: int) -> list[Finding]:
    """Nothing where there are none and none are expected."""
    if not adapters and not expected:
        return []
    return [_count(len(adapters), expected), *_counters(adapters)]


def _count(found: int, expected: int) -> Finding:
    check, evidence = "efa count", counted(found, "adapter")
    if found >= expected:
        return healthy(check, evidence)
    change = f"ask for vpc.amazonaws.com/efa: {expected} in the pod, or replace the node"
    return unhealthy(check, f"{evidence}, {expected} expected", change)


def _counters(adapters: list[Adapter]) -> list[Finding]:
    check = "efa counters"
    if not adapters:
        return []
    dead = [a for a in adapters if a.counters is not None and a.counters.get(_DEAD, 0) > 0]
    if dead:
        names = _named(dead)
        return [unhealthy(check, f"{names}: commands were never answered ({_DEAD})", _REPLACE)]
    unread = [a for a in adapters if a.counters is None or _DEAD not in a.counters]
    if unread:
        why = unread[0].reason or f"there is no {_DEAD}"
        return [unknown(check, f"{_named(unread)} cannot be looked at: {why}")]
    sums = {n: sum((a.counters or {}).get(n, 0) for a in adapters) for n in _WORTH_SAYING}
    said = ", ".join(f"{name} {number}" for name, number in sums.items() if number)
    return [healthy(check, f"every command was answered{'; ' if said else ''}{said}")]


def _named(adapters: list[Adapter]) -> str:
    names = ", ".join(adapter.name for adapter in adapters[:_NAMED_MAX])
    more = len(adapters) - _NAMED_MAX
    return f"{names} and {more} more" if more > 0 else names
