"""tests/field_cases.toml has a row for each case from the field, and its tests exist."""

from __future__ import annotations

import re
import tomllib

import pytest

from architecture.source_tree import ROOT, functions

TABLE = ROOT / "tests" / "field_cases.toml"
# Loading and resharding (16-25). In-process restart and abort (26-35, 138-145); launcher and
# rendezvous (36-48, 146-155); state that has to come back (17-19, 64, 126-128, 167, 169, 172).
STATE = (64, 126, 127, 128, 167, 169, 172)
IDS = [f"FC-{n}" for n in sorted((*range(16, 26), *range(26, 49), *range(138, 156), *STATE))]
ANSWERS = ("test", "cannot", "later")
# How a capability may be called, so that the same one always has the same name.
CAPABILITIES = {
    "node replacement and spares",
    "shrink and grow",
    "coordinator restart",
    "peer replicas",
    "checkpoint store",
    "GPU path",
    "Kubernetes actuator",
    "batch skipping",
}


def rows() -> list[dict[str, str]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))["case"]


def test_every_case_has_one_row_in_order():
    assert [row["id"] for row in rows()] == IDS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["id"])
def test_a_row_gives_one_answer(row: dict[str, str]):
    given = [answer for answer in ANSWERS if answer in row]
    assert len(given) == 1, f"exactly one of {ANSWERS}"
    assert set(row) == {"id", "title", *given}
    assert row["title"].strip()
    assert row[given[0]].strip()


@pytest.mark.parametrize("row", [r for r in rows() if "later" in r], ids=lambda row: row["id"])
def test_a_later_row_names_the_capability(row: dict[str, str]):
    assert row["later"].split(":")[0] in CAPABILITIES
    assert not re.search(r"\bissue\b|#\d", row["later"])


@pytest.mark.parametrize("row", [r for r in rows() if "test" in r], ids=lambda row: row["id"])
def test_a_named_test_exists(row: dict[str, str]):
    file_name, _, test_name = row["test"].partition("::")
    path = ROOT / file_name
    assert file_name.startswith("tests/")
    assert path.is_file(), f"{file_name} does not exist"
    names = {name.replace(".", "::") for name, _ in functions(path)}
    assert test_name in names, f"{file_name} has no {test_name}"
