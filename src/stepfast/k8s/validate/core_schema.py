"""The one door to `kubernetes-validate`: strict schemas of Kubernetes' own objects, by version.

Owns: which file is whose. Does not own: how a schema's errors are said (`schemas`).
"""

from __future__ import annotations

import importlib.resources
import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from stepfast.k8s.target import Version, version_text

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,99}\Z")
_API_VERSION = re.compile(r"(?:([a-z0-9-]{1,63})(?:\.[a-z0-9.-]{1,200})?/)?(v[a-z0-9]{1,30})\Z")
_FOLDER = re.compile(r"v(\d+)\.(\d+)\.\d+-local-strict\Z")


@lru_cache(maxsize=1)
def _folders() -> dict[Version, Any]:
    root = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    matches = ((_FOLDER.match(entry.name), entry) for entry in root.iterdir())
    return {(int(m[1]), int(m[2])): entry for m, entry in matches if m is not None}


@lru_cache(maxsize=4)
def _definitions(version: Version) -> Resource[Any]:
    content = json.loads((_folders()[version] / "_definitions.json").read_text())
    return Resource.from_contents(content)


def is_core(api_version: str) -> bool:
    """An API group of Kubernetes itself, which the schemas would have."""
    group = api_version.partition("/")[0] if "/" in api_version else ""
    return "." not in group or (group.endswith(".k8s.io") and ".x-k8s.io" not in group)


def core_versions() -> list[Version]:
    """The versions that there are schemas for, in order."""
    return sorted(_folders())


@lru_cache(maxsize=64)
def core_schema(api_version: str, kind: str, version: Version) -> Any | None:
    """The validator of a kind; None where this version of Kubernetes has no such kind."""
    match = _API_VERSION.match(api_version)
    if match is None or not _KIND.match(kind) or version not in _folders():
        return None
    name = f"{match[1]}-{match[2]}" if match[1] else match[2]
    file = _folders()[version] / f"{kind.lower()}-{name}.json"
    if not file.is_file():
        return None
    schema = json.loads(file.read_text())
    registry = Resource.from_contents(schema) @ (_definitions(version) @ Registry())
    return Draft202012Validator(schema, registry=registry)


def why_none(kind: str, version: Version) -> str:
    """Why there is no schema."""
    carried = core_versions()
    if version not in carried:
        first, last = version_text(carried[0]), version_text(carried[-1])
        return f"there are schemas of Kubernetes {first} to {last}, not {version_text(version)}"
    return f"Kubernetes {version_text(version)} has no schema for {kind}"
