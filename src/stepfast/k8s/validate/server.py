"""`--server`: the cluster itself looks at the files, and changes nothing.

Owns: `kubectl apply --dry-run=server` with strict fields, and what its words mean. Does not own:
the kubeconfig, which is the user's. It was never run against a cluster here; the tests run it
against programs that answer as kubectl does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from stepfast.errors import OperatingError
from stepfast.k8s.validate.findings import Finding

SERVER_RULE = "server"
DRY_RUN_LIMIT_S = 120
_UNREACHABLE = (
    "connection refused",
    "Unable to connect",
    "no such host",
    "i/o timeout",
    "couldn't get current server API group list",
    "You must be logged in",
)


def dry_run(
    files: Sequence[Path], *, kubectl: str = "kubectl", context: str = "", limit_s: float = 0
) -> list[Finding]:
    """What the server refuses, file by file; OperatingError where it cannot be asked."""
    findings: list[Finding] = []
    for file in files:
        command = [kubectl, *([f"--context={context}"] if context else []), "apply"]
        command += ["--dry-run=server", "--validate=strict", "--output=name", "-f", str(file)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s or DRY_RUN_LIMIT_S,
                check=False,
            )
        except FileNotFoundError as error:
            raise OperatingError(f"--server needs {kubectl} on the PATH") from error
        except OSError as error:
            raise OperatingError(f"--server: {kubectl} cannot be run: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise OperatingError(f"--server: no answer within {limit_s or 120} s") from error
        words = done.stderr.decode(errors="replace").strip()
        if any(sign in words for sign in _UNREACHABLE):
            raise OperatingError(f"--server: the cluster cannot be asked: {words[-300:]}")
        if done.returncode != 0:
            lines = [line for line in words.splitlines() if line.strip()] or ["no reason given"]
            findings += [_refusal(file, line) for line in lines]
        else:
            warnings = [line for line in words.splitlines() if line.startswith("Warning:")]
            findings += [_refusal(file, line) for line in warnings]
    return findings


def _refusal(file: Path, line: str) -> Finding:
    return Finding(
        file=str(file),
        line=0,
        object="",
        path="",
        rule=SERVER_RULE,
        reason=line[:500],
        fix="change what the server names; nothing was changed there",
    )
