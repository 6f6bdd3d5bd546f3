"""Whether the job directory and the checkpoint store do what stepfast asks of them.

Owns: trying it, and taking away again what was tried. Does not own: stores (`checkpoint`), which
come in by the protocol below.
Invariant: nothing that a check wrote stays.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from stepfast.errors import OperatingError
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown
from stepfast.runtime.ports import Buffer

TRIED_BYTES = 4 << 20
_SLOW_BYTES_PER_S = 10 << 20
_NAME_MAX = 3


class _Writer(Protocol):
    def write(self, data: Buffer) -> None: ...


class TriedStore(Protocol):
    """What a check needs of a checkpoint store."""

    @property
    def url(self) -> str: ...

    def writer(self, name: str, size_bytes: int = 0) -> AbstractContextManager[Any]: ...

    def put_if_absent(self, name: str, data: bytes) -> bool: ...

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes: ...

    def delete_below(self, prefix: str) -> None: ...

    def names(self, prefix: str = "") -> list[str]: ...


def job_directory(path: Path) -> Finding:
    """Whether files can be made, locked and synced where events and logs go."""
    check = "job directory"
    above = next(p for p in (path, *path.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(b"stepfast doctor")
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        change = "choose another --job-dir that can be written to and locked"
        return unhealthy(check, f"{path}: {error.strerror}", change)
    there = "" if above == path else ", to be made"
    return healthy(check, f"{path}{there}: files can be written, synced and locked")


def checkpoint_store(store: TriedStore, clock: Callable[[], float]) -> list[Finding]:
    """Conditional put and write speed, tried below a name of their own."""
    place = f"stepfast-doctor-{secrets.token_hex(6)}"
    change = "make the store reachable and writable from here, or choose another --checkpoints"
    try:
        try:
            findings = [_conditional_put(store, place), _speed(store, place, clock)]
        finally:
            store.delete_below(place)
        if left := store.names(place):
            findings.append(
                unhealthy("store cleared", f"{left[:_NAME_MAX]} cannot be removed", change)
            )
    except (OSError, OperatingError) as error:
        return [unhealthy("checkpoint store", str(error), change)]
    return findings


def _conditional_put(store: TriedStore, place: str) -> Finding:
    check = "checkpoint store"
    first = store.put_if_absent(f"{place}/once", b"one")
    second = store.put_if_absent(f"{place}/once", b"two")
    held = store.read(f"{place}/once")
    if (first, second, held) == (True, False, b"one"):
        return healthy(check, f"{store.url}: a name is given once, whoever asks again")
    evidence = f"{store.url}: put-if-absent gave {first}, then {second}, and holds {held!r}"
    return unhealthy(check, evidence, "choose a store that can: a POSIX directory, S3, GCS, Azure")


def _speed(store: TriedStore, place: str, clock: Callable[[], float]) -> Finding:
    check = "store speed"
    piece = os.urandom(1 << 20)  # what is all zeros may never reach the disk
    began = clock()
    with store.writer(f"{place}/speed", TRIED_BYTES) as writer:
        for _ in range(TRIED_BYTES // len(piece)):
            writer.write(piece)
    bytes_per_s = TRIED_BYTES / max(clock() - began, 1e-6)
    evidence = f"{bytes_per_s / (1 << 20):.0f} MiB/s, synced, in a file of 4 MiB"
    if store.read(f"{place}/speed", TRIED_BYTES - len(piece)) != piece:
        return unhealthy(check, "what was written is not what is read", "do not use this store")
    if bytes_per_s >= _SLOW_BYTES_PER_S:
        return healthy(check, evidence)
    change = "checkpoints will lag behind: use a faster place, or a longer checkpoint interval"
    return unknown(check, evidence, change)


def leftovers(names: Sequence[str]) -> Finding:
    """Checkpoints that were begun and never committed."""
    if not names:
        return healthy("leftovers", "none")
    evidence = f"{len(names)} never committed: {', '.join(names[:_NAME_MAX])}"
    return unknown("leftovers", evidence, "the next commit of a job sweeps them")
