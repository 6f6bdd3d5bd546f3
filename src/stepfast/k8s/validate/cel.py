"""The one door to `cel-python`: the rules that a CRD writes beside its fields.

Owns: which rules apply where in a document, and their evaluation. Does not own: their texts.
Invariant: a rule that cannot be evaluated here is unchecked, never passed and never failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import celpy
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError, CELUnsupportedError

from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.scene import Hit

EVALUATIONS_MAX = 2000  # of one document; a hostile CRD times a hostile manifest has no end
_PAST = re.compile(r"\boldSelf\b")
# What the library raises on code and data that it does not know; there is no common base.
_FAILURES = (
    CELParseError,
    CELEvalError,
    CELUnsupportedError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    NotImplementedError,
    RecursionError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CelResult:
    """What the rules of one document came to."""

    hits: tuple[Hit, ...]
    unchecked: tuple[str, ...]  # rules that could not be evaluated


def check_cel(root: Node, structure: dict[str, Any]) -> CelResult:
    """Every rule at every place that has one, but those about the past."""
    hits: list[Hit] = []
    unchecked: set[str] = set()
    for count, (place, rule, message) in enumerate(_rules(root, structure)):
        if count >= EVALUATIONS_MAX:
            unchecked.add(f"rules beyond the first {EVALUATIONS_MAX}")
            break
        verdict = _evaluate(rule, place.value)
        if verdict is None:
            unchecked.add(rule[:200])
        elif not verdict:
            hits.append(Hit(place, message or f"the rule {rule} does not hold", f"make it: {rule}"))
    return CelResult(hits=tuple(hits), unchecked=tuple(sorted(unchecked)))


def _rules(place: Node, structure: Any) -> Iterator[tuple[Node, str, str]]:
    if not isinstance(structure, dict) or not place.exists:
        return
    validations = structure.get("x-kubernetes-validations")
    for entry in validations if isinstance(validations, list) else []:
        rule = entry.get("rule") if isinstance(entry, dict) else None
        if isinstance(rule, str) and not _PAST.search(rule):
            message = entry.get("message")
            yield place, rule, message if isinstance(message, str) else ""
    properties = structure.get("properties")
    for name, part in properties.items() if isinstance(properties, dict) else ():
        yield from _rules(place.at(name), part)
    for item in place.items:
        yield from _rules(item, structure.get("items"))
    if isinstance(structure.get("additionalProperties"), dict):
        for _, field in place.fields:
            yield from _rules(field, structure["additionalProperties"])


@lru_cache(maxsize=256)
def _program(rule: str) -> Any | None:
    environment = celpy.Environment()
    try:
        return environment.program(environment.compile(rule))
    except _FAILURES:
        return None


def _evaluate(rule: str, value: Any) -> bool | None:
    program = _program(rule)
    if program is None:
        return None
    try:
        return bool(program.evaluate({"self": json_to_cel(value)}))
    except _FAILURES:
        return None
