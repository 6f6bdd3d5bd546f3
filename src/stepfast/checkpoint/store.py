"""Where checkpoints are kept: named objects, each whole or absent.

Owns: what every kind of store promises; which kind a URL means. Does not own: the kinds
(`directory`, `objects`), what the objects are (`manifest`, `catalog`).

Invariants, which each kind keeps and no user of one has to help with:
- An object is whole and durable under its name, or it is not there: to every reader, at any time,
  through a crash at any instant.
- What fails raises OperatingError (StateError where an object is not what is asked of it), in one
  line that names the object and holds no credentials.
- Below a name means below it as a directory: `a/b` is below `a`, and `ab` is not.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit

from stepfast.errors import ConfigError
from stepfast.runtime.ports import Buffer

_NAME = re.compile(r"[A-Za-z0-9_+=@,-][A-Za-z0-9._+=@,-]*")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
_OBJECT_SCHEMES = ("s3", "gs", "az")


class ObjectWriter(Protocol):
    """An object in the making. Leaving it without an error makes it whole and durable."""

    def __enter__(self) -> Self: ...

    def write(self, data: Buffer) -> None:
        """The next bytes; the buffer may be used again as soon as this returns."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class CheckpointStore(Protocol):
    """Named objects. Every method may be called from any thread."""

    @property
    def url(self) -> str:
        """What `open_store` takes to reach it, without credentials."""
        ...

    @property
    def read_threads(self) -> int:
        """How many reads of a block each are best under way at once."""
        ...

    def writer(self, name: str, size_bytes: int = 0) -> ObjectWriter:
        """Write the object `name`, in the place of what has the name. With an error nothing of it
        is visible. `size_bytes`, where it is known: lack of space is found at once.
        """
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Make the object at once and durably; False: there was one of that name already."""
        ...

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Its bytes from `start`, all there are or `size_bytes`; StateError if fewer, or absent."""
        ...

    def read_into(self, name: str, start: int, *buffers: memoryview) -> None:
        """Fill the buffers, one behind the other, from `start`; StateError where the object has
        fewer bytes, or is not.
        """
        ...

    def read_once(self, name: str, start: int, *buffers: memoryview) -> None:
        """As `read_into`, of bytes that nobody else on this machine reads soon."""
        ...

    def size_bytes(self, name: str) -> int | None:
        """The object's size; None: there is none."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects below `prefix`, sorted."""
        ...

    def sizes_bytes(self, prefix: str) -> dict[str, int]:
        """The same, each with its size: in a service by the listing alone."""
        ...

    def directories(self) -> list[str]:
        """The first parts of all names that have more than one, sorted; on a disk also those of
        directories that nothing is in.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove the object, durably; fine where there is none."""
        ...

    def delete_below(self, prefix: str) -> None:
        """Remove all below `prefix`, and what writers that are gone left there. No one may write
        there meanwhile.
        """
        ...

    def delete_remains(self, prefix: str) -> None:
        """Remove only what writers that are gone left below `prefix`; objects stay."""
        ...


def open_store(url: str | Path) -> CheckpointStore:
    """The store at a path, `file://`, `s3://`, `gs://` or `az://`; nothing is touched yet.

    Raises ConfigError for other URLs, and where the extra that a kind needs is not installed.
    """
    text = str(url)
    scheme = match[1].lower() if (match := _SCHEME.match(text)) else ""
    if scheme in _OBJECT_SCHEMES:
        try:
            from stepfast.checkpoint.objects import ObjectStore
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{scheme}:// needs the package obstore: pip install 'stepfast[s3]'"
            ) from error
        return ObjectStore(text)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{text}: a file URL has three slashes: file:///path")
        text = unquote(parts.path)
    elif scheme:
        raise ConfigError(
            f"{scheme}:// is no store of checkpoints; give a path, s3://, gs:// or az://"
        )
    check_slashes(text)
    if not text:
        raise ConfigError("a store of checkpoints needs a path or a URL, not an empty text")
    from stepfast.checkpoint.directory import DirectoryStore

    return DirectoryStore(Path(text))


def check_slashes(text: str) -> None:
    """ConfigError for a URL that lacks a slash, and so would be taken for a path."""
    if match := _ONE_SLASH.match(text):
        slashes = ":///" if match[1].lower() == "file" else "://"
        meant = f"{match[1]}{slashes}{text[match.end() :]}"
        raise ConfigError(
            f"{text} has one slash behind its scheme: {meant}; should a directory be called that,"
            f" ./{text}"
        )


def check_name(name: str) -> str:
    """`name`, which must be one that every kind of store can have: an assertion of the caller's."""
    assert all(map(_NAME.fullmatch, name.split("/"))), f"{name!r} is no name of an object"
    return name
