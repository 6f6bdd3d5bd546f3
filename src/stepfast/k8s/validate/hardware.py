"""Accelerated EC2 instance types: what a node has, and what a pod on it may ask for.

Owns: the table, from Karpenter's reference of instance types (August 2026); memory is its
allocatable figure where it gives one, and 94 % of the type's otherwise. Does not own: what is
subtracted from it by other pods.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """One node's devices and what it can give to pods."""

    gpus: int
    efas: int
    cpu_milli: int
    memory_mib: int


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
