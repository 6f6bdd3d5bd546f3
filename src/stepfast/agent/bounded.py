"""A command that is run for a bounded time, with bounded output, in the running event loop.

Owns: its processes, and that none of its session outlives the wait. Invariants: nobody waits for a
process that does not die (one that is stuck in a driver cannot); no pipe is waited for whose writer
outlived the command.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

_OUTPUT_BYTES_MAX = 1 << 18  # more is read and dropped
_READ_BYTES = 1 << 16
_REST_LIMIT_S = 0.5  # for what is left in a pipe
_DEATH_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it ended. `exit_code` None: it did not in time; below 0: by a signal."""

    exit_code: int | None
    output: bytes
    errors: bytes


async def run_bounded(command: Sequence[str], limit_s: float) -> Ended:
    """Run it to its end, or kill it at the limit. Raises OSError where it cannot be started."""
    # Not by asyncio's own processes: their end is told when their pipes have ended as well.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None, "pipes were asked for"
    output, errors = _Pipe(process.stdout), _Pipe(process.stderr)
    loop = asyncio.get_running_loop()
    ended, pidfd = asyncio.Event(), os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    is_late = False
    try:
        is_late = not await _within(ended, limit_s)
        if not is_late:
            await _within(output.ended, _REST_LIMIT_S)
            await _within(errors.ended, _REST_LIMIT_S)
    finally:
        _kill_session(process.pid)
        output.close()
        errors.close()
        await _within(ended, _DEATH_LIMIT_S)
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.poll()
    exit_code = None if is_late else process.returncode
    return Ended(exit_code=exit_code, output=bytes(output.data), errors=bytes(errors.data))


async def _within(event: asyncio.Event, limit_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), limit_s)
    except TimeoutError:
        return False
    return True


class _Pipe:
    """What comes out of one, read as it comes; the beginning is kept."""

    def __init__(self, file: IO[bytes]) -> None:
        self.data = bytearray()
        self.ended = asyncio.Event()
        self._file = file
        os.set_blocking(file.fileno(), False)
        asyncio.get_running_loop().add_reader(file.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._file.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close()
        self.data += data[: _OUTPUT_BYTES_MAX - len(self.data)]

    def close(self) -> None:
        """Read no more."""
        if not self.ended.is_set():
            asyncio.get_running_loop().remove_reader(self._file.fileno())
            self._file.close()
            self.ended.set()


def _kill_session(leader: int) -> None:
    """The session's first group, where anything is left of it. While that is so, nobody else can
    have its number; where nothing is, it was given back only now.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nothing is left of it
