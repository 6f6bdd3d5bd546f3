"""What groups a `build` made, so that a later generation can make them again without it.

Owns: the record, whether it can be replayed, and pointing kept meshes at the new groups.
Does not own: making groups (`train.torch_groups`), keeping models (`train.torch_kept`).

torch's registries are compared before and after; nothing is patched. Groups count their names, so a
gap in the counting is a call that this rank was no member of, and is repeated as such a call: ranks
that replay and ranks that really build then use the same names, store keys and barriers.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

from stepfast.train import torch_groups, torch_private
from stepfast.train.torch_groups import GroupCall

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup

    from stepfast.train.watched_store import WatchedStore


class Record:
    """The groups made between its construction and `close`, in order."""

    def __init__(self, store: WatchedStore | None) -> None:
        self.has_collectives = False
        """Whether an operation ran in any group: then all ranks build together, or none does."""
        self._steps: list[GroupCall | None] = []  # None: a call without this rank
        self._obstacle: str | None = None
        self._meshes: list[tuple[weakref.ref[Any], tuple[str, ...]]] = []
        self._mesh_infos: list[weakref.ref[Any]] = []
        self._detached: list[weakref.ref[ProcessGroup]] = []
        self._store = store
        self._keys_before = set(store.group_keys) if store is not None else set()
        self._groups_before = torch_groups.groups()
        self._count_before = torch_groups.group_count()
        self._operations_before = _operations(self._groups_before)

    @property
    def replay_obstacle(self) -> str | None:
        """Why the groups cannot be made again, or None.

        What is known after `build` is an early sight: the garbage collector does not see every
        holder. Ask again once the generation is dissolved: a group that is still alive then is held
        by something that would go on using it.
        """
        if self._obstacle is None and any(ref() is not None for ref in self._detached):
            gc.collect()  # it may hang in a cycle only
            alive = [group for ref in self._detached if (group := ref()) is not None]
            if alive:
                self._obstacle = _held_text(alive)
        return self._obstacle

    def close(self) -> None:
        """Ends the recording; call it while the groups are alive."""
        held = torch_groups.groups()
        self.has_collectives = _operations(held) > self._operations_before
        before = {id(group) for group in self._groups_before}
        self._groups_before = []  # or this list would be found among the groups' holders
        calls = [torch_groups.call_of(group) for group in held if id(group) not in before]
        obstacles = [call for call in calls if isinstance(call, str)]
        obstacles += self._destroyed_groups()
        if not obstacles:
            self._steps = self._with_gaps([call for call in calls if isinstance(call, GroupCall)])
        obstacles += filter(None, [torch_private.version_obstacle()])
        if obstacles:
            self._obstacle = obstacles[0]
        else:
            self._find_holders(held)
        self._store = None

    def detach(self) -> None:
        """Takes this generation's groups from kept objects; just before it is dissolved."""
        self._detached = [weakref.ref(group) for group in torch_groups.groups()]
        if self._obstacle is not None:
            return
        for mesh_ref, _ in self._meshes:
            if (mesh := mesh_ref()) is not None:
                torch_groups.point_mesh(mesh, ())
        for info_ref in self._mesh_infos:
            if (info := info_ref()) is not None:
                torch_groups.detach_mesh_info(info)

    def make_groups(self, rank: int) -> None:
        """Makes the groups, in a new generation of the same layout. Blocks in C."""
        for step in self._steps:
            if step is None:
                torch_groups.make_group_without(rank)
            else:
                torch_groups.make_group(step)

    def attach(self) -> None:
        """Points kept meshes at the groups of this generation."""
        self._detached = []
        for mesh_ref, names in self._meshes:
            if (mesh := mesh_ref()) is not None:
                torch_groups.point_mesh(mesh, names)

    def _with_gaps(self, calls: list[GroupCall]) -> list[GroupCall | None]:
        steps: list[GroupCall | None] = []
        count = self._count_before
        for call in calls:
            if not call.is_local:
                steps += [None] * (int(call.name) - count)
                count = int(call.name) + 1
            steps.append(call)
        return steps + [None] * (torch_groups.group_count() - count)

    def _destroyed_groups(self) -> list[str]:
        keys = self._store.group_keys - self._keys_before if self._store is not None else set()
        names = torch_groups.group_names()
        gone = sorted(key for key in keys if not names & set(key.split("//")[1:]))
        return [f"build made a group and destroyed it ({key})" for key in gone[:1]]

    def _find_holders(self, held: list[ProcessGroup]) -> None:
        holders = torch_groups.holders_of(held)
        if holders.strangers:
            self._obstacle = _stranger_text(holders.strangers)
        for mesh in holders.meshes:
            if names := torch_groups.names_on(mesh, held):
                self._meshes.append((weakref.ref(mesh), names))
        self._mesh_infos = [weakref.ref(info) for info in holders.mesh_infos]


def _operations(groups: list[ProcessGroup]) -> int:
    return sum(torch_groups.sequence_number(group) for group in groups)


def _held_text(alive: list[ProcessGroup]) -> str:
    return _stranger_text(torch_groups.holders_of(alive).strangers or ["something untracked"])


def _stranger_text(strangers: list[str]) -> str:
    kinds = ", ".join(sorted(set(strangers)))
    return f"a process group is held by {kinds}, and would be a dead one in the next generation"
