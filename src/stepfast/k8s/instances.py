"""What EC2's accelerated instances have, as far as a manifest needs it.

Owns: the table and what of a machine a pod may ask for. Does not own: resources that the user
gives. Source: Karpenter's instance reference; allocatable figures where it states them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from stepfast.errors import ConfigError

_MIB_PER_GIB = 1024
# Daemons, and the pages that EFA's driver keeps, are not in the allocatable figures.
_SHARE_OF_ALLOCATABLE_PERCENT = 95
_SHARE_OF_CAPACITY_PERCENT = 90  # where what is allocatable is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance type; `allocatable_*` are 0 where they are not known."""

    gpus: int
    efa: int
    vcpus: int
    memory_gib: int
    allocatable_millicpus: int = 0
    allocatable_mib: int = 0

    @property
    def cpus(self) -> int:
        """Whole CPUs that one pod may ask for."""
        if self.allocatable_millicpus:
            return self.allocatable_millicpus * _SHARE_OF_ALLOCATABLE_PERCENT // 100_000
        return self.vcpus * _SHARE_OF_CAPACITY_PERCENT // 100

    @property
    def pod_memory_gib(self) -> int:
        """Memory that one pod may ask for."""
        if self.allocatable_mib:
            return self.allocatable_mib * _SHARE_OF_ALLOCATABLE_PERCENT // (100 * _MIB_PER_GIB)
        return self.memory_gib * _SHARE_OF_CAPACITY_PERCENT // 100


def _of(
    gpus: int, efa: int, vcpus: int, memory_gib: int, millicpus: int = 0, mib: int = 0
) -> Instance:
    return Instance(
        gpus=gpus,
        efa=efa,
        vcpus=vcpus,
        memory_gib=memory_gib,
        allocatable_millicpus=millicpus,
        allocatable_mib=mib,
    )


INSTANCES = {
    "p4d.24xlarge": _of(8, 4, 96, 1152, 95_690, 1_082_712),
    "p4de.24xlarge": _of(8, 4, 96, 1152, 0, 1_082_712),
    "p5.4xlarge": _of(1, 1, 16, 256),
    "p5.48xlarge": _of(8, 32, 192, 2048, 191_450, 1_938_410),
    "p5e.48xlarge": _of(8, 32, 192, 2048),
    "p5en.48xlarge": _of(8, 16, 192, 2048, 0, 1_937_332),
    "p6-b200.48xlarge": _of(8, 8, 192, 2048),
    "p6-b300.48xlarge": _of(8, 16, 192, 4096, 0, 3_877_198),
    "g6e.48xlarge": _of(8, 4, 192, 1536),
    "g7e.48xlarge": _of(8, 4, 192, 2048),
}


def instance_of(name: str) -> Instance:
    """The instance type of this name. Raises ConfigError where it is not known, or where its GPUs
    are given out by DRA, which these manifests do not speak.
    """
    if "gb200" in name or "gb300" in name:
        raise ConfigError(
            f"nodes.instance {name}: its GPUs need resource claims (DRA), which are not rendered"
        )
    if name not in INSTANCES:
        near = difflib.get_close_matches(name, INSTANCES, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near else "; give nodes.resources instead"
        raise ConfigError(f"nodes.instance {name} is not in the table{hint}")
    return INSTANCES[name]
