"""The kernel's calls that Python has no name for: namespaces, mounts, the parent's death.

Owns: those calls on Linux. Does not own: what is mounted where (`root`, `volumes`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_PIDS = 0x20000, 0x4000000, 0x8000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    0x1,
    0x2,
    0x4,
    0x20,
    0x1000,
    0x4000,
    0x40000,
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_MOUNT_SETATTR = 442  # of all architectures
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = -100, 0x8000, 0x1


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """New namespaces for this process (those of processes: for its children)."""
    _check(_libc().unshare(flags), "unshare")


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL when the parent ends; at once if it has already."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children."""
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def make_private() -> None:
    """What is mounted from now on is seen in this mount namespace alone."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")


def mount_memory(place: Path, *, size_bytes: int | None, mode: int = 0o755) -> None:
    """A tmpfs of this size; without one, half of the machine's memory."""
    size = "" if size_bytes is None else f",size={size_bytes}"
    _mount("tmpfs", str(place), "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode:o}{size}")


def mount_processes(place: Path) -> None:
    """/proc of this process's namespace."""
    _mount("proc", str(place), "proc", _MS_NOSUID | _MS_NODEV, "")


def bind(source: Path, place: Path, *, is_read_only: bool = False) -> None:
    """The same files at a second place, with everything mounted below."""
    _mount(str(source), str(place), "", _MS_BIND | _MS_REC, "")
    if is_read_only:
        make_read_only(place)


def make_read_only(place: Path) -> None:
    """Nothing can be written there, nor to what is mounted below; as one call where the kernel has
    it, else for the one mount.
    """
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY, 0, 0, 0)
    result = _libc().syscall(
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        str(place).encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )
    if result != 0:
        _mount("none", str(place), "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY, "")


def unmount(place: Path) -> None:
    """Take it off, as soon as nobody uses it."""
    _check(_libc().umount2(str(place).encode(), 2), f"umount {place}")


def why_no_namespaces() -> str | None:
    """Tried in a child that ends at once; None: they can be had."""
    if sys.platform != "linux":
        return f"{sys.platform} has none"
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            unshare(NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS)
            make_private()
        except OSError as error:
            code = error.errno or 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if code == 0 else os.strerror(code)


def _mount(source: str, place: str, kind: str, flags: int, data: str) -> None:
    result = _libc().mount(
        source.encode(),
        place.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount {place}")
