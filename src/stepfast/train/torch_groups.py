"""torch.distributed's registries of groups: reading them, making a group again, emptying them.

Owns: the private names of `distributed_c10d` and of the meshes that hold groups.
Does not own: when (`train.groups`, `train.replay`), the versions (`train.torch_private`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from stepfast.errors import OperatingError

if TYPE_CHECKING:
    from stepfast.train.torch_kept import Holders

_HASHED_NAME_CHARACTERS = 40  # a SHA-1 in hex: groups made with use_local_synchronization


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCall:
    """What made a group, as far as it is needed to make its successor under the same name."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    tag: str | None
    description: str

    @property
    def is_local(self) -> bool:
        """Whether only the group's members made the call; such a name does not count calls."""
        return len(self.name) == _HASHED_NAME_CHARACTERS


def world() -> ProcessGroup | None:
    """The default group, or None."""
    return c10d.GroupMember.WORLD


def groups() -> list[ProcessGroup]:
    """All groups that this rank is a member of, the world first. From any thread."""
    return list(c10d._world.pg_names)


def group_names() -> set[str]:
    """The names of all groups that this rank is a member of."""
    return set(c10d._world.pg_names.values())


def group_count() -> int:
    """How many names `new_group` has counted, calls without this rank included."""
    return int(c10d._world.group_count)


def sequence_number(group: ProcessGroup) -> int:
    """How many operations this rank has started in the group; 0 once it is shut down. From any
    thread.
    """
    try:
        number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # no stub
        return int(number)
    except RuntimeError:
        return 0


def call_of(group: ProcessGroup) -> GroupCall | str:
    """What makes this group again; or, in words, why that cannot be."""
    name = str(c10d._world.pg_names[group])
    backend = group._get_backend(torch.device("cpu"))
    if not isinstance(backend, c10d.ProcessGroupGloo):
        return f"group {name} is not Gloo's alone: making it again has not been verified"
    tag = c10d._world.pg_to_tag.get(group, "")
    return GroupCall(
        name=name,
        ranks=tuple(c10d._world.pg_group_ranks[group]),
        backend=c10d._world.pg_map[group][0],
        timeout=backend.options._timeout,
        tag=tag.removeprefix("user:") if tag.startswith("user:") else None,
        description=group.group_desc,
    )


def make_group(call: GroupCall) -> None:
    """Makes the group again; a name other than before means that the generations' calls have
    drifted apart.
    """
    made = c10d._new_group_with_tag(
        ranks=list(call.ranks),
        timeout=call.timeout,
        backend=call.backend,
        pg_tag=call.tag,
        use_local_synchronization=call.is_local,
        group_desc=call.description,
        sort_ranks=False,
    )
    if made.group_name != call.name:
        raise OperatingError(f"group {call.name} came back as {made.group_name}: build again")


def make_group_without(rank: int) -> None:
    """Takes part in a `new_group` call that `rank`, this process, is no member of."""
    c10d._new_group_with_tag(ranks=[0 if rank else 1])


def destroy_world() -> None:
    """Destroys every group and empties the registries, those of a half-formed world too."""
    if world() is not None:
        c10d.destroy_process_group()
    state = c10d._world
    for registry in (state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config):
        registry.clear()
    state.pg_to_tag.clear()
    state.tags_to_pg.clear()
    state.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()
    c10d._update_default_pg(None)
    state.group_count = 0
    # Each init_process_group wraps sys.excepthook once more and never takes its wrapper off.
    while getattr(sys.excepthook, "__qualname__", "").startswith("init_process_group."):
        sys.excepthook = _wrapped_hook(sys.excepthook)


def _wrapped_hook(hook: Any) -> Any:
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
    return cells["old_hook"].cell_contents


def abort_device_groups(device: torch.device, aborted_before: set[int]) -> int:
    """Aborts all groups whose part for `device` ends by an abort, at once; returns how many.

    Not from the main thread. `aborted_before`: the groups that were, by id, this call's added.
    Never run with NCCL: needs a GPU.
    """
    held = [group for group in groups() if id(group) not in aborted_before]
    aborted = [(group, part) for group in held if (part := _part_of(group, device)) is not None]
    aborted_before.update(id(group) for group in held)
    if not aborted:
        return 0
    # Grouped, or communicators that depend on each other wait for each other's abort.
    first = aborted[0][1]
    first._group_start()
    for group, _ in aborted:
        group.abort()
    first._group_end()
    return len(aborted)


def device_error(device: torch.device) -> str | None:
    """What a group's part for `device` knows to be wrong by now, in words; from any thread."""
    for group in groups():
        part = _part_of(group, device)
        error = part.get_error() if part is not None else None
        if error is not None and error.name != "SUCCESS":
            return f"group {c10d._world.pg_names.get(group)} reports {error.name}"
    return None


def _part_of(group: ProcessGroup, device: torch.device) -> Any:
    """The group's backend for `device` if such are aborted together, as NCCL's are; else None."""
    try:
        part = group._get_backend(device)
    except RuntimeError:
        return None
    return part if hasattr(part, "_group_start") else None


def holders_of(held: list[ProcessGroup]) -> Holders:
    """The objects that refer to these groups, torch's registries left out; only in a verified
    torch.
    """
    from stepfast.train import torch_kept

    return torch_kept.holders_of(held)


def names_on(mesh: DeviceMesh, held: list[ProcessGroup]) -> tuple[str, ...]:
    """Those of the groups `held` that the mesh keeps as objects, by name; a mesh of groups that are
    no more may still be alive somewhere.
    """
    known = {id(group) for group in held}
    return tuple(name for name, group in mesh._pg_registry.items() if id(group) in known)


def point_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Lets the mesh keep this generation's groups of these names, and no other; () detaches it."""
    mesh._pg_registry.clear()
    for name in names:
        mesh._pg_registry[name] = c10d._resolve_process_group(c10d.GroupName(name))


def detach_mesh_info(info: object) -> None:
    """Takes the groups from FSDP2's note of a mesh; `reset_after_interrupt` puts new ones in."""
    for name in ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group"):
        if hasattr(info, name):
            setattr(info, name, None)
