"""A user's own health check: its exit code decides, its JSON says more."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepfast.errors import ConfigError
from stepfast.health.command import CHECK, findings_of, parsed
from stepfast.health.verdicts import Finding, Verdict

HEALTHY, UNHEALTHY, UNKNOWN = Verdict.HEALTHY, Verdict.UNHEALTHY, Verdict.UNKNOWN


def said(exit_code: int, output: Any = "", errors: str = "") -> list[Finding]:
    text = output if isinstance(output, str) else json.dumps(output)
    return findings_of(exit_code, text.encode(), errors.encode())


@pytest.mark.parametrize(
    ("exit_code", "output", "verdicts"),
    [
        (0, "", [HEALTHY]),
        (0, "all is well", [HEALTHY]),
        (0, {}, [HEALTHY]),
        (0, {"verdict": "healthy", "more": [1]}, [HEALTHY]),
        (0, {"verdict": "unknown"}, [UNKNOWN]),
        (0, {"verdict": "unhealthy"}, [UNHEALTHY]),
        (0, [{"check": "a"}, {"check": "b", "verdict": "unknown"}], [HEALTHY, UNKNOWN]),
        (0, {"verdict": "sick"}, [UNKNOWN]),
        (0, {"verdict": 3}, [UNKNOWN]),
        (0, "{not json", [UNKNOWN]),
        (0, [{}] * 33, [UNKNOWN]),
        (1, "", [UNHEALTHY]),
        (1, {"verdict": "unhealthy"}, [UNHEALTHY]),
        (1, {"verdict": "healthy"}, [HEALTHY, UNHEALTHY]),
        (1, {"verdict": "unknown"}, [UNKNOWN, UNHEALTHY]),
        (1, "{not json", [UNHEALTHY]),
        (-9, "", [UNHEALTHY]),
    ],
)
def test_json_can_make_an_exit_code_worse_and_never_better(
    exit_code: int, output: Any, verdicts: list[Verdict]
):
    found = said(exit_code, output)
    assert [f.verdict for f in found] == verdicts
    assert all(f.change for f in found if f.verdict is UNHEALTHY)


def test_the_evidence_is_what_it_says_or_its_last_line():
    assert said(0, "looked\nat all")[0].evidence == "at all"
    assert said(3, "", "a\nlost disk")[0].evidence == "exit code 3: lost disk"
    assert said(3, "on stdout")[0].evidence == "exit code 3: on stdout"
    assert said(-11)[0].evidence == "signal 11"
    (finding,) = said(1, {"check": "nccl", "verdict": "unhealthy", "evidence": "9 GB/s"})
    assert (finding.check, finding.evidence) == (f"{CHECK}: nccl", "9 GB/s")


def test_what_it_says_is_one_bounded_line():
    wild = {"check": "x" * 999, "verdict": "unknown", "evidence": "a\nb\x1b[31m" + "y" * 9999}
    (finding,) = said(0, wild)
    assert len(finding.check) < 90 and len(finding.evidence) <= 300
    assert finding.evidence.startswith("a b [31m") and "\x1b" not in finding.evidence
    (finding,) = findings_of(1, b"\xff\xfe\n", b"")
    assert finding.evidence.isprintable()


def test_a_command_is_words_and_has_to_be_there():
    assert parsed("") == ()
    assert parsed("sh -c 'exit 3'") == ("sh", "-c", "exit 3")
    for text, words in (("sh -c 'x", "quotation"), ("no-such-command-here -x", "no command")):
        with pytest.raises(ConfigError, match=words):
            parsed(text)
