"""The tiers of the tests, and what holds for all of them.

Owns: a test's tier is its folder; the tier gives it its marker and its time limit. At the end a
table says what each tier ran, and each reason for a skip is counted. A tier that was asked for as a
whole and ran nothing fails the run.

Does not own: fixtures of one tier; those live in that tier's own `conftest.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest

from tiers import LONG_TEST_LIMIT_S, TIERS

TESTS = Path(__file__).parent


@dataclass(slots=True)
class Tally:
    """What one tier did in this run."""

    ran: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Account:
    """What this run did, by tier, and the reasons for its skips."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)

    def add(self, report: pytest.TestReport) -> None:
        """Count one phase of one test."""
        tally = self.tallies.setdefault(_tier_of(Path(report.nodeid.split("::")[0])), Tally())
        tally.seconds += report.duration
        expected_to_fail = hasattr(report, "wasxfail")
        if report.skipped and not expected_to_fail:
            tally.skipped += 1
            self.skips[_skip_reason(report)] += 1
        elif report.when == "call":
            tally.ran += 1
        tally.failed += report.failed


ACCOUNT = pytest.StashKey[Account]()


# CI tries the same examples each time; elsewhere new ones, and a failure prints how to repeat it.
hypothesis.settings.register_profile(
    "stepfast", deadline=None, print_blob=True, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("stepfast")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ACCOUNT] = Account()
    config.pluginmanager.register(_Recorder(config.stash[ACCOUNT]), "stepfast-account")


class _Recorder:
    def __init__(self, account: Account) -> None:
        self._account = account

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._account.add(report)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder gives it its tier's marker and time limit; a nearer `timeout` mark wins.

    Within a tier, who sweeps goes last: helpers that other tests keep would be swept too.
    """
    tiers = list(dict.fromkeys(_tier_of(item.path) for item in items))
    items.sort(
        key=lambda i: (tiers.index(_tier_of(i.path)), i.get_closest_marker("sweeps") is not None)
    )
    for item in items:
        tier_name = _tier_of(item.path)
        if tier_name not in TIERS:
            raise pytest.UsageError(
                f"{item.nodeid} is in no tier's folder; tests/README.md names them"
            )
        item.add_marker(tier_name)
        if item.get_closest_marker("timeout") is None:
            is_long = item.get_closest_marker("long") is not None
            limit_s = LONG_TEST_LIMIT_S if is_long else TIERS[tier_name].test_limit_s
            item.add_marker(pytest.mark.timeout(limit_s))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run that is green only because a tier ran nothing."""
    if _empty_tiers(session.config) and exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """One line for each tier, one for each reason of a skip, one for each tier that ran nothing."""
    account, write = config.stash[ACCOUNT], terminalreporter.write_line
    if account.tallies:
        terminalreporter.section("tiers")
    for name in sorted(account.tallies, key=_order):
        tally = account.tallies[name]
        budget = f"of {TIERS[name].budget_s:.0f} s" if name in TIERS else ""
        write(
            f"{name:13} {tally.ran:5} ran {tally.failed:4} failed {tally.skipped:4} skipped"
            f" {tally.seconds:8.1f} s {budget}"
        )
    for reason, count in sorted(account.skips.items()):
        write(f"skipped {count}: {reason}")
    for name in _empty_tiers(config):
        write(f"FAILED tier {name}: it was asked for as a whole and ran no test", red=True)


def _tier_of(path: Path) -> str:
    """The folder below `tests` that the path is in; empty where it is in none."""
    absolute = path if path.is_absolute() else TESTS.parent / path
    parts = absolute.relative_to(TESTS).parts if absolute.is_relative_to(TESTS) else ()
    return parts[0] if len(parts) > 1 else ""


def _empty_tiers(config: pytest.Config) -> list[str]:
    """The tiers that were asked for as a whole and ran nothing.

    Asked for as a whole: an argument is the tier's folder or one above it, and no other selection
    than `-m "not long"` was made.
    """
    option = config.option
    if option.keyword or option.collectonly or option.markexpr not in ("", "not long"):
        return []
    if any(getattr(option, name, False) for name in ("lf", "failedfirst", "stepwise", "deselect")):
        return []
    if config.stash[ACCOUNT].tallies and option.maxfail:
        return []  # the run may have ended early
    asked = [Path(config.invocation_params.dir, arg).resolve() for arg in config.args]
    tallies = config.stash[ACCOUNT].tallies
    return [
        name
        for name in TIERS
        if (TESTS / name).is_dir()
        and any((TESTS / name).is_relative_to(path) for path in asked)
        and tallies.get(name, Tally()).ran == 0
    ]


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def _order(tier_name: str) -> int:
    return list(TIERS).index(tier_name) if tier_name in TIERS else len(TIERS)
