"""YAML in: any bytes give documents and the places where they are no manifest.

Owns: reading, the limits that hold against hostile files, duplicate keys, and `Node`, by which
lints look at a document of any shape without ever failing. Does not own: what a manifest should
say.
Invariants: values are JSON's own types with text keys; nesting and size have limits, so that every
walk over a document ends; no tag builds an object.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

BYTES_MAX = 16 * 1024 * 1024  # the longest CRD in use has 1 MB; beyond it, no manifest
NODES_MAX = 400_000  # values after aliases are expanded: ten thousand laughs, not a billion
DEPTH_MAX = 100  # an API server refuses far less deep ones

Key = str | int
Path = tuple[Key, ...]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_SCALARS = {
    "tag:yaml.org,2002:null",
    "tag:yaml.org,2002:bool",
    "tag:yaml.org,2002:int",
    "tag:yaml.org,2002:float",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A place where a file is no manifest."""

    line: int
    path: Path
    reason: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One YAML document, and the line of every value in it."""

    file: str
    index: int
    value: Any
    lines: dict[Path, int] = field(default_factory=dict)

    @property
    def root(self) -> Node:
        """The whole document."""
        return Node(self, (), self.value)

    @property
    def kind(self) -> str:
        """`kind`, or nothing."""
        return self.root.at("kind").text

    @property
    def api_version(self) -> str:
        """`apiVersion`, or nothing."""
        return self.root.at("apiVersion").text

    @property
    def name(self) -> str:
        """`metadata.name`, or what it is generated from."""
        metadata = self.root.at("metadata")
        return metadata.at("name").text or metadata.at("generateName").text

    @property
    def namespace(self) -> str:
        """`metadata.namespace`; `default` where none is given."""
        return self.root.at("metadata", "namespace").text or "default"

    @property
    def label(self) -> str:
        """Kind/name, as findings call it."""
        return f"{self.kind}/{self.name}" if self.kind or self.name else ""

    def line_of(self, path: Path) -> int:
        """The line of a value, or of the nearest one around it that is there."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return 0


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a document, whether something stands there or not."""

    document: Document
    path: Path
    value: Any

    def at(self, *keys: Key) -> Node:
        """The place below; absent where anything on the way is absent or of another shape."""
        value = self.value
        for key in keys:
            if isinstance(value, dict) and isinstance(key, str):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                value = None
        return Node(self.document, self.path + keys, value)

    @property
    def exists(self) -> bool:
        """Something stands here; null does not count."""
        return self.value is not None

    @property
    def text(self) -> str:
        """The text here, or nothing."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """The whole number here, if one is."""
        return self.value if type(self.value) is int else None

    @property
    def items(self) -> list[Node]:
        """The places of a list; none where no list is."""
        count = len(self.value) if isinstance(self.value, list) else 0
        return [self.at(index) for index in range(count)]

    @property
    def fields(self) -> list[tuple[str, Node]]:
        """The keys and places of a mapping; none where no mapping is."""
        keys = list(self.value) if isinstance(self.value, dict) else []
        return [(key, self.at(key)) for key in keys]

    @property
    def texts(self) -> dict[str, str]:
        """A mapping's texts, as of labels."""
        return {key: place.text for key, place in self.fields if isinstance(place.value, str)}

    @property
    def words(self) -> str:
        """The place, as findings write it."""
        return path_words(self.path)


def path_words(path: Path) -> str:
    """`spec.replicatedJobs[1].metadata["a.b/c"]`."""
    words = ""
    for key in path:
        if isinstance(key, int):
            words += f"[{key}]"
        elif _PLAIN_KEY.match(key):
            words += f".{key}" if words else key
        else:
            words += f'["{key}"]'
    return words


def read_documents(file: str, content: bytes) -> tuple[list[Document], list[Problem]]:
    """The documents of one file and what is wrong with it as YAML; it never raises."""
    if len(content) > BYTES_MAX:
        return [], [_problem(f"{len(content)} bytes are too many for a manifest")]
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return [], [_problem(f"the file is no UTF-8 text: {error.reason} at byte {error.start}")]
    documents: list[Document] = []
    problems: list[Problem] = []
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            while loader.check_node():
                builder = _Builder(problems)
                value = builder.value(loader.get_node(), ())
                if value is not None:
                    documents.append(
                        Document(file=file, index=len(documents), value=value, lines=builder.lines)
                    )
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = getattr(error, "problem", None) or str(error).partition("\n")[0]
        problems.append(_problem(f"no YAML: {words}", 0 if mark is None else mark.line + 1))
    except _TooMuch as error:
        problems.append(_problem(str(error)))
    return documents, problems


class _TooMuch(Exception):
    """A limit of this file."""


def _problem(reason: str, line: int = 0, path: Path = ()) -> Problem:
    return Problem(line=line, path=path, reason=reason, fix="write plain YAML, as kubectl takes it")


def _check_depth(text: str) -> None:
    """Before anything recurses: composing a node goes as deep as the text does."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader), start=1):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_MAX:
            raise _TooMuch(f"nested deeper than {DEPTH_MAX} levels")
        if count > NODES_MAX:
            raise _TooMuch(f"more than {NODES_MAX} values")


class _Builder:
    """Nodes to JSON's types. Anchors are expanded, so it counts what it makes."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.lines: dict[Path, int] = {}
        self.count = 0

    def value(self, node: Any, path: Path) -> Any:
        """One node's value; its line is kept."""
        self.count += 1
        if self.count > NODES_MAX:
            raise _TooMuch(f"more than {NODES_MAX} values when its aliases are expanded")
        if len(path) > DEPTH_MAX:
            raise _TooMuch(f"nested deeper than {DEPTH_MAX} levels, or an alias inside itself")
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: Any, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            line = key_node.start_mark.line + 1
            if key in made:
                fix = "keep one of them: the last one wins, and strict clients refuse the file"
                self.problems.append(
                    Problem(line=line, path=(*path, key), reason=f"{key} stands twice", fix=fix)
                )
            self.lines[(*path, key)] = line
            made[key] = self.value(value_node, (*path, key))
        return made

    def _key(self, node: Any, path: Path) -> str | None:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            self.problems.append(_problem("a key that is no text", line, path))
            return None
        if node.tag == "tag:yaml.org,2002:merge":
            self.problems.append(_problem("a merge key (<<) is no JSON", line, path))
            return None
        return str(node.value)

    def _scalar(self, node: Any, path: Path) -> Any:
        text = str(node.value)
        if node.tag not in _SCALARS:
            return text
        try:
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError, IndexError, OverflowError):
            line = node.start_mark.line + 1
            self.problems.append(_problem(f"{text[:40]!r} cannot be read", line, path))
            return text
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(_problem(f"{text[:40]} is no number of JSON", 0, path))
            return text
        return value if isinstance(value, bool | int | float) or value is None else text
