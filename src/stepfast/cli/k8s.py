"""`stepfast k8s COMMAND`: from a job file to what a cluster takes.

Owns: reading the file, writing the text. Does not own: what is in it (`stepfast.k8s`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepfast.k8s.job_file import read_job_file
from stepfast.k8s.manifest import manifest
from stepfast.k8s.profiles import profile_of
from stepfast.k8s.render import as_yaml


def run_k8s(options: argparse.Namespace) -> int:
    """The exit code of one of the commands below `stepfast k8s`."""
    commands = {"render": _render}
    return commands[options.k8s_command](options)


def _render(options: argparse.Namespace) -> int:
    profile = profile_of(
        options.kind, options.kubernetes, jobset=options.jobset, trainer=options.trainer
    )
    sys.stdout.write(as_yaml(manifest(read_job_file(Path(options.file)), profile)))
    return 0
