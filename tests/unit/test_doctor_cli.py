"""What `stepfast doctor` shows a person."""

from __future__ import annotations

from stepfast.cli.doctor import lines_of
from stepfast.health.verdicts import healthy, unhealthy, unknown

FOUND = [healthy("a", "fine"), unhealthy("bb", "broken", "mend it"), unknown("c", "who knows")]


def test_lines_are_aligned_and_say_what_to_change():
    assert lines_of(FOUND, coloured=False) == [
        "healthy    a   fine",
        "unhealthy  bb  broken",
        "           change: mend it",
        "unknown    c   who knows",
        "1 healthy, 1 unhealthy, 1 unknown",
    ]


def test_colour_changes_no_column():
    plain, coloured = (lines_of(FOUND, coloured=c) for c in (False, True))
    for before, after in zip(plain, coloured, strict=True):
        for code in ("\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"):
            after = after.replace(code, "")
        assert after == before
