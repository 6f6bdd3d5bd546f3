"""`python -m stepfast.k8s.local.box`: one container, as the runner's child.

Reads its `Box` from standard input. Owns: namespaces, root, the first process, its exit code. Does
not own: when it starts or ends (`cluster`).
Invariants: the container ends when this process ends, and this process when the runner does; its
exit code is the container's, 128 + N for a signal.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from stepfast.k8s.local import kernel
from stepfast.k8s.local.root import Bind, build_root

EXIT_NOT_STARTED = 128
_SIGNALLED = 128


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """One container to start. `root`: empty directory, or none where there are no namespaces."""

    command: list[str]
    environment: dict[str, str]
    working_directory: str
    hostname: str
    report_fd: int  # the pid of the first process is written there
    runner_pid: int
    root: str | None = None
    binds: list[Bind] = []


def main() -> int:
    """Start the container, wait for its end."""
    box = msgspec.json.decode(sys.stdin.buffer.read(), type=Box)
    kernel.die_with_parent(box.runner_pid)
    # The runner's signals go to the container's first process; this one ends with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if box.root is not None:
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_NAMES | kernel.NEW_IPC | kernel.NEW_PIDS)
        kernel.make_private()
        build_root(Path(box.root), box.binds)
    else:
        kernel.adopt_orphans()
    read_end, write_end = os.pipe()  # unreadable once this process has ended
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _first_process(box, write_end)
    os.close(write_end)
    os.write(box.report_fd, b"%d\n" % pid)
    os.close(box.report_fd)
    code = _wait(pid)
    if box.root is None:
        _end_orphans()
    return code


def _first_process(box: Box, write_end: int) -> None:
    """Never returns."""
    try:
        os.setsid()
        # In a namespace of its own it cannot see its parent, so it asks the pipe whether there is
        # one.
        kernel.die_with_parent(os.getppid())
        os.write(write_end, b".")
        if box.root is not None:
            kernel.mount_processes(Path(box.root) / "proc")
            os.chroot(box.root)
            socket.sethostname(box.hostname)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(box.working_directory)
        os.execvpe(box.command[0], box.command, box.environment)
    except OSError as error:
        sys.stderr.write(f"cannot start {box.command[0]}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(EXIT_NOT_STARTED)


def _wait(pid: int) -> int:
    """The exit code of this child; other children are orphans, and reaped by the way."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else _SIGNALLED - code


def _end_orphans() -> None:
    """Without a namespace nobody ends what the first process left."""
    from stepfast.runtime.descendants import ProcessTable, try_signal

    while True:
        left = [e for e in ProcessTable.read().descendants(os.getpid()) if not e.ended]
        if not left:
            return
        for entry in left:
            try_signal(entry.id, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main())
