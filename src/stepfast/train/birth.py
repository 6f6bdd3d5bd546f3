"""How a fork of the zygote becomes a rank or a store: everything of the zygote's is left behind
first.

Owns: session, descriptors, log, signals, environment and the way out of a forked process. Does not
own: the fork (`train.zygote`), the rank's life (`train.entry`), the store's (`train.storehost`).

Invariant: the process looks to the user's code as if it had been started fresh, with its imports
already done. Random generators stay as the zygote's imports left them (but for Python's own, which
the interpreter seeds anew in a fork).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Final, NoReturn

from stepfast.errors import EXIT_TRY_AGAIN
from stepfast.runtime import spawning
from stepfast.runtime.disk import open_own

ADOPTION_POLL_S: Final = 0.0002
LOG_MODE: Final = 0o644


def wait_for_adoption(former_parent_pid: int) -> None:
    """Return once the process between has ended, so that the present parent is the agent."""
    while os.getppid() == former_parent_pid:
        time.sleep(ADOPTION_POLL_S)


def become(request: spawning.ToZygote, descriptor: int, agent_pid: int) -> NoReturn:
    """Turn this fresh fork into what was asked for; ends with the process."""
    status = EXIT_TRY_AGAIN
    try:
        _settle(request.tag, agent_pid)
        sock = socket.socket(fileno=descriptor)
        if isinstance(request, spawning.ForkStore):
            _redirect(request.log_path)
            spawning.name_process("stepfast-store")
            status = _host_store(sock)
        else:
            status = _run_rank(request.launch, sock)
    except SystemExit as stop:
        status = _status_of(stop)
    except BaseException:  # noqa: BLE001 - the end of a process
        # The last frame of the process: whatever it was belongs into the log, and the status says
        # that it failed.
        traceback.print_exc()
    finally:
        _leave(status)


def _settle(tag: str, agent_pid: int) -> None:
    """Own session, end with the agent, default signals, ordinary garbage collection."""
    os.setsid()
    spawning.die_with_parent(signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(EXIT_TRY_AGAIN)
    os.environ[spawning.TAG_VARIABLE] = tag
    try:
        spawning.write_tag_in_place(tag)
    except OSError:
        # Without /proc/self/mem only what the rank executes is marked; its session and tree are
        # known all the same.
        pass
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as the interpreter does: errors say it
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.enable()


def _redirect(log_path: str) -> None:
    """No input; both outputs appended to the log, line by line, so that what was written survives a
    kill."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    log = open_own(Path(log_path), os.O_WRONLY | os.O_APPEND, LOG_MODE)
    for descriptor, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.close(empty)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    faulthandler.enable(file=sys.__stderr__ or 2)


def _host_store(sock: socket.socket) -> int:
    from stepfast.train import storehost

    return storehost.serve(sock)


def _run_rank(launch: spawning.RankLaunch, sock: socket.socket) -> int:
    _redirect(launch.log_path)
    spawning.name_process(launch.label)
    for name, value in launch.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(launch.working_directory)
    sys.argv = [launch.script, *launch.script_args]
    # The zygote runs without a first entry for the script's directory (`-P`), so it is put in
    # front.
    sys.path.insert(0, os.path.dirname(os.path.abspath(launch.script)))
    module_name, _, function_name = launch.entry.partition(":")
    entry = getattr(importlib.import_module(module_name), function_name)
    status = entry(sock, launch.script, launch.script_args)
    assert isinstance(status, int), f"{launch.entry} must return an exit code, not {status!r}"
    return status


def _status_of(stop: SystemExit) -> int:
    """What the interpreter makes of `sys.exit`."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return EXIT_TRY_AGAIN


def _leave(status: int) -> NoReturn:
    """End as the interpreter would: threads joined, exit functions run (loggers, loader workers),
    output flushed."""
    try:
        # What the interpreter calls first in its own end: it joins the threads that are no daemons.
        threading._shutdown()  # type: ignore[attr-defined]  # no public name
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                # The disk is full or the stream closed: the exit code still has to be told.
                pass
        os._exit(status)
