"""Accelerated EC2 instance types: what a node has, and what a pod on it may ask for.

Owns: the table, from Karpenter's reference of instance types (August 2026); memory is its
allocatable figure where it gives one, and 94 % of the type's otherwise. Does not own: what the
user says of nodes that are not in it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fractions import Fraction

from stepfast.errors import ConfigError

INSTANCE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
# Daemons, and the pages that EFA's driver keeps, are not in the allocatable figures.
ALLOCATABLE_SHARE = Fraction(95, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One node's devices and what it can give to pods."""

    gpus: int
    efas: int
    cpu_milli: int
    memory_mib: int

    @property
    def pod_cpus(self) -> int:
        """Whole CPUs that a pod which has the node to itself may ask for."""
        return int(Fraction(self.cpu_milli, 1000) * ALLOCATABLE_SHARE)

    @property
    def pod_memory_gib(self) -> int:
        """Memory that such a pod may ask for."""
        return int(Fraction(self.memory_mib, 1024) * ALLOCATABLE_SHARE)


def _of(gpus: int, efas: int, vcpus: int, memory_gib: int, memory_mib: int = 0) -> InstanceType:
    cpu_milli = vcpus * 1000 - 310 if vcpus < 192 else 191450
    return InstanceType(
        gpus=gpus,
        efas=efas,
        cpu_milli=cpu_milli,
        memory_mib=memory_mib or memory_gib * 1024 * 94 // 100,
    )


INSTANCE_TYPES = {
    "p4d.24xlarge": _of(8, 4, 96, 1152, 1082712),
    "p4de.24xlarge": _of(8, 4, 96, 1152, 1082712),
    "p5.4xlarge": _of(1, 1, 16, 256),
    "p5.48xlarge": _of(8, 32, 192, 2048, 1938410),
    "p5e.48xlarge": _of(8, 32, 192, 2048, 1937332),
    "p5en.48xlarge": _of(8, 16, 192, 2048, 1937332),
    "p6-b200.48xlarge": _of(8, 8, 192, 2048, 1937332),
    "p6-b300.48xlarge": _of(8, 16, 192, 4096, 3877198),
    "g6e.48xlarge": _of(8, 4, 192, 1536),
    "g7e.48xlarge": _of(8, 4, 192, 2048),
}
# Their GPUs come by resource claims (DRA) and compute domains: another shape of manifest.
CLAIMED_TYPES = ("p6e-gb200.", "u-p6e-gb200x")


def instance_of(name: str) -> InstanceType:
    """The instance type of this name. Raises ConfigError where the table has none."""
    if name.startswith(CLAIMED_TYPES):
        raise ConfigError(
            f"nodes.instance {name}: its GPUs need resource claims (DRA), which are not rendered"
        )
    if name not in INSTANCE_TYPES:
        near = difflib.get_close_matches(name, INSTANCE_TYPES, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else "; give nodes.resources instead"
        raise ConfigError(f"nodes.instance {name} is not in the table{hint}")
    return INSTANCE_TYPES[name]
