"""A container's root: this machine's files, read-only, with a pod's volumes in their places.

Owns: making every place of a mount exist without writing to the machine's own disk. Does not own:
what a volume is (`volumes`). Used inside a mount namespace that goes with the container.
Invariants: only what is mounted writable can be written; the machine's directories keep their
content, whatever is mounted over their copies.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from stepfast.k8s.local import kernel

_ROOT_BYTES_MAX = 16 * 1024 * 1024  # directories and names alone

Bind = tuple[str, str, bool]  # a file or directory of the machine, its place inside, read-only


def build_root(root: Path, binds: list[Bind]) -> None:
    """Mount it all at `root`, an empty directory; the parents' places before those inside them."""
    kernel.mount_memory(root, size_bytes=_ROOT_BYTES_MAX)
    targets = sorted(PurePosixPath(place).parts[1:] for _, place, _ in binds)
    _lay(Path("/"), root, [*targets, ("proc",)])
    kernel.make_read_only(root)
    for source, place, is_read_only in sorted(binds, key=lambda b: PurePosixPath(b[1]).parts):
        inside = root / place.lstrip("/")
        if not inside.exists():  # inside of another volume, which is writable
            _make_place(inside, is_directory=Path(source).is_dir())
        kernel.bind(Path(source), inside, is_read_only=is_read_only)


def _lay(host: Path, inside: Path, targets: list[tuple[str, ...]]) -> None:
    """The entries of a directory, with a place for every target below it."""
    names = set(os.listdir(host)) if host.is_dir() else set()
    for name in sorted(names | {target[0] for target in targets}):
        below = [target[1:] for target in targets if target[0] == name]
        _lay_one(host / name, inside / name, below)


def _lay_one(host: Path, inside: Path, below: list[tuple[str, ...]]) -> None:
    is_hidden = () in below  # something is mounted over all of it
    missing = [target for target in below if not host.joinpath(*target).exists()]
    if is_hidden:
        _make_place(inside, is_directory=host.is_dir() or not host.exists())
    elif host.is_symlink() and not missing:
        inside.symlink_to(os.readlink(host))
    elif missing:
        inside.mkdir()
        _lay(host, inside, below)
    elif host.is_dir() or host.is_file():
        _make_place(inside, is_directory=host.is_dir())
        kernel.bind(host, inside)


def _make_place(place: Path, *, is_directory: bool) -> None:
    if is_directory:
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
