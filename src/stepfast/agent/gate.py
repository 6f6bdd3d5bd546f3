"""The gate that a node passes before it joins a job: its devices are looked at, and its owner's own
check is run, each in a process of its own with a deadline.

Owns: what is run, and the verdict. Does not own: what is judged (`health`), what follows from a
verdict (`agent.daemon`).
Invariants: nothing of a driver is loaded into the agent; what was not looked at is never healthy;
who does not answer is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepfast.agent.bounded import Ended, run_bounded
from stepfast.core.messages import PROTOCOL_VERSION
from stepfast.core.node_health import HealthReported
from stepfast.core.terms import NodeId
from stepfast.events import CheckFinding, NodeChecked
from stepfast.health import command, look
from stepfast.health.verdicts import Finding, Verdict, unhealthy, unknown
from stepfast.runtime.ports import Clock

JOIN, REJOIN = "join", "rejoin"
ADMIT, REFUSE = "admit", "refuse"
# A node that was here is missed soon (`core.job`), and trains meanwhile: a slow answer is none.
_REJOIN_LIMIT_S = 3.0
_DEVICES = "devices"
_WORD = msgspec.json.Decoder(Finding | str)
_SLOW = "make it quicker, or allow more by health_limit_s"
_STUCK = "repair the driver until `nvidia-smi` answers, or replace the node"
_ORDER = (Verdict.UNHEALTHY, Verdict.UNKNOWN, Verdict.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What is looked at before a node joins, and what is done about what could not be."""

    command: tuple[str, ...] = ()
    unknown: str = ADMIT
    gpus: int = 0
    efas: int = 0
    limit_s: float = 30.0
    root: Path = Path("/")  # where dev and sys are


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found at one time. `findings` are never empty."""

    occasion: str
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of all."""
        return next(v for v in _ORDER if any(f.verdict is v for f in self.findings))

    def of(self, verdict: Verdict) -> tuple[Finding, ...]:
        """Those that say so."""
        return tuple(f for f in self.findings if f.verdict is verdict)


class Gate:
    """Looks at this node, in the running event loop."""

    def __init__(self, checks: Checks, clock: Clock) -> None:
        self._checks = checks
        self._clock = clock

    def admits(self, seen: Look) -> bool:
        """Whether a node may join that was found like this."""
        if seen.verdict is Verdict.UNKNOWN:
            return self._checks.unknown == ADMIT
        return seen.verdict is Verdict.HEALTHY

    async def look(self, occasion: str) -> Look | None:
        """What is found now; None where there is nothing to look at."""
        checks = self._checks
        is_rejoin = occasion == REJOIN
        limit_s = min(checks.limit_s, _REJOIN_LIMIT_S) if is_rejoin else checks.limit_s
        late = Verdict.UNKNOWN if is_rejoin else Verdict.UNHEALTHY
        work = []
        if look.has_gpus(checks.root, checks.gpus) or look.has_fabric(checks.root, checks.efas):
            work.append(self._devices(limit_s, late))
        if checks.command:
            work.append(self._command(limit_s, late))
        began = self._clock.monotonic()
        found = [finding for part in await asyncio.gather(*work) for finding in part]
        if not found:
            return None
        seconds = self._clock.monotonic() - began
        return Look(occasion=occasion, findings=tuple(found), seconds=seconds)

    async def _devices(self, limit_s: float, late: Verdict) -> list[Finding]:
        checks = self._checks
        words = look.command(checks.root, checks.gpus, checks.efas)
        ended = await _run(words, limit_s)
        if isinstance(ended, str):
            return [unknown(_DEVICES, ended)]
        found, last = _words_of(ended.output)
        at = last or "its own start"
        if ended.exit_code is None:
            text = f"no answer within {limit_s:g} s, looking at {at}"
            return [*found, _late(_DEVICES, text, _STUCK, late)]
        if ended.exit_code != 0:
            how = f"signal {-ended.exit_code}" if ended.exit_code < 0 else "an error"
            errors = ended.errors.decode(errors="replace").strip().splitlines()[-1:]
            text = f"the look ended with {how}, at {at}: {' '.join(errors)}"
            return [*found, unknown(_DEVICES, text.rstrip(": "))]
        return found

    async def _command(self, limit_s: float, late: Verdict) -> list[Finding]:
        ended = await _run(self._checks.command, limit_s)
        if isinstance(ended, str):
            return [unknown(command.CHECK, ended)]
        if ended.exit_code is None:
            text = f"did not end within {limit_s:g} s, and was killed"
            return [_late(command.CHECK, text, _SLOW, late)]
        return command.findings_of(ended.exit_code, ended.output, ended.errors)


def health_message(node: NodeId, seen: Look, *, admitted: bool) -> HealthReported:
    """What the coordinator is told."""
    findings = tuple(
        CheckFinding(check=f.check, verdict=f.verdict.value, evidence=f.evidence, change=f.change)
        for f in seen.findings
        if f.verdict is not Verdict.HEALTHY
    )
    checked = NodeChecked(
        node=node,
        occasion=seen.occasion,
        verdict=seen.verdict.value,
        admitted=admitted,
        seconds=seen.seconds,
        healthy=tuple(f.check for f in seen.of(Verdict.HEALTHY)),
        findings=findings,
    )
    return HealthReported(protocol=PROTOCOL_VERSION, checked=checked)


def refusal_of(seen: Look) -> str:
    """Why such a node does not join, in one line that says what to change."""
    if seen.verdict is Verdict.UNKNOWN:
        first, why = seen.of(Verdict.UNKNOWN)[0], "this node was not wholly looked at"
        change = f"{first.change}, or set health_unknown to admit".removeprefix(", or ")
    else:
        first, why = seen.of(Verdict.UNHEALTHY)[0], "this node is unfit"
        change = first.change
    more = len(seen.of(seen.verdict)) - 1
    also = f" (and {more} more)" if more else ""
    return f"{why}: {first.check}: {first.evidence}{also}; {change}"


def _late(check: str, text: str, change: str, verdict: Verdict) -> Finding:
    return (unhealthy if verdict is Verdict.UNHEALTHY else unknown)(check, text, change)


async def _run(words: Sequence[str], limit_s: float) -> Ended | str:
    try:
        return await run_bounded(words, limit_s)
    except OSError as error:
        return f"{words[0]} cannot be started: {error.strerror}"


def _words_of(output: bytes) -> tuple[list[Finding], str]:
    """The findings of a look, and what it looked at last."""
    found: list[Finding] = []
    last = ""
    for line in output.splitlines():
        try:
            word = _WORD.decode(line)
        except msgspec.DecodeError:
            continue  # a driver's library that prints
        if isinstance(word, str):
            last = word
        else:
            found.append(word)
    return found, last
