"""Who is whose child: one walk over /proc, and killing only what was meant.

Owns: reading /proc, and the kill that cannot hit a stranger. Does not own: whom to kill
(`agent.processes`, `train.zygote`). A process is its pid *and* its start time: a pid alone may be
somebody else by now.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Collection, Iterable

from stepfast.runtime.spawning import TAG_VARIABLE

_TAG_MARKER = f"{TAG_VARIABLE}=".encode()


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process for all time: pids are used again, a pid with its start time is not."""

    pid: int
    start_time_ticks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEntry:
    """One line of a walk. `state` is the kernel's letter: R, S, D (uninterruptible), T, Z (ended,
    not reaped)."""

    id: ProcessId
    parent_pid: int
    session: int
    state: str

    @property
    def ended(self) -> bool:
        """True for a zombie: it does nothing any more and only waits for its parent."""
        return self.state in "ZX"


class ProcessTable:
    """The processes at one instant, by pid. A walk is not atomic: what is forked meanwhile is in
    the next one."""

    def __init__(self, entries: Iterable[ProcessEntry]) -> None:
        self.entries = {entry.id.pid: entry for entry in entries}
        self._children: dict[int, list[int]] = {}
        for entry in self.entries.values():
            self._children.setdefault(entry.parent_pid, []).append(entry.id.pid)

    @classmethod
    def read(cls) -> ProcessTable:
        """Walk /proc (1 to 2 ms for 100 processes)."""
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        return cls(entry for pid in pids if (entry := read_process(pid)) is not None)

    def same(self, process: ProcessId) -> ProcessEntry | None:
        """The entry of exactly this process."""
        entry = self.entries.get(process.pid)
        return entry if entry is not None and entry.id == process else None

    def descendants(self, pid: int) -> list[ProcessEntry]:
        """All processes below `pid`, parents before their children, without `pid` itself."""
        found: list[ProcessEntry] = []
        seen = {pid}
        waiting = [pid]
        while waiting:
            for child in self._children.get(waiting.pop(), ()):
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
                    found.append(self.entries[child])
        return found

    def children(self, pid: int) -> list[ProcessEntry]:
        """The direct children of `pid`, zombies included."""
        return [self.entries[child] for child in self._children.get(pid, ())]


def read_process(pid: int) -> ProcessEntry | None:
    """The entry of `pid`, or None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except OSError:
        return None
    # The name in parentheses may hold anything, blanks and parentheses too; the fields start behind
    # the last one.
    fields = content.rpartition(b")")[2].split()
    return ProcessEntry(
        id=ProcessId(pid, int(fields[19])),
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        state=fields[0].decode(),
    )


def read_tag(pid: int) -> str:
    """The tag in the process's environment; empty where there is none, or where it may not be
    read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return ""
    for variable in variables:
        if variable.startswith(_TAG_MARKER):
            return variable[len(_TAG_MARKER) :].decode(errors="replace")
    return ""


def try_signal(process: ProcessId, signal_number: int) -> bool:
    """Send the signal if `process` still is the same process; False where it is gone or may not be
    signalled.

    The pidfd is opened first and compared afterwards, so the pid cannot change hands between the
    look and the kill.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        entry = read_process(process.pid)
        if entry is None or entry.id != process:
            return False
        signal.pidfd_send_signal(descriptor, signal_number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def belonging_to(
    table: ProcessTable,
    ranks: Collection[ProcessId],
    tag_prefixes: tuple[str, ...],
    below_pid: int | None = None,
) -> list[ProcessEntry]:
    """The living processes of `ranks`: themselves, their trees, their sessions, and whatever
    carries their tags.

    `below_pid` restricts sessions and tags to the descendants of one process: a subreaper's orphans
    stay below it.
    """
    candidates = list(table.entries.values()) if below_pid is None else table.descendants(below_pid)
    found: dict[int, ProcessEntry] = {}
    for rank in ranks:
        if (entry := table.same(rank)) is not None:
            found[rank.pid] = entry
            found.update((below.id.pid, below) for below in table.descendants(rank.pid))
    by_pid = {rank.pid: rank for rank in ranks}
    for entry in candidates:
        leader = by_pid.get(entry.session)
        in_session = leader is not None and _led_by(table, entry, leader)
        if in_session or read_tag(entry.id.pid).startswith(tag_prefixes):
            found[entry.id.pid] = entry
    return sorted(
        (entry for entry in found.values() if not entry.ended), key=lambda entry: entry.id
    )


def _led_by(table: ProcessTable, entry: ProcessEntry, leader: ProcessId) -> bool:
    """Whether the session is the rank's: not one of a later process that got the same pid."""
    holder = table.entries.get(leader.pid)
    same_leader = holder is None or holder.id == leader
    return same_leader and entry.id.start_time_ticks >= leader.start_time_ticks
