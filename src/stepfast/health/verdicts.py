"""What a check says: a verdict of three values, its evidence, and what to change.

Owns: the finding, and how values of the environment are shown. Does not own: any check.
Invariant: what looks like a secret is never part of a finding.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"[A-Za-z0-9+_=-]{24,}")
_USER_IN_URL = re.compile(r"(\w+://)[^/@\s]+@")
MASK = "(masked)"


class Verdict(StrEnum):
    """Unknown is no failure: it could not be looked at, or it depends."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check's word. `change` says what to do about it; empty where there is nothing to do."""

    check: str
    verdict: Verdict
    evidence: str
    change: str = ""


def healthy(check: str, evidence: str) -> Finding:
    """As it should be."""
    return Finding(check=check, verdict=Verdict.HEALTHY, evidence=evidence)


def unhealthy(check: str, evidence: str, change: str) -> Finding:
    """Jobs will fail, or suffer."""
    return Finding(check=check, verdict=Verdict.UNHEALTHY, evidence=evidence, change=change)


def unknown(check: str, evidence: str, change: str = "") -> Finding:
    """It could not be looked at, or whether it matters depends on the job."""
    return Finding(check=check, verdict=Verdict.UNKNOWN, evidence=evidence, change=change)


def shown(name: str, value: str) -> str:
    """`NAME=value` of a variable, masked where name or value look like a secret's."""
    value = _USER_IN_URL.sub(rf"\1{MASK}@", value)
    is_secret = _SECRET_NAME.search(name) or _has_secret(value)
    return f"{name}={MASK if is_secret else value}"


def _has_secret(value: str) -> bool:
    """Long, without separators, letters and digits mixed: no setting looks so."""
    return any(
        any(c.isdigit() for c in part) and any(c.isalpha() for c in part)
        for part in _SECRET_VALUE.findall(value)
    )
