"""The tiers are the same everywhere: folders, markers, Makefile, README; an empty one fails."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from architecture.source_tree import ROOT, files
from tiers import TIERS

CI_TIERS = [name for name, tier in TIERS.items() if tier.in_ci]


def test_every_tier_has_its_marker():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = [m.split(":")[0] for m in settings["tool"]["pytest"]["ini_options"]["markers"]]
    assert markers == [*TIERS, "long", "sweeps"]


def test_make_runs_the_tiers_of_ci():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^TIERS\s*:=(.*)$", makefile, re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == CI_TIERS


def test_ci_runs_the_checks_and_exactly_make_test():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    stages = re.findall(r"^stage \"\w+\" (make \w+)$", script, re.MULTILINE)
    assert stages == ["make setup", "make lint", "make types", "make contracts", "make test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("name", TIERS)
def test_every_tier_is_described(name: str):
    assert f"`{name}`" in (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TIERS)
def test_every_tier_has_tests_or_says_what_brings_them(name: str):
    folder = ROOT / "tests" / name
    has_tests = folder.is_dir() and any(
        p.name.startswith("test_") for p in files(".py", under=folder)
    )
    assert has_tests or TIERS[name].not_yet, f"tests/{name} has no test"


# The rules of tests/conftest.py, tried on a copy of it with tiers of its own.

TRIAL = """\
import pytest
def test_one(): {body}
"""


def run_trial(tmp_path: Path, tiers: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest on a small tree: in each tier one test of the given body."""
    tests = tmp_path / "tests"
    for tier, body in tiers.items():
        (tests / tier).mkdir(parents=True)
        (tests / tier / "test_trial.py").write_text(TRIAL.format(body=body), encoding="utf-8")
    for name in ("tests/conftest.py", "tests/tiers.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


SKIP = "pytest.skip('no device here')"


def test_a_tier_that_only_skipped_fails_the_run(tmp_path: Path):
    status, output = run_trial(tmp_path, {"unit": "pass", "golden": SKIP}, "tests")
    assert status == 1, output
    assert "FAILED tier golden" in output
    assert "skipped 1: no device here" in output


def test_a_tier_that_was_asked_for_alone_counts_too(tmp_path: Path):
    status, output = run_trial(tmp_path, {"unit": SKIP}, "tests/unit", "-m", "not long")
    assert status == 1, output
    assert "FAILED tier unit" in output


def test_one_file_that_only_skipped_is_fine(tmp_path: Path):
    status, output = run_trial(
        tmp_path, {"unit": SKIP, "golden": "pass"}, "tests/unit/test_trial.py"
    )
    assert status == 0, output


def test_tiers_that_ran_are_fine(tmp_path: Path):
    status, output = run_trial(tmp_path, {"unit": "pass", "golden": "pass"}, "tests")
    assert status == 0, output
    assert "FAILED tier" not in output


def test_a_test_outside_of_every_tier_is_refused(tmp_path: Path):
    status, output = run_trial(tmp_path, {"unit": "pass", "elsewhere": "pass"}, "tests")
    assert status == 4, output
    assert "no tier's folder" in output
