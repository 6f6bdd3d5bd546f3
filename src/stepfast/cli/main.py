"""`stepfast COMMAND`: parse, load the settings, run one process, end with its exit code."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepfast.checkpoint.store import check_slashes
from stepfast.cli.parser import parse
from stepfast.cli.token import read_token
from stepfast.config import (
    LOOPBACK_HOSTS,
    SETTINGS,
    JobConfig,
    load_config,
    parse_text,
    split_address,
)
from stepfast.errors import ConfigError, OperatingError, StepfastError, UserError
from stepfast.runtime.spawning import die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """The command's exit code; every refusal is one line on the error stream."""
    _prepare_streams()
    try:
        options = parse(argv)
        return _dispatch(options)
    except StepfastError as error:
        sys.stderr.write(f"stepfast: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> None:
    """Any text of a rank's must be showable on any console, or on none."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    sys.stderr = sys.stderr or sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _dispatch(options: argparse.Namespace) -> int:
    if getattr(options, "parent_pid", None) is not None:
        end_with_parent(options.parent_pid)
    if options.command == "ckpt":
        from stepfast.cli.ckpt import run_ckpt

        return run_ckpt(options)
    if options.command == "k8s":
        from stepfast.cli.k8s import run_k8s

        return run_k8s(options)
    config = _config(options)
    match options.command:
        case "run":
            from stepfast.cli.run import check_cluster, run_cluster

            _check_summary(config)
            os.environ.update(_token_for_children(config))
            run = check_cluster if options.check else run_cluster
            return run(config, _checked_script(options.script), tuple(options.script_args))
        case "doctor":
            from stepfast.cli.doctor import run_doctor

            return run_doctor(options, config, os.environ)
        case "coordinator":
            return _coordinator(config, options)
        case "agent":
            return _agent(config, options)
    raise AssertionError(f"no such command: {options.command}")


def end_with_parent(parent_pid: int) -> None:
    """In order, should `stepfast run` be killed; at once where it already was."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise OperatingError("the process that started this one is gone")


def _config(options: argparse.Namespace) -> JobConfig:
    given: dict[str, Any] = {}
    for name in SETTINGS:
        if not hasattr(options, name):
            continue
        value = getattr(options, name)
        given[name] = tuple(value) if isinstance(value, list) else parse_text(name, value)
    file = Path(options.config) if options.config else None
    config = load_config(file, os.environ, given)
    check_slashes(config.checkpoints)
    if config.fault and options.command != "agent":
        from stepfast.chaos.inject import parse_fault

        for text in config.fault:
            if parse_fault(text).rank >= config.world_size:
                raise ConfigError(f"--fault {text}: the job has ranks 0 to {config.world_size - 1}")
    return config


def _checked_script(script: str) -> str:
    """The script's path; what is wrong with it is said before anything starts."""
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"there is no script {script}")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{script}, line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {script}: {error}") from error
    return str(path.resolve())


def _token(config: JobConfig) -> str | None:
    """The job's token; never logged, never in an event."""
    # Taken out: what is started from here has no use for it, but for what is given it on purpose.
    given = os.environ.pop("STEPFAST_TOKEN", "")
    return read_token(Path(config.token_file)) if config.token_file else given or None


def _checked_token(config: JobConfig) -> str | None:
    """The token; off loopback there has to be one."""
    host, _ = split_address(config.listen)
    token = _token(config)
    if host not in LOOPBACK_HOSTS and token is None:
        raise ConfigError(
            f"listening on {host} needs a token: --token-file FILE,"
            " or STEPFAST_TOKEN in the environment"
        )
    return token


def _token_for_children(config: JobConfig) -> dict[str, str]:
    """By environment: a command line can be read by everybody on the machine."""
    token = _checked_token(config)
    return {} if token is None else {"STEPFAST_TOKEN": token}


def _check_summary(config: JobConfig) -> None:
    if config.summary and not Path(config.summary).resolve().parent.is_dir():
        raise ConfigError(f"--summary {config.summary}: its directory does not exist")


def _coordinator(config: JobConfig, options: argparse.Namespace) -> int:
    from stepfast.cli.serve import serve_coordinator

    _check_summary(config)
    token = _checked_token(config)
    return serve_coordinator(
        config,
        token=token,
        listen_fd=options.listen_fd,
        script_name=options.script_name,
        is_marked=options.marked,
        is_restarted=options.restarted,
        is_replaceable=options.replaceable,
        check_of=options.check_of,
    )


def _agent(config: JobConfig, options: argparse.Namespace) -> int:
    from stepfast.cli.serve import serve_agent

    return serve_agent(
        config,
        coordinator=split_address(options.coordinator),
        node=options.node,
        token=_token(config),
        script=_checked_script(options.script),
        script_args=tuple(options.script_args),
        machine_root=options.machine_root,
    )
