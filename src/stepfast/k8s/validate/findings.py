"""What the validator says: one finding for each thing to change, and what it could not check.

Owns: the findings' fields and their texts, for people and for programs. Does not own: the rules.
Invariant: the same findings give the same text, whatever order they were found in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """One thing to change, and where."""

    file: str
    line: int  # 0: the finding is about something that is in no line
    object: str  # Kind/name, empty where the document is none
    path: str
    rule: str
    reason: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Unchecked:
    """What nobody looked at, and why: it is shown, and is never counted as good."""

    file: str
    object: str
    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one validation has to say."""

    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...] = ()
    allowed: tuple[str, ...] = ()  # rules that were not held against the files
    files: int = 0
    objects: int = 0

    def text(self) -> str:
        """For people: a block for each finding, then what was not checked, then the count."""
        blocks = [_block(finding) for finding in self.findings]
        blocks += [f"not checked: {_place(u)}: {u.what}: {u.why}\n" for u in self.unchecked]
        if self.allowed:
            blocks.append(f"allowed, so not checked: {', '.join(self.allowed)}\n")
        rules = len({finding.rule for finding in self.findings})
        blocks.append(
            f"{len(self.findings)} findings by {rules} rules"
            f" in {self.objects} objects of {self.files} files\n"
        )
        return "".join(blocks)

    def json(self) -> str:
        """For programs: one object; keys keep their order."""
        content = {
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": [asdict(unchecked) for unchecked in self.unchecked],
            "allowed": list(self.allowed),
            "files": self.files,
            "objects": self.objects,
        }
        return json.dumps(content, indent=2) + "\n"


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """By file, line, object, path and rule; what was found twice is said once."""
    return tuple(sorted(set(findings)))


def _block(finding: Finding) -> str:
    line = f":{finding.line}" if finding.line else ""
    return (
        f"{finding.file}{line}: [{finding.rule}] {finding.object} {finding.path}\n"
        f"    {finding.reason}\n"
        f"    fix: {finding.fix}\n"
    )


def _place(unchecked: Unchecked) -> str:
    return " ".join(part for part in (unchecked.file, unchecked.object) if part)
