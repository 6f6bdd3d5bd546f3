"""What a cluster and its operators can do, by their versions.

Owns: which versions decide what. Does not own: the fields that follow from it (`manifest`).
Invariant: a field is rendered only where the API server and every CRD on its way carry it: an older
CRD drops what it does not know without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepfast.errors import ConfigError

KINDS = ("jobset", "job", "trainjob")
DEFAULT_KUBERNETES = "1.35"
DEFAULT_JOBSET = "0.12"
DEFAULT_TRAINER = "2.3"

_KUBERNETES = ((1, 31), (1, 37))  # the first that Kubeflow Trainer 2 takes; the last that was read
_JOBSET_FIRST = (0, 8)
_TRAINER_FIRST = (2, 0)
# Container restart rules: on by default in the cluster, and known to the CRD of the operator.
_RULES_KUBERNETES = (1, 35)
_RULES_JOBSET = (0, 10)
_RULES_TRAINER = (2, 1)

Version = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`restarts_by_rule`: a container's exit code decides whether it starts again in its pod;
    otherwise every failure does (`OnFailure`).
    """

    kind: str
    restarts_by_rule: bool

    @property
    def name(self) -> str:
        """As golden files and reports call it."""
        return "restart-rules" if self.restarts_by_rule else "on-failure"


def profile_of(
    kind: str,
    kubernetes: str = DEFAULT_KUBERNETES,
    *,
    jobset: str = DEFAULT_JOBSET,
    trainer: str = DEFAULT_TRAINER,
) -> Profile:
    """The profile of a cluster. Raises ConfigError for versions that are not known."""
    if kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, not {kind!r}")
    cluster = _version("--kubernetes", kubernetes)
    first, last = _KUBERNETES
    if not first <= cluster <= last:
        raise ConfigError(f"--kubernetes {kubernetes}: known are {_text(first)} to {_text(last)}")
    carries = cluster >= _RULES_KUBERNETES
    if kind == "jobset":
        operator = _at_least("--jobset", jobset, _JOBSET_FIRST)
        carries = carries and operator >= _RULES_JOBSET
    elif kind == "trainjob":
        operator = _at_least("--trainer", trainer, _TRAINER_FIRST)
        carries = carries and operator >= _RULES_TRAINER
    return Profile(kind=kind, restarts_by_rule=carries)


def _version(flag: str, text: str) -> Version:
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:[.+-].*)?", text)
    if match is None:
        raise ConfigError(f"{flag} {text!r} is no version such as 1.35")
    return int(match[1]), int(match[2])


def _at_least(flag: str, text: str, first: Version) -> Version:
    version = _version(flag, text)
    if version < first:
        raise ConfigError(f"{flag} {text}: {_text(first)} is the oldest that is supported")
    return version


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
