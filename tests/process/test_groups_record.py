"""What `build` made is recorded; what cannot be made again is named. A generation of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stepfast.core.terms import Generation, Rank
from stepfast.errors import Interrupted, OperatingError
from stepfast.train import torch_groups
from stepfast.train.backends import GLOO
from stepfast.train.groups import Groups, Membership
from stepfast.train.storehost import open_server


def _membership(generation: int, port: int, *, forming_timeout_s: float = 5.0) -> Membership:
    return Membership(
        generation=Generation(generation),
        rank=Rank(0),
        world_size=1,
        store_host="127.0.0.1",
        store_port=port,
        forming_timeout_s=forming_timeout_s,
    )


def _never() -> bool:
    return False


@pytest.fixture
def store_port() -> Iterator[int]:
    server, port = open_server("127.0.0.1")
    yield port
    del server


@pytest.fixture
def groups(store_port: int) -> Iterator[Groups]:
    groups = Groups(GLOO)
    groups.form(_membership(1, store_port), _never)
    yield groups
    groups.dissolve()


def test_replayed_groups_have_their_names_and_the_mesh_finds_them(groups: Groups, store_port: int):
    with groups.recording() as record:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        dist.new_group([0], use_local_synchronization=True, group_desc="local")
        mesh._flatten("ab")
    assert record.replay_obstacle is None
    assert not record.has_collectives
    names, count = torch_groups.group_names(), torch_groups.group_count()

    groups.abort()
    groups.dissolve()
    assert record.replay_obstacle is None
    assert torch_groups.groups() == []
    groups.form(_membership(2, store_port), _never)
    groups.replay(record)

    assert torch_groups.group_names() == names
    assert torch_groups.group_count() == count
    dist.all_reduce(torch.ones(1), group=mesh.get_group("a"))
    assert all(group in torch_groups.groups() for group in mesh._pg_registry.values())
    assert groups.progress().operations == 1


def test_a_handle_that_the_user_holds_is_an_obstacle(groups: Groups):
    holder = SimpleNamespace(others=[])
    with groups.recording() as record:
        holder.group = dist.new_group([0])
    assert record.replay_obstacle is not None
    assert "held by" in record.replay_obstacle
    assert groups.abort().failed_count == 0


def test_a_handle_that_the_user_takes_later_is_found_when_the_generation_is_over(
    groups: Groups, store_port: int
):
    with groups.recording() as record:
        mesh = init_device_mesh("cpu", (1,))
    assert record.replay_obstacle is None
    taken = SimpleNamespace(group=mesh.get_group())  # untracked by the garbage collector
    groups.dissolve()
    assert record.replay_obstacle is not None and "held by" in record.replay_obstacle
    groups.form(_membership(2, store_port), _never)
    with pytest.raises(OperatingError, match="cannot be made again"):
        groups.replay(record)
    assert taken


def test_collectives_in_build_are_seen(groups: Groups):
    with groups.recording() as record:
        dist.all_reduce(torch.ones(1))
    assert record.has_collectives


def test_a_group_made_and_destroyed_is_an_obstacle(groups: Groups):
    with groups.recording() as record:
        dist.destroy_process_group(dist.new_group([0]))
    assert record.replay_obstacle is not None and "destroyed" in record.replay_obstacle


def test_an_aborted_generation_refuses_its_store(groups: Groups):
    groups.abort()
    with pytest.raises(Interrupted):
        dist.new_group([0])


def test_forming_is_left_and_leaves_nothing(store_port: int):
    groups = Groups(GLOO)
    membership = _membership(1, store_port)
    alone_of_two = Membership(
        generation=membership.generation,
        rank=Rank(0),
        world_size=2,
        store_host="127.0.0.1",
        store_port=store_port,
        forming_timeout_s=5.0,
    )
    asked = iter([False] * 5)
    with pytest.raises(Interrupted):
        groups.form(alone_of_two, lambda: next(asked, True))
    assert groups.abandoned_count == 0
    assert groups.connection_count() == 0
    groups.form(_membership(2, store_port), _never)
    groups.dissolve()


def test_nobody_there_is_an_operating_error():
    groups = Groups(GLOO)
    with pytest.raises(OperatingError):
        groups.form(_membership(1, 1, forming_timeout_s=0.3), _never)
