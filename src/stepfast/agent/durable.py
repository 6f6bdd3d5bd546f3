"""The agent's hands in the checkpoint store: list, write, commit, each in a thread of its own.

Owns: the threads, and the store that is opened once. Does not own: what is written when
(`core.node_durable`), bytes and names (`checkpoint`).
Invariants: nothing here blocks the event loop; every piece of work ends as exactly one input of the
node's machine; a store that never answers keeps no process alive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from stepfast.agent import memory
from stepfast.checkpoint import catalog
from stepfast.checkpoint.arena import slot_of
from stepfast.checkpoint.catalog import Retention, Survey
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.manifest import Manifest, checkpoint_name
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.checkpoint.writer import Pace, write_slot
from stepfast.core.messages import JobSettings
from stepfast.core.node_state import (
    CheckpointsListed,
    CommitEnded,
    NodeInput,
    NodeNoted,
    SlotNotWritten,
    SlotWritten,
    StoreUnusable,
    WriteSigns,
)
from stepfast.core.outputs import CancelWrite, CommitShards, WriteSlot
from stepfast.core.terms import Rank, SnapshotId
from stepfast.errors import StateError, StepfastError

_REST_S = 1.0  # a write that is held to a rate rests for so long at a time
_BROKEN = "an error of stepfast itself; the agent's output has its traceback"
Feed = Callable[[NodeInput], None]


class _Write:
    """A write under way: its thread gives signs of life, the event loop may call it off."""

    def __init__(self) -> None:
        self.signs = 0
        self.is_cancelled = False

    def moved(self, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """In the thread, between two calls of the store; raises where it shall end."""
        self.signs += 1
        if self.is_cancelled:
            raise StateError("the write was called off")

    def rest(self, seconds: float) -> None:
        """Sleep, and give signs meanwhile."""
        ends_at = time.monotonic() + seconds
        while (left_s := ends_at - time.monotonic()) > 0:
            time.sleep(min(left_s, _REST_S))
            self.moved()


class DurableWork:
    """One per agent, made at the welcome. Called in the event loop; `feed` is called there too."""

    def __init__(self, settings: JobSettings, slot_root: Path, feed: Feed) -> None:
        """Nothing is opened before `list_checkpoints`."""
        self._settings = settings
        self._slot_root = slot_root
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._writes: dict[tuple[Rank, SnapshotId], _Write] = {}
        self._opened: CheckpointStore | None = None
        self._opening = threading.Lock()

    def list_checkpoints(self) -> None:
        """What the store holds."""
        self._begin("list", self._list, StoreUnusable(f"the checkpoint store: {_BROKEN}"))

    def write(self, order: WriteSlot) -> None:
        """A slot into the store."""
        broken = SlotNotWritten(order.rank, order.checkpoint, _BROKEN)
        write = self._writes[order.rank, order.checkpoint] = _Write()
        self._begin(f"write-{order.rank}", lambda: self._write(order, write), broken)

    def cancel(self, order: CancelWrite) -> None:
        """Its thread ends at the next piece. One that sits in a call of the store ends with it."""
        write = self._writes.get((order.rank, order.checkpoint))
        if write is not None:
            write.is_cancelled = True

    def signs(self) -> tuple[WriteSigns, ...]:
        """What the writes under way have given so far."""
        return tuple(WriteSigns(r, c, write.signs) for (r, c), write in self._writes.items())

    def commit(self, order: CommitShards) -> None:
        """The manifest, and the end of what need not be kept."""
        broken = self._ended(order, time.monotonic(), reason=_BROKEN)
        self._begin("commit", lambda: self._commit(order), broken)

    def _begin(self, name: str, work: Callable[[], NodeInput], broken: NodeInput) -> None:
        """`broken`: what is said where the thread dies of what nobody expected."""

        def run() -> None:
            given = broken
            try:
                given = work()
            finally:
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._ended_with, given)

        threading.Thread(target=run, name=f"stepfast-{name}", daemon=True).start()

    def _ended_with(self, given: NodeInput) -> None:
        if isinstance(given, SlotWritten | SlotNotWritten):
            self._writes.pop((given.rank, given.checkpoint), None)
        self._feed(given)

    def _store(self) -> CheckpointStore:
        with self._opening:
            if self._opened is None:
                self._opened = open_store(self._settings.checkpoints.url)
            return self._opened

    def _list(self) -> NodeInput:
        try:
            store = self._store()
            seen = catalog.survey(store)
            _try_to_write(store, self._slot_root.name)
        except (OSError, StepfastError) as error:
            return StoreUnusable(f"the checkpoint store cannot be used: {error}")
        if not seen.manifests and (refusal := self._refusal(seen)) is not None:
            return StoreUnusable(refusal)
        committed = tuple(sorted(manifest.snapshot for manifest in seen.manifests))
        problems = [finding.text for finding in seen.damaged]
        # Older ones are no candidates: whatever they lack, a newer one is whole.
        begun = [s for s in seen.unfinished if not committed or s > committed[-1]]
        for snapshot in begun:
            where = checkpoint_name(snapshot.step, snapshot.generation)
            problems.append(f"{store.url}/{where}: it has no manifest: it was never committed")
        return CheckpointsListed(committed, tuple(problems))

    def _refusal(self, seen: Survey) -> str | None:
        """Why no job may begin anew beside a store without a checkpoint that can be read."""
        if memory.has_set_aside(self._slot_root):
            return (
                "memory holds steps of another layout, and the store has no checkpoint to reshard"
                f" from; {memory.HINT}"
            )
        if seen.damaged and not memory.has_slots(self._slot_root):
            first = f"{self._store().url}/{seen.damaged[0].name}"
            text = seen.damaged[0].text.removeprefix(f"{first}: ")
            return (
                f"none of {len(seen.damaged)} checkpoints can be read ({first}: {text}); choose"
                " another place for --checkpoints to begin anew"
            )
        return None

    def _write(self, order: WriteSlot, write: _Write) -> NodeInput:
        began = time.monotonic()
        pace = Pace(self._settings.checkpoints.bytes_per_s_max, sleep=write.rest)
        try:
            shard = write_slot(
                self._store(),
                slot_of(self._slot_root / f"rank-{order.rank}", order.checkpoint),
                order.checkpoint,
                rank=order.rank,
                world_size=self._settings.world_size,
                pace=pace,
                progress=write.moved,
            )
        except (OSError, StepfastError) as error:
            return SlotNotWritten(order.rank, order.checkpoint, str(error))
        return SlotWritten(order.rank, order.checkpoint, shard, time.monotonic() - began)

    def _commit(self, order: CommitShards) -> NodeInput:
        began = time.monotonic()
        removed: frozenset[SnapshotId] = frozenset()
        reason = None
        try:
            commit(self._store(), self._manifest(order))
            removed = self._remove_old(order)
        except (OSError, StepfastError) as error:
            reason = str(error)
        return self._ended(order, began, reason=reason, removed=removed)

    def _ended(
        self,
        order: CommitShards,
        began: float,
        *,
        reason: str | None,
        removed: frozenset[SnapshotId] = frozenset(),
    ) -> CommitEnded:
        return CommitEnded(
            checkpoint=order.checkpoint,
            name=checkpoint_name(order.checkpoint.step, order.checkpoint.generation),
            size_bytes=sum(shard.size_bytes for shard in order.shards),
            seconds=time.monotonic() - began,
            removed=removed,
            reason=reason,
        )

    def _manifest(self, order: CommitShards) -> Manifest:
        settings = self._settings
        return Manifest(
            job_id=settings.job_id,
            step=order.checkpoint.step,
            generation=order.checkpoint.generation,
            world_size=settings.world_size,
            nproc_per_node=settings.nproc_per_node,
            stepfast_version=_version_of("stepfast"),
            torch_version=_version_of("torch"),
            created_at_s=time.time(),
            files=order.shards,
            user=settings.checkpoints.user,
        )

    def _remove_old(self, order: CommitShards) -> frozenset[SnapshotId]:
        """What fails here is tried again behind the next commit."""
        settings = self._settings.checkpoints
        retention = Retention(
            keep_last=settings.keep_last, keep_every_steps=settings.keep_every_steps
        )
        try:
            protected = order.in_flight | {order.checkpoint}
            removed = catalog.prune(self._store(), retention, protected=protected)
            catalog.sweep_unfinished(self._store(), in_flight=order.in_flight)
        except (OSError, StepfastError) as error:
            text = f"what need not be kept could not be removed, and is tried again: {error}"
            self._loop.call_soon_threadsafe(self._feed, NodeNoted("checkpoint store", text))
            return frozenset()
        return frozenset(removed)


def _try_to_write(store: CheckpointStore, node: str) -> None:
    """A store that takes nothing is found before the first step, not at the first checkpoint: both
    ways in which a checkpoint comes to be are tried.
    """
    name = f"probe-{node}"
    with store.writer(name) as writer:
        writer.write(b"may this node write here?")
    store.delete(name)
    store.put_if_absent(name, b"and may it commit?")
    store.delete(name)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
