"""What stands in for the image: this machine's Python environment, and directories given to it.

Owns: the container's PATH, where stepfast and the user's files lie inside. Does not own: volumes.
Invariant: whatever a pod mounts over a directory of this machine, stepfast is found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec

from stepfast.errors import ConfigError
from stepfast.k8s.local.box import Box
from stepfast.k8s.local.root import Bind

_INSIDE = "/opt/stepfast-local"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LAUNCHER = """#!{python}
import sys
from stepfast.cli.main import main
sys.exit(main())
"""


class Image:
    """The files that every container of a run has."""

    def __init__(
        self,
        directory: Path,
        given: Mapping[str, Path],
        *,
        hidden: AbstractSet[str],
        is_plain: bool,
    ) -> None:
        """`given`: this machine's directories by their places inside; `hidden`: places that pods
        mount something over; `is_plain`: there are no mounts, and nothing is inside of anything.
        """
        self._is_plain = is_plain
        self._given = dict(given)
        self._package = Path(__file__).parents[2]  # its top, without importing it
        self._python = Path(sys.executable)
        self._moved = _moved_prefix(frozenset() if is_plain else hidden)
        if self._moved:
            self._python = Path(_INSIDE, "python", self._python.relative_to(self._moved))
        self._binaries = directory / "bin"
        self._binaries.mkdir()
        launcher = self._binaries / "stepfast"
        launcher.write_text(_LAUNCHER.format(python=self._python))
        launcher.chmod(0o755)

    @property
    def binds(self) -> list[Bind]:
        """What is mounted in every container."""
        own = [
            (str(self._package), f"{_INSIDE}/lib/stepfast", True),
            (str(self._binaries), f"{_INSIDE}/bin", True),
        ]
        if self._moved:
            own.append((self._moved, f"{_INSIDE}/python", True))
        return [*own, *((str(path), place, True) for place, path in sorted(self._given.items()))]

    def environment(self) -> dict[str, str]:
        """What an image would say of its own."""
        library = str(self._package.parent) if self._is_plain else f"{_INSIDE}/lib"
        binaries = str(self._binaries) if self._is_plain else f"{_INSIDE}/bin"
        path = [binaries, str(self._python.parent), _PATH]
        return {"PATH": ":".join(path), "PYTHONPATH": library, "LANG": "C.UTF-8", "HOME": "/"}

    def plain_box(self, box: Box, binds: list[Bind], names: Mapping[str, str]) -> Box:
        """The same without namespaces: places and names are put into the command instead."""
        given = [(str(path), place, True) for place, path in self._given.items()]
        places = {place: source for source, place, _ in [*given, *binds]}
        words = [_translated(word, places, names) for word in box.command]
        variables = {
            n: v if n in ("PATH", "PYTHONPATH") else _translated(v, places, names)
            for n, v in box.environment.items()
        }
        return msgspec.structs.replace(box, command=words, environment=variables)


def _moved_prefix(hidden: AbstractSet[str]) -> str | None:
    """Python's prefix if it has to lie elsewhere inside; it finds its libraries from any place.

    A virtual environment finds its base by the base's own place, which cannot be another.
    """
    if sys.base_prefix != sys.prefix and any(_is_below(sys.base_prefix, p) for p in hidden):
        raise ConfigError(
            f"Python lies in {sys.base_prefix}, which a volume of the pods would hide: run this"
            " with a Python outside of " + ", ".join(sorted(hidden))
        )
    return sys.prefix if any(_is_below(sys.prefix, place) for place in hidden) else None


def _translated(text: str, places: Mapping[str, str], names: Mapping[str, str]) -> str:
    option, equals, value = text.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_translated(value, places, names)}"
    for place in sorted(places, key=len, reverse=True):
        if _is_below(text, place):
            return places[place] + text[len(place) :]
    host, colon, port = text.partition(":")
    address = names.get(host, "")
    return f"{address}{colon}{port}" if address else text


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")
