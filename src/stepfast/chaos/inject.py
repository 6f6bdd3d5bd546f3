"""Faults injected on purpose: `--fault KIND@rank=R,step=S[,at=POINT][,for=SECONDS]`.

Owns: the grammar, the ways to fail, the mark that a fault has fired. The words are those of
detection (`core.faults`), so that what was injected can be scored against what was seen.
Invariant: a fault fires once, not again when its step is run a second time, whoever runs it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepfast.errors import ConfigError

KINDS = ("exception", "kill", "exit", "segv", "hang", "stop", "gil", "slow")
POINTS = ("forward", "backward", "optimizer", "boundary", "recovery")
_FOREVER_S = 86_400.0
_EXIT_CODE = 17  # of `exit`; nothing else here uses it


class InjectedFaultError(RuntimeError):
    """The exception of kind `exception`: an ordinary error of user code, as far as anybody can
    tell.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """One fault to inject."""

    kind: str
    rank: int
    step: int
    at: str = "forward"
    for_s: float = _FOREVER_S


def parse_fault(text: str) -> FaultSpec:
    """Read one `--fault`. Raises ConfigError that says what is wrong."""
    kind, _, rest = text.partition("@")
    if kind not in KINDS:
        raise ConfigError(f"--fault {text}: unknown kind {kind!r}; one of {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in ("rank", "step", "at", "for") or not equals or key in given:
            raise ConfigError(f"--fault {text}: cannot read {part!r}; rank=R,step=S[,at=][,for=]")
        given[key] = value
    try:
        at = given.get("at", "forward")
        seconds = float(given["for"]) if "for" in given else _FOREVER_S
        spec = FaultSpec(
            kind=kind, rank=int(given["rank"]), step=int(given["step"]), at=at, for_s=seconds
        )
    except KeyError as missing:
        raise ConfigError(f"--fault {text}: {missing.args[0]}= is missing") from None
    except ValueError:
        raise ConfigError(f"--fault {text}: rank, step and for are numbers") from None
    if at not in POINTS:
        raise ConfigError(f"--fault {text}: unknown point {at!r}; one of {', '.join(POINTS)}")
    if kind == "slow" and "for" not in given:
        raise ConfigError(f"--fault {text}: slow needs for=SECONDS")
    if spec.rank < 0 or spec.step < 0 or spec.for_s <= 0:
        raise ConfigError(f"--fault {text}: rank and step from 0, for above 0")
    return spec


class Injector:
    """Implements `runtime.ports.FaultPoints` for one rank."""

    def __init__(
        self,
        texts: Sequence[str],
        *,
        rank: int,
        marks: Path,
        note: Callable[[str, str], None],
    ) -> None:
        """`marks`: a directory of the job in which each fired fault leaves a file."""
        specs = [(index, parse_fault(text)) for index, text in enumerate(texts)]
        self._pending = [
            (i, s) for i, s in specs if s.rank == rank and not (marks / str(i)).exists()
        ]
        self._marks = marks
        self._note = note

    @property
    def is_armed(self) -> bool:
        """Whether any fault of this rank is still to come."""
        return bool(self._pending)

    def reach(self, point: str, step: int) -> None:
        """Fire what is due here. `recovery` is reached with the step that is resumed from: that of
        the fault or the one before, for a rank may not have completed it.
        """
        for index, spec in list(self._pending):
            is_reached = step == spec.step or (point == "recovery" and step >= spec.step - 1)
            if spec.at == point and is_reached and self._mark(index):
                self._pending.remove((index, spec))
                self._fire(spec)

    def _mark(self, index: int) -> bool:
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._marks / str(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def _fire(self, spec: FaultSpec) -> None:
        self._note(
            "fault injected",
            f"{spec.kind} at {spec.at} of step {spec.step} t={time.monotonic():.6f}",
        )
        _ACTS[spec.kind](spec)


def _raise(spec: FaultSpec) -> None:
    raise InjectedFaultError(f"injected at {spec.at} of step {spec.step}")


def _segv(spec: FaultSpec) -> None:
    ctypes.string_at(0)


def _stop(spec: FaultSpec) -> None:
    if spec.for_s < _FOREVER_S:
        pid = os.getpid()
        waker = os.fork()
        if waker == 0:
            time.sleep(spec.for_s)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_gil(spec: FaultSpec) -> None:
    library = ctypes.PyDLL(None)  # PyDLL keeps the interpreter lock during the call
    library.poll(None, 0, int(spec.for_s * 1000))


def _sleep(spec: FaultSpec) -> None:
    time.sleep(spec.for_s)


_ACTS: dict[str, Callable[[FaultSpec], Any]] = {
    "exception": _raise,
    "kill": lambda spec: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda spec: os._exit(_EXIT_CODE),
    "segv": _segv,
    "hang": _sleep,
    "stop": _stop,
    "gil": _hold_gil,
    "slow": _sleep,
}
