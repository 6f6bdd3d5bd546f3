"""`stepfast k8s validate FILE...`: lints, schemas and, if asked, the cluster's own look.

Owns: the flags, reading the files, the exit code. Does not own: any rule (`k8s.validate`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN, ConfigError

VALIDATE_EXAMPLES = """examples:
  stepfast k8s validate job.yaml
  stepfast k8s validate --kubernetes 1.33 --jobset 0.9 manifests/*.yaml
  stepfast k8s validate --json --allow images manifests/
  stepfast k8s validate --crd crds.yaml --server manifests/job.yaml
exit codes:
  0   nothing was found
  1   something was found, or the server cannot be asked
  78  the command cannot work as it was given
"""


def add_validate_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `validate`."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="YAML; a directory's; - for stdin")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--rules", action="store_true", help="list the rules and end")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="RULE",
        help="a rule that may be broken; may be repeated",
    )
    for name, default, what in (
        ("--kubernetes", "1.35", "the cluster's version"),
        ("--jobset", "0.12", "the JobSet operator's version"),
        ("--trainer", "2.3", "Kubeflow Trainer's version"),
    ):
        parser.add_argument(
            name, default=default, metavar="VERSION", help=f"{what} (default: {default})"
        )
    gate = "an alpha gate that the JobSet controller has on; may be repeated"
    parser.add_argument("--gate", action="append", default=[], metavar="GATE", help=gate)
    parser.add_argument("--allow-spot", action="store_true", help="nodes may be taken back")
    nvls = "NCCL_NVLS_ENABLE=0 is meant, as for engine nvrx"
    parser.add_argument("--allow-nvls-off", action="store_true", help=nvls)
    crd = "the cluster's own CRDs, from kubectl get crd NAME -o yaml; may be repeated"
    parser.add_argument("--crd", action="append", default=[], metavar="FILE", help=crd)
    server = "ask the cluster of the kubeconfig, too, by a dry run that changes nothing"
    parser.add_argument("--server", action="store_true", help=server)
    parser.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")


def run_validate(options: argparse.Namespace) -> int:
    """Prints the report; 1 where it has findings."""
    try:
        from stepfast.k8s.target import Target, parse_version
        from stepfast.k8s.validate.findings import ordered
        from stepfast.k8s.validate.lints.rules import RULES
        from stepfast.k8s.validate.schemas import Schemas
        from stepfast.k8s.validate.server import dry_run
        from stepfast.k8s.validate.validate import validate
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'stepfast[k8s]'") from error
    if options.rules:
        sys.stdout.write("".join(f"{rule.name:20} {rule.promise}\n" for rule in RULES))
        return EXIT_FINISHED
    unknown = sorted(set(options.allow) - {rule.name for rule in RULES})
    if unknown:
        raise ConfigError(f"--allow {unknown[0]}: no such rule; --rules lists them")
    target = Target(
        kubernetes=parse_version(options.kubernetes, "--kubernetes"),
        jobset=parse_version(options.jobset, "--jobset"),
        trainer=parse_version(options.trainer, "--trainer"),
        gates=frozenset(options.gate),
        allows_spot=options.allow_spot,
        allows_nvls_off=options.allow_nvls_off,
    )
    paths = _paths(options.files)
    if options.server and Path("-") in paths:
        raise ConfigError("--server reads files itself: it cannot ask about stdin")
    schemas = Schemas((file, _read(Path(file))) for file in options.crd)
    files = {str(path): _read(path) for path in paths}
    report = validate(files, target, schemas=schemas, allowed=options.allow)
    if options.server:
        found = dry_run(paths, context=options.context)
        report = replace(report, findings=ordered((*report.findings, *found)))
    sys.stdout.write(report.json() if options.json else report.text())
    return EXIT_TRY_AGAIN if report.findings else EXIT_FINISHED


def _paths(given: Sequence[str]) -> list[Path]:
    if not given:
        raise ConfigError("no FILE to validate; - reads from stdin")
    paths: list[Path] = []
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in (".yaml", ".yml", ".json"))
            if not inside:
                raise ConfigError(f"{name}: there is no YAML in this directory")
            paths += inside
        else:
            paths.append(path)
    return paths


def _read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
