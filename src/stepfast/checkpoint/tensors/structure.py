"""Whether the tracked modules are built as they were, in less time than naming it all again takes.

Owns: what the names in a module follow from. Does not own: the names (`naming`).

Invariant: equal marks mean the same modules, parameters and buffers, by identity and under the same
keys, as long as whoever compares them keeps those objects alive.
"""

from __future__ import annotations

from torch import nn

from stepfast.checkpoint.tensors.local import loaded_type
from stepfast.checkpoint.tensors.naming import Objects


def marks_of(objects: Objects) -> list[object] | None:
    """What the names of all tracked modules follow from; None where they cannot be told so.

    Brings FSDP2 modules into sharded form first, as naming does: unsharded parameters are others.
    """
    flat = loaded_type("torch.distributed.fsdp", "FullyShardedDataParallel")
    sharded = loaded_type("torch.distributed.fsdp", "FSDPModule")
    marks: list[object] = []
    seen: set[int] = set()
    stack: list[nn.Module | None] = [v for v in objects.values() if isinstance(v, nn.Module)]
    while stack:
        module = stack.pop()
        marks.append(id(module))
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, flat):
            return None  # gives its parameters other memory whenever it likes
        if isinstance(module, sharded):
            module.reshard()
        for held in (module._parameters, module._buffers, module._modules):
            if held:
                marks += held
                marks += map(id, held.values())
        stack += module._modules.values()
    return marks
