"""What the manifests are for: versions of the cluster and of its operators, and open gates.

Owns: the versions' order and what follows from them. Does not own: what is rendered for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepfast.errors import ConfigError

Version = tuple[int, int]

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\..*)?\Z")
RESTART_RULES_KUBERNETES: Version = (1, 35)  # beta, on by default (KEP-5307)
RESTART_RULES_JOBSET: Version = (0, 10)  # the first CRD that keeps the field
RESTART_RULES_TRAINER: Version = (2, 1)  # bundles JobSet 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The cluster that the files are meant for."""

    kubernetes: Version = (1, 35)
    jobset: Version = (0, 12)
    trainer: Version = (2, 3)
    gates: frozenset[str] = frozenset()  # of JobSet's controller: InPlaceRestart, RestartJob
    allows_spot: bool = False
    allows_nvls_off: bool = False  # engine nvrx asks for NCCL_NVLS_ENABLE=0

    def restarts_in_place(self, operator: str) -> bool:
        """Containers restart by exit code: cluster and operator carry the fields."""
        if self.kubernetes < RESTART_RULES_KUBERNETES:
            return False
        match operator:
            case "jobset":
                return self.jobset >= RESTART_RULES_JOBSET
            case "trainer":
                return self.trainer >= RESTART_RULES_TRAINER
            case "":
                return True
        return False


def parse_version(text: str, flag: str) -> Version:
    """`1.35`, `v1.35.2`; ConfigError for anything else."""
    match = _VERSION.match(text)
    if match is None:
        raise ConfigError(f"{flag} {text} is no version such as 1.35")
    return int(match[1]), int(match[2])


def version_text(version: Version) -> str:
    """As it is written."""
    return f"{version[0]}.{version[1]}"
