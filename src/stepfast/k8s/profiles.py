"""Which manifests a cluster and its operators can take, by their versions.

Owns: which kinds there are, which versions are known. Does not own: what versions decide
(`target`), the fields that follow (`manifest`). Invariant: a field is rendered only where the API
server and every CRD on its way carry it: an older CRD drops what it does not know without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfast.errors import ConfigError
from stepfast.k8s.target import Target, Version, parse_version, version_text

OPERATORS = {"jobset": "jobset", "job": "", "trainjob": "trainer"}  # which one makes the pods
KINDS = tuple(OPERATORS)
DEFAULT_KUBERNETES = "1.35"
DEFAULT_JOBSET = "0.12"
DEFAULT_TRAINER = "2.3"

_KUBERNETES = ((1, 31), (1, 37))  # the first that Kubeflow Trainer 2 takes; the last that was read
_JOBSET_FIRST = (0, 8)
_TRAINER_FIRST = (2, 0)


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
    """The profile of a cluster. Raises ConfigError for kinds and versions that are not known."""
    if kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, not {kind!r}")
    first, last = _KUBERNETES
    cluster = parse_version(kubernetes, "--kubernetes")
    if not first <= cluster <= last:
        known = f"{version_text(first)} to {version_text(last)}"
        raise ConfigError(f"--kubernetes {kubernetes}: known are {known}")
    target = Target(
        kubernetes=cluster,
        jobset=_at_least("--jobset", jobset, _JOBSET_FIRST),
        trainer=_at_least("--trainer", trainer, _TRAINER_FIRST),
    )
    return Profile(kind=kind, restarts_by_rule=target.restarts_in_place(OPERATORS[kind]))


def _at_least(flag: str, text: str, first: Version) -> Version:
    version = parse_version(text, flag)
    if version < first:
        raise ConfigError(f"{flag} {text}: {version_text(first)} is the oldest that is supported")
    return version
