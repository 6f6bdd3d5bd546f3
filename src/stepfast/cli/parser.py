"""The command line: subcommands and flags. The settings' flags come from `config`, one for each
field.

Owns: names and help. Does not own: what a command does (`cli.main`).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

import stepfast
from stepfast.cli.k8s_local import LOCAL_EXAMPLES, add_local_flags
from stepfast.cli.k8s_render import RENDER_EXAMPLES, add_render_flags
from stepfast.cli.k8s_validate import VALIDATE_EXAMPLES, add_validate_flags
from stepfast.config import CHOICES, SETTINGS
from stepfast.errors import ConfigError

_JOB = (
    "nodes",
    "nproc_per_node",
    "job_dir",
    "job_id",
    "summary",
    "recovery",
    "hang",
    "hang_floor_s",
    "hang_ceiling_s",
    "heartbeat_interval_s",
    "restarts_per_hour",
    "snapshot_interval_steps",
    "checkpoints",
    "checkpoint_interval_steps",
    "checkpoint_interval_s",
    "keep_checkpoints",
    "keep_every_steps",
    "checkpoint_bytes_per_s",
    "checkpoint_metadata",
    "on_damage",
    "start_fresh",
    "device",
    "memory_dir",
    "preload",
    "fault",
    "join_limit_s",
    "metrics_port",
    "slo_recovery_s",
    "slo_steps_lost",
)
HEALTH = ("health_check", "health_unknown", "health_gpus", "health_efas", "health_limit_s")
_COORDINATOR = (*_JOB, "listen", "token_file")
_AGENT = ("host", "token_file", "join_limit_s", "metrics_port", "device", *HEALTH)
_DOCTOR = ("nproc_per_node", "job_dir", "checkpoints", "memory_dir")
_RUN = (*_JOB, "listen", "token_file")

_RUN_EXAMPLES = """examples:
  stepfast run --nproc-per-node 4 train.py --steps 1000
  stepfast run --nodes 2 --nproc-per-node 2 --job-dir jobs/a train.py
  stepfast run --nproc-per-node 2 --fault kill@rank=0,step=10 train.py
  stepfast run --nproc-per-node 4 --check train.py --steps 1000
"""
_COORDINATOR_EXAMPLES = """examples:
  stepfast coordinator --nodes 2 --nproc-per-node 8 --listen 127.0.0.1:7070
  stepfast coordinator --nodes 2 --nproc-per-node 8 --listen 0.0.0.0:7070 --token-file token
"""
_AGENT_EXAMPLES = """examples:
  stepfast agent --coordinator 127.0.0.1:7070 --node 0 train.py
  stepfast agent --coordinator job-coord-0-0.job:7070 --node 1 --token-file token train.py
"""
_DOCTOR_EXAMPLES = """examples:
  stepfast doctor
  stepfast doctor --nproc-per-node 8 --state-bytes 12000000000 train.py
  stepfast doctor --checkpoints s3://bucket/run-7 --json
"""
_K8S_EXAMPLES = """examples:
  stepfast k8s render examples/job.toml
  stepfast k8s render --kind job --kubernetes 1.33 examples/job.toml
  stepfast k8s validate manifests/*.yaml
"""
_CKPT_EXAMPLES = """URL: a store (a path, s3://bucket/prefix), a job directory, or one checkpoint.
examples:
  stepfast ckpt ls stepfast-jobs/a
  stepfast ckpt verify s3://bucket/run-7
  stepfast ckpt diff jobs/a jobs/b/checkpoints/step-000000050-gen-0001
  stepfast ckpt export jobs/a exported-model
  stepfast ckpt import ./Llama-3.2-1B jobs/tuned/checkpoints
  stepfast ckpt prune jobs/a --keep-last 3 --keep-every 1000 --dry-run
exit codes:
  0   done
  1   verify found damage, diff a difference, or the store or a checkpoint cannot be read
  78  the command cannot work as it was given
"""

_METAVARS = {  # where a setting's last word does not say it
    "checkpoints": "PLACE",
    "checkpoint_bytes_per_s": "BYTES",
    "checkpoint_metadata": "KEY=VALUE",
    "start_fresh": "NAME",
    "preload": "MODULE",
    "summary": "FILE",
    "listen": "HOST:PORT",
    "metrics_port": "PORT",
    "health_check": "CMD",
}
AGENT_ONLY = ("host", *HEALTH)  # what a coordinator has no use for


class _Parser(argparse.ArgumentParser):
    """Refuses with the error tree's exit code instead of argparse's own."""

    def error(self, message: str) -> NoReturn:
        """One line that says what is wrong."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command; ConfigError, with the nearest flag, for what it does not know."""
    options, unknown = build_parser().parse_known_args(argv)
    if unknown:
        command: _Parser = options.parser
        if not unknown[0].startswith("-"):
            command.error(f"{unknown[0]} is one argument too many")
        command.error(f"no such flag: {unknown[0]}{_nearest(command, unknown[0])}")
    return options


def _nearest(parser: argparse.ArgumentParser, given: str) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(given.partition("=")[0], flags, n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="stepfast",
        description="Keeps PyTorch training running through faults.",
        epilog="stepfast COMMAND --help shows examples.",
    )
    parser.add_argument("--version", action="version", version=f"stepfast {stepfast.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    _add_run(commands)
    _add_coordinator(commands)
    _add_agent(commands)
    _add_ckpt(commands)
    _add_doctor(commands)
    _add_k8s(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, text: str, examples: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(parser=command)
    return command


def _add_run(commands: argparse._SubParsersAction[_Parser]) -> None:
    run = _command(commands, "run", "Run a whole cluster on this machine.", _RUN_EXAMPLES)
    text = "make one step, say what a run would use and where it would resume, and leave nothing"
    run.add_argument("--check", action="store_true", help=text)
    _add_settings(run, _RUN)
    _add_strict(run)
    _add_script(run)


def _add_coordinator(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "Run the coordinator of a job."
    coordinator = _command(commands, "coordinator", text, _COORDINATOR_EXAMPLES)
    _add_settings(coordinator, _COORDINATOR)
    _add_strict(coordinator)
    coordinator.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    replaceable = (
        "SIGTERM ends this process and not the job, and the next one goes on from its records: for"
        " clusters, which start it again"
    )
    coordinator.add_argument("--replaceable", action="store_true", help=replaceable)
    coordinator.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    coordinator.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    coordinator.add_argument("--script-name", default="", help=argparse.SUPPRESS)
    coordinator.add_argument("--check-of", help=argparse.SUPPRESS)
    coordinator.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)


def _add_agent(commands: argparse._SubParsersAction[_Parser]) -> None:
    agent = _command(commands, "agent", "Run one node of a job.", _AGENT_EXAMPLES)
    agent.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="the coordinator")
    agent.add_argument("--node", type=int, default=0, help="this node's number, from 0")
    agent.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    agent.add_argument("--machine-root", default="/", help=argparse.SUPPRESS)
    _add_settings(agent, _AGENT)
    _add_script(agent)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "Check this machine, and a script, before anything is trained."
    doctor = _command(commands, "doctor", text, _DOCTOR_EXAMPLES)
    doctor.add_argument("--json", action="store_true", help="for programs")
    size = "one rank's state in bytes: whether the slots of all ranks fit (default: not said)"
    doctor.add_argument("--state-bytes", type=int, default=0, metavar="BYTES", help=size)
    _add_settings(doctor, _DOCTOR)
    doctor.add_argument("script", nargs="?", metavar="SCRIPT", help="a training script")


def _add_k8s(commands: argparse._SubParsersAction[_Parser]) -> None:
    k8s = _command(commands, "k8s", "Write, check and run manifests for Kubernetes.", _K8S_EXAMPLES)
    below = k8s.add_subparsers(
        dest="k8s_command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    text = "Write a job file as YAML for a cluster."
    add_render_flags(_command(below, "render", text, RENDER_EXAMPLES))
    text = "Run a JobSet or Jobs on this machine: pods as processes."
    add_local_flags(_command(below, "local", text, LOCAL_EXAMPLES))
    text = "Check manifests: 25 properties, strict schemas, what API servers refuse."
    add_validate_flags(_command(below, "validate", text, VALIDATE_EXAMPLES))


def _add_ckpt(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "List, check, compare, export, import and remove checkpoints."
    ckpt = _command(commands, "ckpt", text, _CKPT_EXAMPLES)
    below = ckpt.add_subparsers(
        dest="ckpt_command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    step = "a step, or a checkpoint's name"
    _add_ckpt_command(below, "ls", "List the checkpoints of a store.")
    show = _add_ckpt_command(below, "show", "Show what is in a checkpoint.")
    show.add_argument("step", nargs="?", metavar="STEP", help=f"{step} (default: the newest)")
    verify = _add_ckpt_command(below, "verify", "Read checkpoints and say what is damaged.")
    verify.add_argument("step", nargs="?", metavar="STEP", help=f"{step} (default: all)")
    verify.add_argument("--threads", type=int, default=4, help="files read at once (default: 4)")
    diff = _add_ckpt_command(below, "diff", "Compare two checkpoints, byte by byte.", has_url=False)
    diff.add_argument("before", metavar="A", help="a checkpoint, or a store: its newest one")
    diff.add_argument("after", metavar="B", help="the same")
    prune = _add_ckpt_command(below, "prune", "Remove old checkpoints; the newest stays.")
    last, every = (
        "keep so many newest ones",
        "of older ones keep each at a multiple of so many steps",
    )
    prune.add_argument("--keep-last", type=int, default=2, metavar="N", help=f"{last} (default: 2)")
    prune.add_argument("--keep-every", type=int, default=0, metavar="K", help=every)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    export = _add_ckpt_command(below, "export", "Write a model's whole tensors for other tools.")
    export.add_argument("directory", metavar="DIRECTORY", help="where the model's files go")
    export.add_argument("--step", metavar="STEP", help=f"{step} (default: the newest)")
    export.add_argument(
        "--object", default="model", metavar="NAME", help="what run.track calls it (default: model)"
    )
    export.add_argument(
        "--format",
        default="safetensors",
        choices=("safetensors", "torch", "dcp"),
        help="files and an index, one file for torch.load, or torch's distributed checkpoint",
    )
    _add_import(below)


def _add_import(below: argparse._SubParsersAction[_Parser]) -> None:
    text = "Make a checkpoint of weights that others saved, for a run to start from."
    importing = _add_ckpt_command(below, "import", text, has_url=False)
    importing.add_argument(
        "source",
        metavar="SOURCE",
        help="a directory of Hugging Face or of torch.distributed.checkpoint, or a file of"
        " safetensors or torch.save",
    )
    importing.add_argument("store", metavar="STORE", help="where the checkpoint goes")
    importing.add_argument("--step", type=int, default=0, help="the step it is of (default: 0)")
    importing.add_argument(
        "--object", default="model", metavar="NAME", help="what run.track calls it (default: model)"
    )
    importing.add_argument(
        "--prefix",
        metavar="TEXT",
        help="take the tensors whose names begin with it, and take it off the names",
    )
    importing.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="TEXT",
        help="leave out the tensors whose names then begin with it; may be repeated",
    )


def _add_ckpt_command(
    commands: argparse._SubParsersAction[_Parser], name: str, text: str, *, has_url: bool = True
) -> argparse.ArgumentParser:
    parser = _command(commands, name, text, _CKPT_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="for programs")
    if has_url:
        parser.add_argument("url", metavar="URL", help="a store, a job directory or a checkpoint")
    return parser


def _add_settings(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    parser.add_argument("--config", metavar="FILE", help="settings (default: ./stepfast.toml)")
    for name in names:
        setting = SETTINGS[name]
        flag = f"--{name.replace('_', '-')}"
        default = setting.default
        text = setting.metadata["help"]
        shown = f"{text} (default: {default})" if default not in ("", (), None) else text
        repeatable = str(setting.type).startswith("tuple")
        parser.add_argument(
            flag,
            dest=name,
            metavar=_metavar(name, str(setting.type)),
            default=argparse.SUPPRESS,
            action="append" if repeatable else "store",
            help=shown.replace("%", "%%"),
        )


def _metavar(name: str, kind: str) -> str:
    if name in CHOICES:
        return "|".join(CHOICES[name])
    if name in _METAVARS:
        return _METAVARS[name]
    return "N" if kind.startswith("int") else name.rsplit("_", 1)[-1].upper()


def _add_strict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strict",
        dest="on_damage",
        action="store_const",
        const="stop",
        default=argparse.SUPPRESS,
        help="the same as --on-damage stop",
    )


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments"
    )
