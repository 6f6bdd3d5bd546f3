"""`stepfast k8s render FILE`: a job file as the YAML that a cluster takes.

Owns: the flags, reading the file, writing the text. Does not own: what is in it (`stepfast.k8s`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stepfast.errors import EXIT_FINISHED, ConfigError

RENDER_EXAMPLES = """examples:
  stepfast k8s render job.toml > job.yaml
  stepfast k8s render --kind trainjob --kubernetes 1.34 --trainer 2.1 job.toml
  stepfast k8s render job.toml | stepfast k8s validate -
exit codes:
  0   the manifests are on stdout
  78  the job file or a flag cannot be used: one line on stderr says what to change
"""


def add_render_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `render`."""
    kinds = ("jobset", "job", "trainjob")
    text = "JobSet, plain Jobs with a Service, or Kubeflow Trainer 2 (default: jobset)"
    parser.add_argument("--kind", default=kinds[0], choices=kinds, help=text)
    for name, default, what in (
        ("--kubernetes", "1.35", "the cluster's version"),
        ("--jobset", "0.12", "the JobSet operator's version"),
        ("--trainer", "2.3", "Kubeflow Trainer's version"),
    ):
        parser.add_argument(
            name, default=default, metavar="VERSION", help=f"{what} (default: {default})"
        )
    parser.add_argument("file", metavar="FILE", help="the job file, such as job.toml")


def run_render(options: argparse.Namespace) -> int:
    """Writes the manifests to stdout."""
    try:
        from stepfast.k8s.job_reader import read_job_file
        from stepfast.k8s.manifest import manifest
        from stepfast.k8s.profiles import profile_of
        from stepfast.k8s.render import as_yaml
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'stepfast[k8s]'") from error
    profile = profile_of(
        options.kind, options.kubernetes, jobset=options.jobset, trainer=options.trainer
    )
    sys.stdout.write(as_yaml(manifest(read_job_file(Path(options.file)), profile)))
    return EXIT_FINISHED
