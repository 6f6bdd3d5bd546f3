"""Where a process meets stepfast: `run_rank` under an agent, `resilient` in the script.

Owns: the door of the rank (it reads the environment), the present process. Does not own: the loop.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from stepfast.core.messages import RankStart
from stepfast.errors import EXIT_USER_ERROR, ScriptError
from stepfast.runtime.ports import FaultPoints
from stepfast.train.backends import OF_DEVICE
from stepfast.train.host import NoFaults, PlainHost
from stepfast.train.link import AgentLink
from stepfast.train.session import Run
from stepfast.train.wrapper import RankProcess

P = ParamSpec("P")
R = TypeVar("R")

# Chaos stands above this room, so it is found by name, and only where a fault was asked for.
_INJECTOR = ("stepfast.chaos.inject", "Injector")


class _Attached:
    """The process's rank, once an agent stands behind it."""

    rank: RankProcess | None = None
    entered = False


def run_rank(sock: socket.socket, script: str, script_args: list[str]) -> int:
    """Run the script as a rank of a job; called in a fresh fork of the zygote. The exit code."""
    # As in a fresh interpreter: every process its own stream, until the script seeds it.
    torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    process = RankProcess(AgentLink(sock), _make_faults, os.environ)
    _Attached.rank = process
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        if ending.code in (None, 0) or _Attached.entered:
            raise
        return _refuse(
            process, ScriptError(f"the script ended with {ending.code!r} before training")
        )
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - becomes a fault
        return _refuse(process, error)
    if not _Attached.entered:
        hint = "decorate the training function with @stepfast.resilient and call it"
        return _refuse(process, ScriptError(f"{script} ended without training: {hint}"))
    return 0


def _refuse(process: RankProcess, error: BaseException) -> int:
    import traceback

    traceback.print_exception(error)
    process.report_script_error(error)
    return EXIT_USER_ERROR


def _make_faults(order: RankStart, note: Callable[[str, str], None]) -> FaultPoints:
    if not order.settings.faults:
        return NoFaults()
    module, name = _INJECTOR
    injector = getattr(importlib.import_module(module), name)
    made: FaultPoints = injector(
        order.settings.faults,
        rank=order.rank,
        marks=Path(order.settings.job_dir) / "faults",
        note=note,
    )
    return made


def resilient(function: Callable[Concatenate[Run, P], R]) -> Callable[P, R]:
    """Make a training function survive faults; its first argument is the `Run`.

    Under `stepfast run` the function is entered again in each generation of the job. Under `python`
    and `torchrun` it is called once. Calling two resilient functions in one process, or one inside
    another, raises ScriptError.
    """

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        if _Attached.entered:
            raise ScriptError(
                "a resilient function was called twice in one process; call one, once"
            )
        _Attached.entered = True
        if _Attached.rank is not None:

            def stay(run: Run) -> R:
                return function(run, *args, **kwargs)

            return _Attached.rank.run(stay)  # type: ignore[no-any-return]  # the function's own
        return _run_plain(function, args, kwargs)

    return entered


def _run_plain(function: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
    """No agent: `python` or `torchrun`."""
    under_torchrun = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    ours = not dist.is_initialized()
    if ours:
        backend = OF_DEVICE[device_type].spec
        if under_torchrun:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    host = PlainHost(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device_type=device_type,
    )
    run = Run(host)
    result = function(run, *args, **kwargs)
    run.finish()
    # Not where it raised: a collective teardown would hide the error.
    if ours:
        dist.destroy_process_group()
        # Groups that a model's cycles refer to must end while the interpreter is whole: later,
        # their threads may end the process with SIGABRT (torch 2.13).
        del run, host
        gc.collect()
    return result
