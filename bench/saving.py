"""How others save a training's state: each system with what it has against holding the loop.

Owns: the calls to torch's own ways of saving. Does not own: the loop, what is timed.

Kind to them throughout: the cheaper state dict (`state_dict()` of model and optimizer; DCP's own
`get_state_dict` takes longer), groups of their own for collectives, processes and stagers that are
kept from save to save, nothing of the loader or generators. Each one syncs what it writes.
"""

import gc
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

State = dict[str, Any]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The live tensors, by name; nothing is copied."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class Saver(Protocol):
    """One save at a time: `save`, `fence`, then turns until `durable_at_s` says when it was."""

    name: str

    def save(self, state: State, folder: Path) -> None:
        """At a boundary; returns when the loop may go on."""

    def fence(self) -> None:
        """Before the optimizer's step: returns when it may change what is saved."""

    def durable_at_s(self) -> float | None:
        """The moment on the clock of `time.monotonic`; None: not yet. Raises what went wrong."""

    def close(self) -> None:
        """Let go of processes and memory."""


class Blocking:
    """Saves in the training thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._durable_at_s = 0.0

    def save(self, state: State, folder: Path) -> None:
        if self.name == "torch.save":
            save_local_shards(state, folder)
        else:
            dcp.save(state, checkpoint_id=folder)
        self._durable_at_s = time.monotonic()

    def fence(self) -> None:
        pass

    def durable_at_s(self) -> float | None:
        return self._durable_at_s

    def close(self) -> None:
        pass


class Asynchronous:
    """`dcp.async_save`. With a stager that is kept, and copies beside the loop, or its default."""

    def __init__(self, name: str, kind: AsyncCheckpointerType, *, is_kept: bool) -> None:
        self.name = name
        self._kind = kind
        self._group = dist.new_group(backend="gloo")  # the loop has the other one
        self._stager: DefaultStager | None = None
        if is_kept:
            is_shared = kind is AsyncCheckpointerType.PROCESS
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,  # both need a device
                    use_non_blocking_copy=False,
                    use_shared_memory=is_shared,
                    use_async_staging=True,
                )
            )
        self._staged: Future[None] | None = None
        self._uploaded: Future[Any] | None = None
        self._ended_at_s = 0.0

    def save(self, state: State, folder: Path) -> None:
        response = dcp.async_save(
            state,
            checkpoint_id=folder,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged, self._uploaded = response.staging_completion, response.upload_completion
        else:
            self._staged, self._uploaded = None, response
        self._uploaded.add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        self._ended_at_s = time.monotonic()

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def durable_at_s(self) -> float | None:
        assert self._uploaded is not None, "saved before"
        if not self._uploaded.done():
            return None
        self._uploaded.result()
        return self._ended_at_s or time.monotonic()

    def close(self) -> None:
        self._uploaded = None
        if self._stager is not None:
            self._stager.close()
        _async_process_executor._CHECKPOINT_PROCESS = None  # which ends it
        gc.collect()


def save_local_shards(state: State, folder: Path) -> None:
    """Each rank its own file: whole and durable before it has its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-{dist.get_rank()}.pt"
    with open(f"{path}.part", "wb") as file:
        torch.save(local_parts(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.part", path)


def local_parts(value: Any) -> Any:
    """The same structure with the local part of each sharded tensor."""
    if isinstance(value, dict):
        return {key: local_parts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [local_parts(item) for item in value]
    return value.to_local() if hasattr(value, "to_local") else value


THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
PEERS = (
    "torch.save",
    "dcp.save",
    "async thread",
    "async thread, staged beside",
    "async process",
    "async process, staged beside",
)


def peer(name: str) -> Saver:
    """One of PEERS. Collective, for some make a group."""
    if not name.startswith("async"):
        return Blocking(name)
    kind = PROCESS if "process" in name else THREAD
    return Asynchronous(name, kind, is_kept=name.endswith("beside"))
