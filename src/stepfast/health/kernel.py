"""What the kernel must be able to do: pidfds, memfds, subreapers, `/proc`; and the time.

Owns: trying each once. Does not own: what stepfast uses them for.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Mapping

from stepfast.health.verdicts import Finding, healthy, unhealthy

_PR_GET_CHILD_SUBREAPER = 37
_PLAUSIBLE_S = 1_735_689_600.0  # 2025-01-01: no clock that is set shows less
_CHANGES = {
    "pidfd": "use Linux 5.4 or newer, and a seccomp profile that allows pidfd_open",
    "memfd": "use a seccomp profile that allows memfd_create",
    "subreaper": "use a seccomp profile that allows prctl(PR_SET_CHILD_SUBREAPER)",
    "/proc": "mount /proc, without hidepid for this user",
}


def facilities(tries: Mapping[str, Callable[[], object]]) -> list[Finding]:
    """One finding for each: whether calling it raises OSError or AttributeError."""
    return [_tried(name, attempt) for name, attempt in tries.items()]


def _tried(name: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except (OSError, AttributeError) as error:
        change = _CHANGES.get(name, "use Linux 5.4 or newer")
        return unhealthy(name, f"does not work here: {error}", change)
    return healthy(name, "works")


def real_tries() -> dict[str, Callable[[], object]]:
    """The calls that stepfast makes."""
    return {
        "pidfd": _try_pidfd,
        "memfd": lambda: os.close(os.memfd_create("stepfast-doctor", os.MFD_CLOEXEC)),
        "subreaper": _try_subreaper,
        "/proc": lambda: os.listdir("/proc/self/fd"),
    }


def _try_pidfd() -> None:
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0)  # 0 only asks
    finally:
        os.close(descriptor)


def _try_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    answer = ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def confinement(status: str, ptrace_scope: str | None) -> Finding:
    """Seccomp and ptrace, so that nobody looks there in vain. `status`: /proc/self/status."""
    modes = {"0": "no seccomp", "1": "seccomp strict", "2": "a seccomp filter"}
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    seccomp = modes.get(lines.get("Seccomp", "").strip(), "seccomp not known")
    scope = "not known" if ptrace_scope is None else ptrace_scope.strip()
    evidence = f"{seccomp}, ptrace scope {scope}: no matter, stepfast traces nobody"
    return healthy("confinement", evidence)


def wall_clock(now_s: float, text: str) -> Finding:
    """Whether the clock is set at all: object stores refuse requests of another time."""
    if now_s >= _PLAUSIBLE_S:
        return healthy("time", text)
    return unhealthy("time", f"the clock shows {text}", "set the clock: chrony, systemd-timesyncd")
