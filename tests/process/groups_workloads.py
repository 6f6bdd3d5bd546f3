"""What ranks do in the tests of `train.groups`; a module of its own, so that a fresh process can
import it.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import fully_shard

from stepfast.errors import Interrupted
from stepfast.train import torch_groups, torch_private
from stepfast.train.groups import Groups, Membership

THREADS_AT_REST = 2  # the main one, and the one that hears of aborts
SETTLE_LIMIT_S = 60.0
"""How long what an abort woke may take to end, on a machine that has much else to do."""


def _settled(before: dict[str, int] | None) -> dict[str, int]:
    """What is left over, once it is no more than `before`, or did not become so for long."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while True:
        now = _left_over()
        if before is None:
            is_settled = now["python threads"] <= THREADS_AT_REST
        else:
            is_settled = all(now[name] <= before[name] for name in now if name != "resident MiB")
        if is_settled or time.monotonic() > deadline:
            return now
        threading.Event().wait(0.1)


def _left_over() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "groups": len(torch_groups.groups()),
        "group objects": _count_alive(),
        "excepthooks": _depth_of_excepthook(),
        "resident MiB": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20,
    }


_ALIVE: list[weakref.ref[ProcessGroup]] = []


def _count_alive() -> int:
    """Groups of earlier generations that something still refers to."""
    return sum(ref() is not None for ref in _ALIVE)


def _depth_of_excepthook() -> int:
    return int("init_process_group" in sys.excepthook.__qualname__)


class Collectives:
    """Collectives for ever in the world, in a mesh's groups and in a group of the user's own."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.rounds = 0
        self._first: dict[str, int] | None = None

    def run(
        self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]
    ) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        own = dist.new_group([0, 1, 2])
        _ALIVE[:] = [ref for ref in _ALIVE if ref() is not None]
        _ALIVE.extend(weakref.ref(group) for group in torch_groups.groups())
        turns, elements = order if isinstance(order, tuple) else (order, 1000)
        value = torch.ones(elements)
        turn = 0
        while True:
            dist.all_reduce(value.fill_(1.0))
            dist.all_reduce(value, group=mesh.get_group("inner"))
            if self.rank < 3:
                dist.all_reduce(value, group=own)
            turn += 1
            if turn == turns:
                return groups.progress()

    def quiet(self, groups: Groups) -> Any:
        self.rounds += 1
        if self.rounds % 10:
            return None
        now = _settled(self._first)
        self._first = self._first or now
        return now


class Blocked:
    """Every rank waits in another group, for a peer that never comes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def run(
        self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]
    ) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
        own = dist.new_group([2, 3])
        value = torch.ones(100_000)
        if self.rank == 0:
            dist.all_reduce(value, group=mesh.get_group("row"))
        elif self.rank == 1:
            dist.barrier(group=mesh.get_group("column"))
        elif self.rank == 2:
            work = dist.all_reduce(value, group=own, async_op=True)
            work.wait()
        else:
            dist.recv(value, src=0)

    def quiet(self, groups: Groups) -> Any:
        return None


class Training:
    """A small FSDP2 model on a 2 x 2 mesh, kept over generations; snapshots are files of a
    directory.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.rank = rank
        self.directory = Path(directory)
        self.model: nn.Module | None = None
        self.newest_step = -1
        self.friend = Friend()

    def run(
        self, groups: Groups, membership: Membership, order: Any, leaving: Callable[[], bool]
    ) -> Any:
        resume_step, last_step = order
        how = self._model_ready(groups, leaving)
        assert self.model is not None
        if resume_step == 0 and not self._file(0).exists():
            self._save(0)
        self._load(resume_step)
        self.newest_step = resume_step
        for step in range(resume_step, last_step):
            self._train(step)
            if leaving():  # what an aborted collective left behind is no state
                raise Interrupted("the generation ended within the step")
            self._save(step + 1)
            self.newest_step = step + 1
        assert self.friend.is_well(), "a connection of the user's own was shut"
        return how, self._digest(last_step), torch_groups.group_count()

    def quiet(self, groups: Groups) -> Any:
        assert self.friend.is_well(), "a connection of the user's own was shut"
        return self.newest_step

    def _model_ready(self, groups: Groups, leaving: Callable[[], bool]) -> str:
        if self.model is None:
            with groups.recording() as record:
                self._build()
            assert record.replay_obstacle is None, record.replay_obstacle
            assert not record.has_collectives
            self.record, self.flags = record, torch_private.module_flags([self.model])
            return "built"
        obstacle = torch_private.keep_obstacle([self.model]) or self.record.replay_obstacle
        if obstacle is not None and "initialising" in obstacle:
            self.model = self.optimizer = None
            return self._model_ready(groups, leaving) + " again"
        assert obstacle is None, obstacle
        groups.replay(self.record, leaving)
        torch_private.reset_after_interrupt([self.model], self.flags)
        torch_private.reset_modes()
        return "kept"

    def _build(self) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        dist.new_group([0, 1, 2])  # nobody keeps it: only the counting of names has to agree
        self.pair = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
        )
        for block in model:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.mesh = mesh
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def _train(self, step: int) -> None:
        assert self.model is not None and self.optimizer is not None
        data = torch.Generator().manual_seed(step * 1000 + self.rank)
        for part in range(2):  # two micro-batches, the first without reduction
            self.model.set_requires_gradient_sync(part == 1)
            self.model.set_is_last_backward(part == 1)
            loss = self.model(torch.randn(8, 64, generator=data)).square().mean()
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.mesh.get_group("shard"))
        own = dist.new_group([0, 3])  # inside the loop: names have to agree after a replay too
        if self.rank in (0, 3):
            dist.all_reduce(total, group=own)
            dist.destroy_process_group(own)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _tensors(self) -> list[torch.Tensor]:
        assert self.model is not None and self.optimizer is not None
        found = []
        for param in self.model.parameters():
            found.append(param.data)
            state = self.optimizer.state.get(param, {})
            found += [state[name] for name in sorted(state)]
        return [getattr(tensor, "_local_tensor", tensor) for tensor in found]

    def _file(self, step: int) -> Path:
        return self.directory / f"rank-{self.rank}-step-{step}.pt"

    def _save(self, step: int) -> None:
        partial = self._file(step).with_suffix(".partial")
        torch.save(self._tensors(), partial)
        partial.rename(self._file(step))

    def _load(self, step: int) -> None:
        assert self.model is not None and self.optimizer is not None
        saved = torch.load(self._file(step))
        self.optimizer.state.clear()
        if step > 0:  # makes the optimizer's entries, whose values are then read
            for param in self.model.parameters():
                param.grad = torch.zeros_like(param)
            self.optimizer.step()
            self.optimizer.zero_grad()
        with torch.no_grad():
            for tensor, value in zip(self._tensors(), saved, strict=True):
                tensor.copy_(value)

    def _digest(self, step: int) -> str:
        digest = hashlib.sha256()
        for tensor in self._tensors():
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class Friend:
    """Connections of the user's own to a server of the user's own; a thread makes more all the
    time.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._make_more, daemon=True).start()

    def _make_more(self) -> None:
        while len(self._pairs) < 100:
            near = socket.create_connection(self._server.getsockname())
            self._pairs.append((near, self._server.accept()[0]))
            threading.Event().wait(0.005)

    def is_well(self) -> bool:
        """Whether every connection still carries a byte each way."""
        for near, far in list(self._pairs):
            for sender, receiver in ((near, far), (far, near)):
                sender.sendall(b"x")
                if receiver.recv(1) != b"x":
                    return False
        return True
