"""The console's view of the ranks' logs: whole lines, prefixed with node and rank, as they come.

Owns: reading what ranks append to their files. The files are written by the ranks themselves, so
nothing is lost when an agent dies; this only shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_READ_BYTES_MAX = 1 << 20  # in one look at one file; the rest comes with the next
_LINE_BYTES_MAX = 64 * 1024  # a longer line is shown in parts
_TAIL_BYTES = 4096


class LogTail:
    """Shows what was appended to a set of files since the last look."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` prints one line."""
        self._show = show
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, bytes] = {}
        self._prefixes: dict[Path, str] = {}

    def follow(self, path: Path, prefix: str) -> None:
        """Show this file from its present end on, in the place of the one with this prefix."""
        if path not in self._offsets:
            self.look()
            for old in [p for p, known in self._prefixes.items() if known == prefix]:
                self._let_go(old)
            self._offsets[path] = path.stat().st_size if path.exists() else 0
            self._prefixes[path] = prefix

    def _let_go(self, path: Path) -> None:
        if rest := self._rests.pop(path, b""):
            self._line(path, rest)
        del self._offsets[path], self._prefixes[path]

    def look(self) -> None:
        """Show the new whole lines of every file."""
        for path in list(self._offsets):
            self._read(path)

    def finish(self) -> None:
        """Show everything that is left, unfinished lines too."""
        self.look()
        for path, rest in self._rests.items():
            if rest:
                self._line(path, rest)
        self._rests.clear()

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                data = file.read(_READ_BYTES_MAX)
        except OSError:
            return  # not written yet
        if not data:
            return
        self._offsets[path] += len(data)
        *lines, rest = (self._rests.get(path, b"") + data).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        self._rests[path] = rest
        for line in lines:
            self._line(path, line)

    def _line(self, path: Path, line: bytes) -> None:
        self._show(f"{self._prefixes[path]} {line.decode(errors='replace')}")


def log_tail(path: Path) -> str:
    """The last lines of a log: part of the record of a rank's end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
