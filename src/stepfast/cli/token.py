"""The job's token out of a file: one that a person wrote, or a Secret that Kubernetes mounted.

Owns: what a token file must be. Does not own: who has to show a token (`cli.main`).
Invariant: no message has any part of the token.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stepfast.errors import ConfigError

_BYTES_MAX = 4096  # with what is trimmed; HTTP servers take no longer header either
_TOO_OPEN = stat.S_IRWXO | stat.S_IWGRP  # a group may read: so does the fsGroup of a pod
_CHANGE = "chmod 600, or defaultMode: 0440 where a Secret is mounted"


def read_token(path: Path) -> str:
    """The token, without the space around it. Raises ConfigError with one line that says what to
    change.
    """
    where = f"the token file {path}"
    try:
        # A link is followed: what a Secret's volume shows are links. A pipe is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            is_file = stat.S_ISREG(status.st_mode)
            data = os.read(descriptor, _BYTES_MAX + 1) if is_file else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from error
    if not is_file:
        raise ConfigError(f"{where} is no regular file")
    mode = stat.S_IMODE(status.st_mode)
    if mode & _TOO_OPEN:
        raise ConfigError(f"{where} is open to others (mode {mode:04o}): {_CHANGE}")
    if len(data) > _BYTES_MAX:
        raise ConfigError(f"{where} is longer than {_BYTES_MAX} bytes")
    token = data.strip()
    if not token:
        raise ConfigError(f"{where} is empty")
    if not all(0x20 <= byte <= 0x7E for byte in token):
        raise ConfigError(f"{where} must hold one line of printable ASCII, and holds more")
    return token.decode("ascii")
