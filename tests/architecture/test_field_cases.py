"""tests/field_cases.toml has a row for each case from the field, and its tests exist."""

from __future__ import annotations

import re
import tomllib

import pytest

from architecture.source_tree import ROOT, functions

TABLE = ROOT / "tests" / "field_cases.toml"
SECTIONS = {
    "checkpoint save": (range(1, 16), range(115, 126)),
    "checkpoint load and reshard": (range(16, 26), range(126, 138)),
    "in-process restart and abort": (range(26, 36), range(138, 146)),
    "launcher and rendezvous": (range(36, 49), range(146, 156)),
    "health checks": (range(58, 62), range(63, 64), range(159, 167)),
    "Kubernetes and EKS": (range(72, 86), range(175, 185)),
    "SIGTERM and preemption": (range(98, 105), range(197, 201)),
    "loader and random state on resume": (range(64, 72), range(167, 175)),
    "storage": (range(86, 92), range(185, 190)),
    "security": (range(111, 115), range(204, 206)),
}
IDS = [f"FC-{n:02d}" for n in sorted(n for part in SECTIONS.values() for r in part for n in r)]
ANSWERS = ("test", "cannot", "later")
# How a capability may be called, so that the same one always has the same name.
CAPABILITIES = {
    "node replacement and spares",
    "shrink and grow",
    "coordinator restart",
    "peer replicas",
    "checkpoint store",
    "GPU path",
    "health gate",
    "Kubernetes actuator",
    "batch skipping",
    "observability",
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
