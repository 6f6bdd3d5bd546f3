"""`stepfast k8s local FILE`: a manifest's pods as processes of this machine.

Owns: the flags, reading the file, the exit code. Does not own: the run (`k8s.local`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, ConfigError
from stepfast.runtime.lines import LineWriter

LOCAL_EXAMPLES = """examples:
  stepfast k8s render job.toml > job.yaml
  stepfast k8s local --files /opt/stepfast/examples=examples job.yaml
  stepfast k8s local --claim checkpoints=/data/checkpoints --control /tmp/control job.yaml
  stepfast k8s local --control /tmp/control --tell "evict llama-debug-node-0-1"
commands of --tell: pods; kill POD CONTAINER; signal POD PID [NUMBER]; delete POD; evict POD;
  lose POD; stop
exit codes:
  0   the job has finished
  1   it has failed
  78  the manifest or a flag cannot be used: one line on stderr says what to change
"""


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local`."""
    claim = "the directory of a PersistentVolumeClaim, kept; others are the run's own"
    parser.add_argument("--claim", action="append", default=[], metavar="NAME=DIR", help=claim)
    files = "a directory of this machine at a place of the image; may be repeated"
    parser.add_argument("--files", action="append", default=[], metavar="PLACE=DIR", help=files)
    control = "where commands are taken (default: a socket of the run's own)"
    parser.add_argument("--control", metavar="SOCKET", help=control)
    tell = "say this to the run at --control, print its answer and end"
    parser.add_argument("--tell", metavar="COMMAND", help=tell)
    backoff = (
        "the first delay before a container or pod is made again (default: 10, as on clusters)"
    )
    parser.add_argument("--backoff-s", type=float, default=10.0, metavar="SECONDS", help=backoff)
    plain = "process groups instead of namespaces, as where this user may have none"
    parser.add_argument("--no-namespaces", action="store_true", help=plain)
    parser.add_argument("file", nargs="?", metavar="FILE", help="the manifest; - for stdin")


def run_local(options: argparse.Namespace) -> int:
    """Runs the manifest, or says a command to one that runs."""
    try:
        from stepfast.k8s.local.control import tell
        from stepfast.k8s.local.reading import read_workload
        from stepfast.k8s.local.run import Options, run_workload
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'stepfast[k8s]'") from error
    if options.tell is not None:
        if not options.control:
            raise ConfigError("--tell needs --control: the socket of the run")
        answer = asyncio.run(tell(Path(options.control), options.tell))
        sys.stdout.write(f"{answer}\n")
        return EXIT_FINISHED if answer.startswith("ok") else EXIT_TRY_AGAIN
    if not options.file:
        raise ConfigError("no FILE to run; - reads from stdin")
    if options.backoff_s < 0:
        raise ConfigError(f"--backoff-s must be at least 0, not {options.backoff_s:g}")
    workload = read_workload(options.file, _read(options.file))
    lines = LineWriter(sys.stdout)
    chosen = Options(
        claims=_places(options.claim, "--claim NAME=DIR"),
        files=_places(options.files, "--files PLACE=DIR"),
        control=Path(options.control) if options.control else None,
        base_delay_s=options.backoff_s,
        is_plain=options.no_namespaces,
    )
    end = run_workload(workload, chosen, lambda line: lines.write(f"{line}\n"))
    lines.write(f"[k8s] {workload.name}: {end.reason}\n")
    lines.flush()
    return end.exit_code


def _places(given: Sequence[str], form: str) -> dict[str, Path]:
    found = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory):
            raise ConfigError(f"{text!r} is not of the form {form}")
        path = Path(directory).resolve()
        if not path.is_dir():
            raise ConfigError(f"{form}: there is no directory {directory}")
        found[name] = path
    return found


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
