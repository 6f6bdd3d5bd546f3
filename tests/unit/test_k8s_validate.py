"""The manifests' validator: every rule by a passing and a failing file, and the report itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepfast.cli.main import main
from stepfast.errors import ConfigError
from stepfast.k8s.target import Target
from stepfast.k8s.validate.documents import read_documents
from stepfast.k8s.validate.findings import Finding, Report
from stepfast.k8s.validate.lints.rules import CHECKLIST, RULES, SCHEMA
from stepfast.k8s.validate.quantities import quantity
from stepfast.k8s.validate.schemas import Schemas
from stepfast.k8s.validate.validate import validate

MANIFESTS = Path(__file__).parent / "k8s_manifests"
EXCELLENT = MANIFESTS / "excellent.yaml"
SAMPLE = MANIFESTS / "sample_choices.yaml"
OLD = Target(kubernetes=(1, 33))
NAMES = [rule.name for rule in RULES]


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


def found_in(
    text: str | bytes | Path, target: Target | None = None, schemas: Schemas | None = None
) -> Report:
    content = text.read_bytes() if isinstance(text, Path) else text
    content = content.encode() if isinstance(content, str) else content
    return validate({"file.yaml": content}, target or Target(), schemas=schemas)


def of_rule(report: Report, rule: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == rule]


def test_the_checklist_is_whole_and_its_names_are_unique():
    assert CHECKLIST == 25
    assert [rule.number for rule in RULES] == list(range(1, len(RULES) + 1))
    assert len(set(NAMES)) == len(NAMES)
    assert sorted(p.name for p in MANIFESTS.iterdir() if p.is_dir()) == sorted(NAMES)


@pytest.mark.parametrize("rule", NAMES)
def test_a_manifest_that_keeps_the_rule_passes(rule: str, schemas: Schemas):
    report = found_in(MANIFESTS / rule / "pass.yaml", schemas=schemas if rule == SCHEMA else None)
    assert of_rule(report, rule) == []


@pytest.mark.parametrize("rule", NAMES)
def test_a_manifest_that_breaks_the_rule_is_found_at_its_places(rule: str, schemas: Schemas):
    file = MANIFESTS / rule / "fail.yaml"
    lines = file.read_text().splitlines()
    expected = [line.removeprefix("# finds: ") for line in lines if line.startswith("# finds: ")]
    report = found_in(file, schemas=schemas if rule == SCHEMA else None)
    found = of_rule(report, rule)
    assert expected
    assert sorted(f"{f.object} {f.path}" for f in found) == sorted(expected)
    assert all(f.reason and f.fix and f.line for f in found)


def test_an_excellent_manifest_has_no_finding_by_any_rule_or_schema(schemas: Schemas):
    for kubernetes in ((1, 35), (1, 36), (1, 37)):
        report = found_in(EXCELLENT, Target(kubernetes=kubernetes), schemas)
        assert report.findings == ()
        assert report.unchecked == ()


def test_the_samples_choices_trip_at_least_twelve_rules_of_the_checklist(schemas: Schemas):
    report = found_in(SAMPLE, schemas=schemas)
    tripped = {f.rule for f in report.findings} & set(NAMES[:CHECKLIST])
    assert len(tripped) >= 12, sorted(tripped)


def test_an_old_cluster_asks_for_the_other_profile(schemas: Schemas):
    report = found_in(EXCELLENT, OLD, schemas)
    rules = {f.rule for f in report.findings}
    assert rules == {SCHEMA, "restart-in-place", "infra-faults"}
    unknown = [f for f in of_rule(report, SCHEMA) if f.path.endswith("restartPolicyRules")]
    assert len(unknown) == 2  # 1.33 has no such field; coordinator and node have it


def test_an_old_operator_asks_for_the_other_profile_too():
    report = found_in(EXCELLENT, Target(jobset=(0, 9)))
    assert {f.rule for f in report.findings} == {"restart-in-place", "infra-faults"}


def test_what_an_old_cluster_needs_passes_there():
    text = """
apiVersion: batch/v1
kind: Job
metadata: {name: run42}
spec:
  completions: 2
  backoffLimit: 2147483647
  template: {spec: {restartPolicy: OnFailure, containers: [{name: node}]}}
"""
    report = found_in(text, OLD)
    rules = ("restart-in-place", "infra-faults", "exit-codes", "job-admission")
    assert [f for rule in rules for f in of_rule(report, rule)] == []


def test_what_a_flag_allows_is_not_found():
    nvls = (MANIFESTS / "environment" / "fail.yaml").read_bytes()
    report = found_in(nvls, Target(allows_nvls_off=True))
    assert not any("NVLS" in f.reason for f in report.findings)
    spot = found_in(MANIFESTS / "placement" / "fail.yaml", Target(allows_spot=True))
    assert not any("spot" in f.reason for f in spot.findings)
    gates = frozenset({"InPlaceRestart", "RestartJob"})
    gated = found_in(MANIFESTS / "infra-faults" / "fail.yaml", Target(gates=gates))
    assert not any("gate" in f.reason for f in gated.findings)


def test_an_object_without_a_schema_is_said_to_be_unchecked(schemas: Schemas):
    text = "apiVersion: kueue.x-k8s.io/v1beta1\nkind: LocalQueue\nmetadata: {name: a}\n"
    (unchecked,) = found_in(text, schemas=schemas).unchecked
    assert "--crd" in unchecked.why
    (unknown,) = found_in(EXCELLENT, Target(kubernetes=(1, 99)), schemas).unchecked[:1]
    assert "1.99" in unknown.why


CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.com}
spec:
  group: example.com
  names: {kind: Thing, plural: things}
  versions:
  - name: v1
    served: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            required: [low]
            x-kubernetes-validations:
            - {rule: "self.low <= self.high", message: low is above high}
            - {rule: "self.low == oldSelf.low", message: low never changes}
            - {rule: "self.name.unknownFunction()"}
            properties:
              low: {type: integer}
              high: {type: integer}
              port: {x-kubernetes-int-or-string: true}
              free: {type: object, x-kubernetes-preserve-unknown-fields: true}
"""


def test_a_clusters_own_crd_gives_its_schema_and_its_rules():
    own = Schemas([("crd.yaml", CRD.encode())])
    head = "apiVersion: example.com/v1\nkind: Thing\nmetadata: {name: a}\n"
    good = found_in(head + "spec: {low: 1, high: 2, port: http, free: {a: 1}}", schemas=own)
    assert good.findings == ()
    assert [u.what for u in good.unchecked] == ["CEL rule self.name.unknownFunction()"]
    bad = found_in(head + "spec: {low: 3, high: 2, hihg: 1}", schemas=own)
    assert {(f.path, f.reason) for f in bad.findings} == {
        ("spec", "low is above high"),
        ("spec.hihg", "there is no field hihg here in this version"),
    }
    assert any(f.fix == "did you mean high?" for f in bad.findings)
    with pytest.raises(ConfigError, match="no new CustomResourceDefinition"):
        Schemas([("job.yaml", b"kind: Job")])


def test_a_list_is_its_items(schemas: Schemas):
    items = "".join(
        f"- {{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name}}}, dat: {{}}}}\n"
        for name in "ab"
    )
    report = found_in(f"apiVersion: v1\nkind: List\nitems:\n{items}", schemas=schemas)
    places = [(f.object, f.path, f.line) for f in report.findings]
    assert places == [("ConfigMap/a", "dat", 4), ("ConfigMap/b", "dat", 5)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "no UTF-8"),
        (b"a: [1", "no YAML"),
        (b"a: &a [*a]", "alias inside itself"),
        (b"[" * 5000 + b"]" * 5000, "nested deeper|nesting depth"),
        (b"a: !!int x", "cannot be read"),
        (b"a: .nan", "no number of JSON"),
        (b"? [a]\n: b", "a key that is no text"),
        (b"<<: {a: 1}", "merge key"),
        (b"a: 1\na: 2", "stands twice"),
        (
            b"a: &a [x,x,x,x,x,x,x,x,x]\n"
            + b"".join(
                b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9))
                for n in range(ord("b"), ord("h"))
            ),
            "too many values|when its aliases are expanded",
        ),
    ],
    ids=lambda value: value[:12].decode(errors="replace") if isinstance(value, bytes) else "",
)
def test_what_is_no_manifest_is_a_finding(content: bytes, said: str):
    reasons = [f.reason for f in found_in(content).findings]
    assert any(part in reason for part in said.split("|") for reason in reasons), reasons


def test_texts_stay_texts_and_lines_are_kept():
    (document,), problems = read_documents("f", b'a: 2026-01-01\nb: "1"\nc: 0x10\nd: [x,\n y]')
    assert document.value == {"a": "2026-01-01", "b": "1", "c": 16, "d": ["x", "y"]}
    assert problems == []
    assert document.line_of(("d", 1)) == 5
    assert document.line_of(("d", 1, "below")) == 5


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1Ki", 1024), ("1k", 1000), ("1e3", 1000), ("2500m", 2.5), (".5", 0.5), (3, 3), (0.5, 0.5)],
)
def test_quantities_are_kubernetes_own(text: object, amount: float):
    assert quantity(text) == amount


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GiB", "1e", True, None, [], "1e999"])
def test_what_is_no_quantity_is_none(text: object):
    assert quantity(text) is None


def test_the_command_says_what_to_change_and_where(capsys: pytest.CaptureFixture[str]):
    assert main(["k8s", "validate", str(SAMPLE)]) == 1
    said = capsys.readouterr().out
    assert "[pod-security] Job/ft-training spec.template.spec.volumes[0].hostPath" in said
    assert main(["k8s", "validate", str(EXCELLENT)]) == 0
    assert "0 findings" in capsys.readouterr().out


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]):
    assert main(["k8s", "validate", "--json", "--allow", "access", str(SAMPLE)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report["findings"][0]) == set(Finding.__slots__)
    assert report["allowed"] == ["access"]
    assert not any(f["rule"] == "access" for f in report["findings"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--allow", "nothing", "x.yaml"],
        ["--kubernetes", "new", "x.yaml"],
        ["no-such-file.yaml"],
        ["--server", "-"],
    ],
)
def test_the_command_refuses_what_cannot_work(arguments: list[str]):
    assert main(["k8s", "validate", *arguments]) == 78


def test_the_page_lists_the_rules_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    rules = page.partition("### The rules")[2]
    rows = [line for line in rules.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{rule.name}` | {rule.promise} |" for rule in RULES]
