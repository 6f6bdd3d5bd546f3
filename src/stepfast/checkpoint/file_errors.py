"""What the errors of a file system mean for a store, and what its user can do about them.

Owns: the words. Does not own: which call failed.
"""

from __future__ import annotations

import errno

from stepfast.errors import OperatingError, StateError

NOT_HERE = (errno.ENOENT, errno.ENOTDIR)
_DAMAGED = (errno.EIO, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG)
_ADVICE = {
    errno.ENOSPC: "; free some space there, keep fewer checkpoints, or choose another place",
    errno.EDQUOT: "; the quota is used up: keep fewer checkpoints, or choose another place",
    errno.EFBIG: "; raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "; choose a place for checkpoints that can be written to",
    errno.EACCES: "; give this user the right to it, or choose another place for checkpoints",
}


def failure(path: str, error: OSError) -> OperatingError:
    """The world failed while a file was written or looked for."""
    return OperatingError(f"{path}: {error.strerror or error}{_ADVICE.get(error.errno or 0, '')}")


def reading_failure(path: str, error: OSError) -> OperatingError:
    """A StateError where the file is absent or damaged; else the world failed."""
    if error.errno in (*NOT_HERE, *_DAMAGED):
        return StateError(f"{path}: {error.strerror or error}")
    return failure(path, error)


def short(path: str, start: int, wanted_bytes: int, size_bytes: int) -> StateError:
    """A file that ends too early."""
    return StateError(
        f"{path}: bytes {start} to {start + wanted_bytes} were wanted, it has {size_bytes}"
    )
