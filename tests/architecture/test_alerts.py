"""The alert rules ask for metrics that there are, by labels that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from architecture.source_tree import ROOT
from stepfast.observe.exposition import Family
from stepfast.observe.metrics import JobMetrics
from stepfast.observe.node_metrics import NodeLevels, NodeMetrics

RULES = ROOT / "deploy" / "observability" / "alerts.yaml"
_METRIC = re.compile(r"\bstepfast_\w+")
_MATCHER = re.compile(r"(stepfast_\w+)\{([^}]*)\}")
_BY = re.compile(r"\bby\s*\(([^)]*)\)")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
OF_TARGETS = {"namespace", "job", "pod", "instance"}  # what Prometheus adds to every series


def families() -> tuple[Family, ...]:
    return (*JobMetrics().families(0.0), *NodeMetrics().families(NodeLevels()))


FAMILIES = {family.name for family in families()}  # what texts for people may call them by


def exported() -> dict[str, set[str]]:
    """The labels of every series that a coordinator or an agent has."""
    found: dict[str, set[str]] = {}
    for family in families():
        for name in family.series:
            le = {"le"} if name.endswith("_bucket") else set()
            found[name] = {*family.labels, *le}
    return found


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def misses(expression: str) -> Iterator[str]:
    """What an expression asks for that nobody has."""
    series = exported()
    named = set(_METRIC.findall(expression))
    yield from sorted(named - set(series))
    for name, matchers in _MATCHER.findall(expression):
        known = series.get(name, set()) | OF_TARGETS
        yield from (f"{name}: {label}" for label in _LABEL.findall(matchers) if label not in known)
    known = OF_TARGETS.union(*(series.get(name, set()) for name in named))
    for labels in _BY.findall(expression):
        yield from (label for label in labels.replace(" ", "").split(",") if label not in known)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_there_is(rule: dict[str, Any]):
    assert not list(misses(rule["expr"]))
    assert _METRIC.search(rule["expr"]), "a rule about nothing of ours"
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        assert set(_METRIC.findall(text)) <= set(exported()) | FAMILIES, text
        for label in re.findall(r"\$labels\.(\w+)", text):
            asked = set().union(*(b.replace(" ", "").split(",") for b in _BY.findall(rule["expr"])))
            assert label in (asked or OF_TARGETS), f"{label} is not among the alert's labels"


def test_the_recovery_objective_has_its_alert():
    assert any("stepfast_slo_breaches_total" in rule["expr"] for rule in rules())


def test_names_of_alerts_are_unique():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("expression", "missed"),
    [
        ("stepfast_no_such_thing > 0", ["stepfast_no_such_thing"]),
        ("rate(stepfast_recovery_seconds[5m])", ["stepfast_recovery_seconds"]),
        ('stepfast_ranks{stat="absent"}', ["stepfast_ranks: stat"]),
        ("sum by (kind) (stepfast_step)", ["kind"]),
        ('stepfast_recovery_seconds_bucket{phase="total",kind!="hang"}', []),
    ],
)
def test_the_look_sees_what_is_not_there(expression: str, missed: list[str]):
    assert list(misses(expression)) == missed
