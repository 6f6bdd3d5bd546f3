"""Where multiprocessing puts the sockets of this rank's loader workers.

A worker that is killed cannot remove its files, and a rank that is killed cannot for its workers.
So they lie beside the node's slots, which the agent removes when the job ends in order.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

_PATH_CHARS_MAX = 80  # a socket's path may have 107, and multiprocessing adds a name of its own


def put_worker_files_into(directory: Path) -> None:
    """Let this process and what it forks use `directory`; a path too long for sockets is left
    alone.

    multiprocessing has no public name for this; where the private one is gone, its own default
    stays and files of killed workers stay in the temporary directory.
    """
    config = getattr(multiprocessing.current_process(), "_config", None)
    if not isinstance(config, dict) or len(str(directory)) > _PATH_CHARS_MAX:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.setdefault("tempdir", str(directory))
