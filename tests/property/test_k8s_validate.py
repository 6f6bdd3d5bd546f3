"""Whatever a file contains, the validator answers: it never crashes, and its report can be said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.k8s.target import Target
from stepfast.k8s.validate.schemas import Schemas
from stepfast.k8s.validate.validate import validate

MANIFESTS = Path(__file__).parent.parent / "unit" / "k8s_manifests"
SCHEMAS = Schemas()
GOOD = [d for d in yaml.safe_load_all((MANIFESTS / "excellent.yaml").read_text()) if d]
FAILING = [path.read_bytes() for path in sorted(MANIFESTS.glob("*/fail.yaml"))]
KINDS = [
    "Job",
    "JobSet",
    "TrainJob",
    "ClusterTrainingRuntime",
    "PyTorchJob",
    "RayJob",
    "PodDisruptionBudget",
    "Role",
    "PersistentVolume",
    "List",
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
targets = st.sampled_from(
    [Target(), Target(kubernetes=(1, 33)), Target(kubernetes=(1, 37), jobset=(0, 9))]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(p for key, part in items for p in places(part, (*path, key)))]


ALL_PLACES = [(n, path) for n, document in enumerate(GOOD) for path in places(document) if path]


def check(content: bytes, target: Target) -> None:
    report = validate({"f.yaml": content}, target, schemas=SCHEMAS)
    assert len(json.loads(report.json())["findings"]) == len(report.findings)
    assert report.text()


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode), target=targets)
def test_any_bytes(content: bytes, target: Target):
    check(content, target)


@given(value=values, kind=st.sampled_from(KINDS), target=targets)
def test_any_spec_of_a_known_kind(value: Any, kind: str, target: Target):
    document = {"apiVersion": "v1", "kind": kind, "metadata": value, "spec": value, "items": value}
    check(yaml.safe_dump(document).encode(), target)


@settings(max_examples=60)
@given(place=st.sampled_from(ALL_PLACES), value=values, target=targets)
def test_any_value_at_any_place_of_a_manifest(
    place: tuple[int, tuple[Any, ...]], value: Any, target: Target
):
    number, path = place
    documents = copy.deepcopy(GOOD)
    inside = documents[number]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    check(yaml.safe_dump_all(documents).encode(), target)


@given(file=st.sampled_from(FAILING), cut=st.tuples(st.integers(0), st.integers(0, 40)))
def test_any_piece_cut_out_of_a_manifest(file: bytes, cut: tuple[int, int]):
    start = cut[0] % (len(file) + 1)
    check(file[:start] + file[start + cut[1] :], Target())
