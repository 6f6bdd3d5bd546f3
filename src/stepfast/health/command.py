"""What a user's own health check said, by its exit code and by JSON on its standard output.

Owns: the contract. Does not own: running it (`agent.gate`).

The exit code is the verdict: 0 is healthy, anything else is not. JSON says more: an object, or a
list of them, with any of `check`, `verdict` (healthy, unhealthy, unknown), `evidence` and `change`;
what else it has is passed over. It can make an exit code of 0 worse, and none better. Without JSON
the last line is the evidence.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

import msgspec

from stepfast.errors import ConfigError
from stepfast.health.verdicts import Finding, Verdict, healthy, unhealthy, unknown

CHECK = "health check"
_FINDINGS_MAX = 32
_NAME_MAX = 60
_TEXT_MAX = 300
_REPAIR = "see what the command says, or replace the node"


class _Said(msgspec.Struct, frozen=True):
    check: str = ""
    verdict: Verdict = Verdict.HEALTHY
    evidence: str = ""
    change: str = ""


def parsed(text: str) -> tuple[str, ...]:
    """The words of the command, none for no command. Raises ConfigError where it cannot be run."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--health-check {text!r}: {error}") from error
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"--health-check: there is no command {words[0]!r} that can be run")
    return tuple(words)


def findings_of(exit_code: int, output: bytes, errors: bytes) -> list[Finding]:
    """What it found; `exit_code` below 0: the signal that ended it."""
    text = output.decode(errors="replace").strip()
    ended = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    said, problem = _said_in(text)
    found = [_finding(each) for each in said]
    if exit_code == 0:
        if problem:
            return [unknown(CHECK, f"exit code 0, but its JSON is not understood: {problem}")]
        return found or [healthy(CHECK, _last_line(text) or "exit code 0")]
    if any(f.verdict is Verdict.UNHEALTHY for f in found):
        return found
    words = _last_line(errors.decode(errors="replace")) or ("" if said else _last_line(text))
    return [*found, unhealthy(CHECK, f"{ended}{': ' if words else ''}{words}", _REPAIR)]


def _said_in(text: str) -> tuple[Sequence[_Said], str]:
    """What the JSON says, or why it says nothing; text that is none says nothing, and is fine."""
    if text[:1] not in ("{", "["):
        return (), ""
    try:
        found = msgspec.json.decode(text, type=_Said | list[_Said])
    except msgspec.DecodeError as error:
        return (), _short(str(error))
    many = found if isinstance(found, list) else [found]
    if len(many) > _FINDINGS_MAX:
        return (), f"{len(many)} findings are more than {_FINDINGS_MAX}"
    return many, ""


def _finding(said: _Said) -> Finding:
    name = _short(said.check, _NAME_MAX)
    change = _short(said.change) or (_REPAIR if said.verdict is Verdict.UNHEALTHY else "")
    return Finding(
        check=f"{CHECK}: {name}" if name else CHECK,
        verdict=said.verdict,
        evidence=_short(said.evidence) or said.verdict.value,
        change=change,
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return _short(lines[-1]) if lines else ""


def _short(text: str, most: int = _TEXT_MAX) -> str:
    """One line of printable characters."""
    line = "".join(c if c.isprintable() else " " for c in text.strip())
    return line if len(line) <= most else f"{line[: most - 3]}..."
