"""Files in, a report out.

Owns: the order of the checks. Does not own: any of them.
Invariant: no content of a file makes it fail; it is a pure function of the files and the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stepfast.k8s.target import Target
from stepfast.k8s.validate.documents import (
    Document,
    Key,
    Path,
    Problem,
    path_words,
    read_documents,
)
from stepfast.k8s.validate.findings import Finding, Report, Unchecked, ordered
from stepfast.k8s.validate.lints.rules import RULES, SCHEMA
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.schemas import Schemas


def validate(
    files: Mapping[str, bytes],
    target: Target,
    *,
    schemas: Schemas | None = None,
    allowed: Iterable[str] = (),
) -> Report:
    """Every rule that is not allowed to be broken, over all files together."""
    left_out = frozenset(allowed)
    documents: list[Document] = []
    findings: list[Finding] = []
    for file, content in files.items():
        found, problems = read_documents(file, content)
        documents += _listed(found)
        findings += [_of_problem(file, problem) for problem in problems]
    scene = Scene(documents=tuple(documents), target=target)
    for rule in RULES:
        findings += [_finding(rule.name, hit) for hit in rule.check(scene)]
    unchecked: list[Unchecked] = []
    if schemas is not None and SCHEMA not in left_out:
        for document in documents:
            hits, missing = schemas.check(document, target)
            findings += [_finding(SCHEMA, hit) for hit in hits]
            unchecked += missing
    return Report(
        findings=ordered(f for f in findings if f.rule not in left_out),
        unchecked=tuple(sorted(set(unchecked))),
        allowed=tuple(sorted(left_out)),
        files=len(files),
        objects=len(documents),
    )


def _listed(documents: Iterable[Document]) -> Iterator[Document]:
    """A List is its items, as kubectl takes it."""
    for document in documents:
        items = document.root.at("items")
        if document.kind == "List" and isinstance(items.value, list):
            lines: dict[Key, dict[Path, int]] = {}
            for path, line in document.lines.items():
                if len(path) >= 2 and path[0] == "items":
                    lines.setdefault(path[1], {})[path[2:]] = line
            for index, item in enumerate(items.value):
                own = lines.get(index, {})
                yield Document(file=document.file, index=document.index, value=item, lines=own)
        else:
            yield document


def _of_problem(file: str, problem: Problem) -> Finding:
    return Finding(
        file=file,
        line=problem.line,
        object="",
        path=path_words(problem.path),
        rule=SCHEMA,
        reason=problem.reason,
        fix=problem.fix,
    )


def _finding(rule: str, hit: Hit) -> Finding:
    document = hit.place.document
    return Finding(
        file=document.file,
        line=document.line_of(hit.place.path),
        object=document.label,
        path=hit.place.words,
        rule=rule,
        reason=hit.reason,
        fix=hit.fix,
    )
