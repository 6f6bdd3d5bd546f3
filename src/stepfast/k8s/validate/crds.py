"""A cluster's own custom resource definitions, as strict schemas and CEL rules.

Owns: reading `kubectl get crd -o yaml`, and what an API server makes of a structural schema.
Does not own: evaluating CEL (`cel`). Immutability (rules with `oldSelf`) is left to the server:
one file has no past.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from stepfast.errors import ConfigError
from stepfast.k8s.validate.documents import Document, Node, read_documents

_KEPT = {
    "type",
    "properties",
    "items",
    "required",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minProperties",
    "maxProperties",
    "multipleOf",
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
}
_META = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomKind:
    """One served version of a custom resource."""

    validator: Any
    structure: dict[str, Any]  # the schema as the CRD has it, for its CEL rules
    file: str


def read_crds(files: Iterable[tuple[str, bytes]]) -> dict[tuple[str, str], CustomKind]:
    """By apiVersion and kind; ConfigError where a file has no CRD that can be used."""
    found: dict[tuple[str, str], CustomKind] = {}
    for file, content in files:
        documents, problems = read_documents(file, content)
        if problems:
            raise ConfigError(f"--crd {file}, line {problems[0].line}: {problems[0].reason}")
        before = len(found)
        for document in documents:
            items = document.root.at("items").items if document.kind == "List" else []
            for root in items or [document.root]:
                if root.at("kind").text == "CustomResourceDefinition":
                    found.update(_versions(file, root))
        if len(found) == before:
            raise ConfigError(f"--crd {file}: there is no new CustomResourceDefinition in it")
    return found


def _versions(file: str, root: Node) -> dict[tuple[str, str], CustomKind]:
    spec = root.at("spec")
    made: dict[tuple[str, str], CustomKind] = {}
    for version in spec.at("versions").items:
        structure = version.at("schema", "openAPIV3Schema").value
        if version.at("served").value is False or not isinstance(structure, dict):
            continue
        key = (
            f"{spec.at('group').text}/{version.at('name').text}",
            spec.at("names", "kind").text,
        )
        schema = strict_structure(structure)
        schema["properties"] = {**schema.get("properties", {}), **_META}
        schema["additionalProperties"] = False
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ConfigError(f"--crd {file}: {key[1]}: {error.message[:200]}") from error
        made[key] = CustomKind(
            validator=Draft202012Validator(schema), structure=structure, file=file
        )
    return made


def strict_structure(structure: Any) -> dict[str, Any]:
    """A structural schema as JSON schema; what the server would prune is an error."""
    if not isinstance(structure, dict):
        return {}
    made: dict[str, Any] = {}
    for key, value in structure.items():
        if key not in _KEPT:
            continue
        if key == "properties" and isinstance(value, dict):
            made[key] = {name: strict_structure(part) for name, part in value.items()}
        elif key in ("items", "not") or (key == "additionalProperties" and value is not True):
            made[key] = strict_structure(value) if isinstance(value, dict) else value
        elif key in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            made[key] = [_loose(part) for part in value]
        else:
            made[key] = value
    if structure.get("x-kubernetes-int-or-string") is True:
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for limit in ("Minimum", "Maximum"):
        if made.get(f"exclusive{limit}") is True:
            made[f"exclusive{limit}"] = made.pop(limit.lower(), None)
        if made.get(f"exclusive{limit}", 0) in (None, False):
            made.pop(f"exclusive{limit}", None)
    keeps = structure.get("x-kubernetes-preserve-unknown-fields") is True
    embedded = structure.get("x-kubernetes-embedded-resource") is True
    if "properties" in made and "additionalProperties" not in made and not (keeps or embedded):
        made["additionalProperties"] = False
    return made


def _loose(part: Any) -> Any:
    """Inside allOf and the like a schema only adds limits: it does not say what fields exist."""
    made = strict_structure(part)
    _open(made)
    return made


def _open(made: Any) -> None:
    if isinstance(made, dict):
        if made.get("additionalProperties") is False:
            del made["additionalProperties"]
        for value in made.values():
            _open(value)
    elif isinstance(made, list):
        for value in made:
            _open(value)


def known_as(document: Document) -> tuple[str, str]:
    """What a document's schema is found by."""
    return document.api_version, document.kind
