"""Two ranks with NCCL's manners in one process, for tests that look at one of them closely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fakes.nccl_like.group import NcclLike
from fakes.nccl_like.works import Work
from stepfast.train import torch_private

WAIT_LIMIT_S = 20.0
CONNECT_LIMIT = timedelta(minutes=5)
SUM = dist.AllreduceOptions()


class Pair:
    """`near` is the rank that is looked at, `far` its peer, which answers where it is asked to."""

    def __init__(self, store: dist.Store, name: str) -> None:
        own = dist.PrefixStore(name, store)
        self.near, self.far = (NcclLike(own, rank, 2, CONNECT_LIMIT) for rank in range(2))
        self.near._set_group_name(name)
        self.far._set_group_name(f"{name} of the peer")

    def both(self, value: float = 1.0) -> torch.Tensor:
        """A whole all-reduce."""
        tensor = torch.full((4,), value)
        self.near.allreduce([tensor], SUM)
        self.answer(value)
        assert tensor.tolist() == [2 * value] * 4
        return tensor

    def alone(self, value: float = 1.0) -> tuple[torch.Tensor, Work]:
        """An all-reduce for which the peer does not come."""
        tensor = torch.full((4,), value)
        return tensor, self.near.allreduce([tensor], SUM)

    def answer(self, value: float = 1.0) -> None:
        """The peer comes."""
        assert self.far.allreduce([torch.full((4,), value)], SUM).host_wait(WAIT_LIMIT_S)


@contextmanager
def pairs(*names: str, limit_s: float = 600.0) -> Iterator[list[Pair]]:
    """A pair of ranks for each group, connected; nothing of them is left behind."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [Pair(store, name) for name in names]
    try:
        for pair in made:
            pair.both()
            pair.near.set_timeout(timedelta(seconds=limit_s))
        yield made
    finally:
        groups = [group for pair in made for group in (pair.near, pair.far)]
        groups[0]._group_start()
        for group in groups:
            group.abort()
        groups[0]._group_end()
        for group in groups:
            group.shutdown()
        torch_private.reset_modes()
