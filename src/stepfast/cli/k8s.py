"""`stepfast k8s COMMAND`: manifests.

Owns: the subcommands. Does not own: what each does.
"""

from __future__ import annotations

import argparse

from stepfast.cli.k8s_local import run_local
from stepfast.cli.k8s_render import run_render
from stepfast.cli.k8s_validate import run_validate


def run_k8s(options: argparse.Namespace) -> int:
    """One subcommand, and its exit code."""
    match options.k8s_command:
        case "local":
            return run_local(options)
        case "render":
            return run_render(options)
        case "validate":
            return run_validate(options)
    raise AssertionError(f"no such command: {options.k8s_command}")
