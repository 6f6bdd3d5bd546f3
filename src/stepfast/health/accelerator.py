"""GPUs, and variables of the environment that contradict each other or stepfast.

Owns: the rules. Does not own: reading the environment (the door does), NCCL.
Invariant: values are shown through `verdicts.shown` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from stepfast.core.quantities import counted
from stepfast.health.verdicts import Finding, healthy, shown, unhealthy, unknown

_PREFIXES = ("TORCH_", "NCCL_", "PYTORCH_", "CUDA_", "GLOO_", "OMP_", "FI_", "STEPFAST_")
_OFF = ("", "0", "false", "no", "off")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_CHECK = "environment"
_ONE_ALLOCATOR = "keep PYTORCH_ALLOC_CONF alone; before torch 2.9, PYTORCH_CUDA_ALLOC_CONF"
_RAISES = "a waiting rank then raises on its own, unasked"
_KILLS = "torch's watchdog then kills what could go on"
_MONITOR_KILLS = "torch's monitor then kills what could go on"
_ALL_END = "one rank's error then ends all others"


class _Rule(NamedTuple):
    """A variable that stands against stepfast when it is switched on, or off.

    is_refused: a job on GPUs does not start with it.
    """

    name: str
    is_on: bool
    why: str
    is_refused: bool = False


_RULES = (
    _Rule("TORCH_NCCL_BLOCKING_WAIT", True, _RAISES, is_refused=True),
    _Rule("NCCL_BLOCKING_WAIT", True, _RAISES, is_refused=True),
    _Rule("NCCL_ASYNC_ERROR_HANDLING", True, _KILLS, is_refused=True),
    _Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", True, _KILLS, is_refused=True),
    _Rule("TORCH_NCCL_ENABLE_MONITORING", True, _MONITOR_KILLS, is_refused=True),
    _Rule("TORCH_NCCL_PROPAGATE_ERROR", True, _ALL_END, is_refused=True),
    _Rule("TORCH_NCCL_DUMP_ON_TIMEOUT", True, "stepfast writes NCCL's trace before it aborts"),
    _Rule("CUDA_LAUNCH_BLOCKING", True, "every kernel is then waited for: slow, for debugging"),
    _Rule("PYTORCH_NVML_BASED_CUDA_CHECK", False, "a look for devices then initialises CUDA"),
)


def gpus(devices: Collection[str], names: Collection[str] | None, ranks: int) -> Finding:
    """`devices`: /dev/nvidiaN that are there; `names`: what nvidia-smi lists; None: no answer."""
    if not devices and not names:
        return healthy("gpu", "none: ranks train on the CPU")
    count = len(names) if names is not None else len(devices)
    kinds = ", ".join(sorted(set(names or ())))
    evidence = f"{count} for {counted(ranks, 'rank')}" + (f": {kinds}" if kinds else "")
    if names is None:
        change = "repair the driver until `nvidia-smi` answers"
        return unhealthy(
            "gpu", f"{counted(count, 'device')}, and nvidia-smi does not answer", change
        )
    if count < ranks:
        change = "run one rank for each GPU: --nproc-per-node"
        return unhealthy("gpu", evidence, change)
    return healthy("gpu", evidence)


def environment(
    variables: Mapping[str, str], *, interfaces: Collection[str], has_gpu: bool, ranks: int
) -> list[Finding]:
    """One finding for each contradiction; a single healthy one that lists what is set otherwise."""
    found = [
        finding
        for rule in _RULES
        if (finding := _against(rule, variables, has_gpu=has_gpu)) is not None
    ]
    found += [
        unhealthy(_CHECK, f"{shown(name, variables[name])}: no such interface", f"unset {name}")
        for name in _INTERFACES
        if name in variables and not _names_one(variables[name], interfaces)
    ]
    found += _visible_devices(variables, has_gpu=has_gpu, ranks=ranks)
    found += _allocators(variables)
    if found:
        return found
    ours = [shown(n, v) for n, v in sorted(variables.items()) if n.startswith(_PREFIXES)]
    return [healthy(_CHECK, " ".join(ours) or "nothing of NCCL, Gloo, CUDA or torch is set")]


def refused_settings(variables: Mapping[str, str]) -> list[str]:
    """What a job with groups of NCCL's refuses to start with: a line for each, with its change."""
    return [
        f"{found.evidence}; {found.change}"
        for rule in _RULES
        if rule.is_refused and (found := _against(rule, variables, has_gpu=True)) is not None
    ]


def _against(rule: _Rule, variables: Mapping[str, str], *, has_gpu: bool) -> Finding | None:
    value = variables.get(rule.name)
    if value is None or (value.strip().lower() not in _OFF) is not rule.is_on:
        return None
    evidence = f"{shown(rule.name, value)}: {rule.why}"
    change = f"unset {rule.name}"
    return (unhealthy if has_gpu else unknown)(_CHECK, evidence, change)


def _names_one(pattern: str, interfaces: Collection[str]) -> bool:
    """As NCCL reads it: a list of prefixes; `=` asks for the whole name, `^` excludes."""
    if pattern.startswith("^"):
        return True
    is_whole, names = pattern.startswith("="), pattern.lstrip("=").split(",")
    return any(
        interface == name if is_whole else interface.startswith(name)
        for interface in interfaces
        for name in names
    )


def _visible_devices(variables: Mapping[str, str], *, has_gpu: bool, ranks: int) -> list[Finding]:
    value = variables.get("CUDA_VISIBLE_DEVICES")
    if value is None or not has_gpu:
        return []
    count = len([part for part in value.split(",") if part.strip() not in ("", "-1")])
    if count >= ranks:
        return []
    devices = counted(count, "device")
    evidence = f"{shown('CUDA_VISIBLE_DEVICES', value)}: {devices} for {counted(ranks, 'rank')}"
    return [unhealthy(_CHECK, evidence, "unset CUDA_VISIBLE_DEVICES, or run fewer ranks")]


def _allocators(variables: Mapping[str, str]) -> list[Finding]:
    """The old name and the new one, which wins from torch 2.9 on, saying different things."""
    old, new = variables.get("PYTORCH_CUDA_ALLOC_CONF"), variables.get("PYTORCH_ALLOC_CONF")
    if old is None or new is None or old == new:
        return []
    both = f"{shown('PYTORCH_CUDA_ALLOC_CONF', old)} and {shown('PYTORCH_ALLOC_CONF', new)}"
    return [unhealthy(_CHECK, f"{both} contradict each other", _ONE_ALLOCATOR)]
