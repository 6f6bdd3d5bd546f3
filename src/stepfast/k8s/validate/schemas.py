"""Every document against the strict schema of its kind, and each template as the Job it becomes.

Owns: which schema is a document's, and how a schema's errors are said. Does not own: the schemas.
Invariant: an object without a schema is said to be unchecked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from stepfast.k8s.target import Target
from stepfast.k8s.validate.cel import check_cel
from stepfast.k8s.validate.core_schema import core_schema, is_core, why_none
from stepfast.k8s.validate.crds import CustomKind, known_as, read_crds
from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.findings import Unchecked
from stepfast.k8s.validate.operator_schema import operator_schema
from stepfast.k8s.validate.scene import Hit
from stepfast.k8s.validate.workload import find_workloads

HITS_MAX = 50  # of one document: who has more has another kind of file
_MESSAGE_MAX = 300


class Schemas:
    """The schemas of the libraries, and before them those of a cluster's own CRDs."""

    def __init__(self, crds: Iterable[tuple[str, bytes]] = ()) -> None:
        self._custom: dict[tuple[str, str], CustomKind] = read_crds(crds)

    def check(self, document: Document, target: Target) -> tuple[list[Hit], list[Unchecked]]:
        """What is wrong with one document by its schema, and what nobody could look at."""
        root = document.root
        if not isinstance(root.value, dict) or not (document.kind and document.api_version):
            return [], []
        hits: list[Hit] = []
        unchecked: list[Unchecked] = []
        custom = self._custom.get(known_as(document))
        validator = (
            custom.validator
            if custom is not None
            else operator_schema(*known_as(document))
            or core_schema(document.api_version, document.kind, target.kubernetes)
        )
        if validator is None:
            unchecked.append(_no_schema(document, target))
        else:
            hits += _errors(validator, root, without_nulls(root.value))
        if custom is not None:
            by_cel = check_cel(root, custom.structure)
            hits += by_cel.hits
            why = "the rule is beyond this evaluator; --server asks the cluster"
            unchecked += [_unchecked(document, f"CEL rule {r}", why) for r in by_cel.unchecked]
        hits += _as_jobs(document, target)
        return _once(hits)[:HITS_MAX], unchecked


def _once(hits: Iterable[Hit]) -> list[Hit]:
    """A template's field is seen by two schemas; it is said once."""
    seen: dict[tuple[Any, ...], Hit] = {}
    for hit in hits:
        seen.setdefault((hit.place.path, hit.reason), hit)
    return list(seen.values())


def _unchecked(document: Document, what: str, why: str) -> Unchecked:
    return Unchecked(file=document.file, object=document.label, what=what, why=why)


def _no_schema(document: Document, target: Target) -> Unchecked:
    if is_core(document.api_version):
        why = why_none(document.kind, target.kubernetes)
    else:
        why = "no schema of this kind is known here; --crd FILE gives a cluster's own"
    return _unchecked(document, f"the fields of {document.api_version} {document.kind}", why)


def _as_jobs(document: Document, target: Target) -> Iterator[Hit]:
    """An operator does not look into its templates: a wrong one fails when its Job is made."""
    validator = core_schema("batch/v1", "Job", target.kubernetes)
    for workload in find_workloads(document):
        if validator is None or not workload.operator or not workload.job.exists:
            continue
        template = workload.replica.at("template")
        job = without_nulls({"apiVersion": "batch/v1", "kind": "Job", **_mapping(template)})
        yield from _errors(validator, template, job)


def _mapping(template: Node) -> dict[str, Any]:
    value = template.value if isinstance(template.value, dict) else {}
    return {key: value[key] for key in ("metadata", "spec") if key in value}


def without_nulls(value: Any) -> Any:
    """A field that is null is a field that is not set."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    return value


def _errors(validator: Any, root: Node, value: Any) -> Iterator[Hit]:
    for count, error in enumerate(validator.iter_errors(value)):
        if count >= HITS_MAX:
            return
        place = root.at(*error.absolute_path)
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            yield from _unknown_fields(place, error)
        else:
            reason = error.message
            if len(reason) > _MESSAGE_MAX:
                reason = f"{reason[:100]} ... {reason[-(_MESSAGE_MAX - 105) :]}"
            yield Hit(place, reason, "write it as the API's reference says")


def _unknown_fields(place: Node, error: Any) -> Iterator[Hit]:
    known = error.schema.get("properties", {})
    for name in error.instance:
        if name in known:
            continue
        near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
        fix = f"did you mean {near[0]}?" if near else "remove it, or raise the version"
        yield Hit(place.at(name), f"there is no field {name} here in this version", fix)
