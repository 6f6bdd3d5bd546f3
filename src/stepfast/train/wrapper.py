"""The resilient function's wrapper: one process's way through generations.

Owns: the main thread's loop (wait, form, run, leave). Does not own: when to leave (`core.rank`),
what a `Run` finds there (`train.rank_host`). Invariants: user code runs only inside a generation;
after a generation nothing of it is left: no group, no iterator, no frame.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch

from stepfast.core.faults import ErrorClass, ExceptionReport, Whereabouts, is_plain_refusal
from stepfast.core.messages import ProbeAnswer, RankFinish, RankLeave, RankStart
from stepfast.core.rank import (
    MainEntered,
    MainInterrupted,
    MainQuiet,
    MainRaised,
    MainReturned,
    RankInput,
)
from stepfast.core.timeouts import solve_timeouts, timeouts_of
from stepfast.errors import EXIT_TRY_AGAIN, Interrupted, OperatingError
from stepfast.runtime.disk import occupy_standard_descriptors, open_own
from stepfast.runtime.ports import FaultPoints
from stepfast.train import torch_private
from stepfast.train.backends import OF_DEVICE
from stepfast.train.groups import Groups, Membership
from stepfast.train.link import AgentLink
from stepfast.train.monitor import Monitor
from stepfast.train.pins import Pins
from stepfast.train.rank_host import RankHost
from stepfast.train.report import forget_frames, report_of
from stepfast.train.rng import RngState
from stepfast.train.session import Run
from stepfast.train.whereabouts import Whereabout
from stepfast.train.worker_files import put_worker_files_into

FaultsMaker = Callable[[RankStart, Callable[[str, str], None]], FaultPoints]


class RankProcess:
    """The process of one rank under an agent."""

    def __init__(
        self, link: AgentLink, make_faults: FaultsMaker, environment: MutableMapping[str, str]
    ) -> None:
        """Take over the link and listen; `environment` is what launchers' variables are put
        into.
        """
        self._make_faults = make_faults
        self._environment = environment
        self._rng_first: RngState | None = None
        self._returned: Any = None
        grace_s = solve_timeouts(device="cpu").interrupt_grace_s
        pins = Pins()
        self._monitor = Monitor(
            link,
            interrupt_grace_s=grace_s,
            answer_probe=self._answer_probe,
            hear_pin=pins.hear,
        )
        self._host = RankHost(self._monitor, Whereabout(), pins)
        self._monitor.watch(self._host.device.progress)
        self._monitor.start()

    def run(self, function: Callable[..., Any]) -> Any:
        """Call `function(run)` in every generation until the job is over; its last result."""
        self._rng_first = RngState.take()
        self._monitor.feed(MainEntered())
        while True:
            order = self._monitor.wait_for_order()
            match order:
                case RankFinish(finished=True):
                    self._leave_for_good()
                    return self._returned
                case RankFinish():
                    raise SystemExit(EXIT_TRY_AGAIN)
                case RankLeave():
                    self._become_quiet()
                case RankStart():
                    self._stay(order, function)

    def report_script_error(self, error: BaseException) -> None:
        """The script failed outside the resilient function."""
        self._monitor.feed(MainRaised(step=self._host.kept.step, error=report_of(error)))

    def _stay(self, order: RankStart, function: Callable[..., Any]) -> None:
        """One generation, from its start to the moment when the main thread is out."""
        outcome = self._outcome(order, function)
        arrived = isinstance(outcome, MainInterrupted)
        where = self._monitor.take_swallowed(arrived=arrived)
        if where is not None:
            hint = "catch Exception, not BaseException"
            text = f"user code caught stepfast.Interrupted at {where}; {hint}"
            self._host.note("Interrupted swallowed", text)
        self._monitor.feed(outcome)
        if not isinstance(outcome, MainReturned) or self._monitor.must_leave:
            self._become_quiet()

    def _outcome(self, order: RankStart, function: Callable[..., Any]) -> RankInput:
        host = self._host
        run = Run(host)
        try:
            self._enter(order)
            with self._monitor.user_code():
                self._returned = function(run)
            self._monitor.check()
            step = run.finish()
            host.finish_snapshots(step)
            return MainReturned(step=step, digests=host.digests(step))
        except Interrupted as interrupted:
            forget_frames(interrupted)
            return MainInterrupted()
        except BaseException as error:  # noqa: BLE001 - the user's; it becomes a fault
            report = report_of(error, forming=host.is_forming)
            host.device.raised(report)
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(_shown(report))  # a script may have closed it
            forget_frames(error)
            return MainRaised(step=host.kept.step, error=report)
        finally:
            run.is_over = True

    def _enter(self, order: RankStart) -> None:
        """Log, environment, groups: everything before user code runs."""
        host = self._host
        host.enter(order)
        _redirect_output(Path(order.log_path))
        self._environment.update(_launcher_names(order))
        put_worker_files_into(Path(order.slot_directory).parent / "tmp")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // order.local_world_size))
        host.device.enter(order)
        assert self._rng_first is not None, "the function was entered"
        self._rng_first = self._rng_first.with_device()
        self._rng_first.apply()
        if not host.faults.is_armed:
            host.faults = self._make_faults(order, host.note)
        if order.generation > 1:
            with self._monitor.user_code():
                host.faults.reach("recovery", order.step or 0)
        self._form(order)
        host.account.formed = time.monotonic()

    def _form(self, order: RankStart) -> None:
        host = self._host
        if host.groups is None:
            backend = OF_DEVICE[host.device_type]
            backend.prepare(self._environment)
            host.groups = Groups(backend, enter_thread=host.device.enter_thread)
            self._monitor.set_abort(host.groups.abort)
        settings = order.settings
        limits = timeouts_of(settings)
        membership = Membership(
            generation=order.generation,
            rank=order.rank,
            world_size=order.world_size,
            store_host=order.store_host,
            store_port=order.store_port,
            forming_timeout_s=limits.forming_limit_s,
            trace_path=Path(order.log_path).with_suffix(".trace.json"),
        )
        with host.forming_groups():
            host.groups.form(membership, lambda: self._monitor.must_leave)

    def _become_quiet(self) -> None:
        """Leave nothing of the generation behind, then say so."""
        host = self._host
        host.is_forming = False
        host.whereabout.clear()
        host.device.progress.forget()
        try:
            host.settle_snapshots()
            host.kept.drop_loaders()
            if host.groups is not None:
                host.groups.dissolve()
            torch_private.reset_modes()
        except OperatingError:
            # What cannot be taken apart needs a fresh process; the user's code has no part in it.
            traceback.print_exc()
            os._exit(EXIT_TRY_AGAIN)
        unusable = host.device.leave()
        obstacle = host.kept.obstacle()
        has_collectives = obstacle is None and host.kept.has_collectives
        if obstacle is not None:
            host.forget_built()
        gc.collect()
        if unusable is None:
            unusable = host.device.free_memory(is_built_again=obstacle is not None)
        self._monitor.feed(MainQuiet(obstacle, has_collectives, unusable))

    def _leave_for_good(self) -> None:
        self._host.kept.drop_loaders()
        if self._host.groups is not None:
            self._host.groups.dissolve()

    def _answer_probe(self, probe: int) -> ProbeAnswer:
        """In the monitor thread."""
        where, seconds, stack = self._host.whereabout.look()
        if where is Whereabouts.USER and self._host.device.progress.is_device_busy():
            where = Whereabouts.DEVICE
        groups = self._host.groups
        operations = groups.progress().operations if groups is not None else 0
        return ProbeAnswer(
            probe=probe,
            whereabouts=where,
            seconds_there=seconds,
            collectives=operations,
            stack=stack,
        )


_REFUSAL_CHARS_MAX = 200  # the job's console has all of it


def _shown(report: ExceptionReport) -> str:
    """What the rank's log shows: one line where a traceback says nothing."""
    if report.error_class is ErrorClass.COLLECTIVE:
        return f"stepfast: lost its peers ({report.type})\n"
    if is_plain_refusal(report):
        more = len(report.message) - _REFUSAL_CHARS_MAX
        rest = "... (the whole is in events.jsonl)" if more > 0 else ""
        return f"stepfast: {report.message[:_REFUSAL_CHARS_MAX]}{rest}\n"
    return report.traceback


def _redirect_output(path: Path) -> None:
    """Both outputs go to the generation's own file; what was buffered stays in the old one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # a script may have closed it
    path.parent.mkdir(parents=True, exist_ok=True)
    occupy_standard_descriptors()
    log = open_own(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _launcher_names(order: RankStart) -> dict[str, str]:
    """What scripts expect of a launcher."""
    return {
        "RANK": str(order.rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_RANK": str(order.local_rank),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "GROUP_RANK": str(order.node),
        "MASTER_ADDR": order.store_host,
        "MASTER_PORT": str(order.store_port),
    }
