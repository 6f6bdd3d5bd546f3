"""The agent's hands in the checkpoint store: list, write, commit, each in a thread of its own.

Owns: the threads, and the store that is opened once; the job's sign of life in it. Does not own:
what is written when (`core.node_durable`), bytes and names (`checkpoint`), what is made of what is
found (`agent.first_look`).
Invariants: nothing here blocks the event loop; every piece of work ends as exactly one input of the
node's machine; a store that never answers keeps no process alive.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from stepfast.agent import memory
from stepfast.agent.first_look import judge
from stepfast.checkpoint import catalog, owner
from stepfast.checkpoint.arena import slot_of
from stepfast.checkpoint.catalog import Retention
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.manifest import Manifest, checkpoint_name
from stepfast.checkpoint.owner import StoreOwner, StoreTaken
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.checkpoint.writer import Pace, write_slot
from stepfast.core.messages import JobSettings
from stepfast.core.node_state import (
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
from stepfast.errors import EXIT_USER_ERROR, StateError, StepfastError

_RELEASE_LIMIT_S = 2.0
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
        self._writes: dict[tuple[Rank, SnapshotId, int], _Write] = {}
        self._opened: tuple[CheckpointStore, StoreOwner] | None = None
        self._opening = threading.Lock()
        self._is_closed = threading.Event()
        self._life: threading.Thread | None = None

    def list_checkpoints(self) -> None:
        """What the store holds."""
        self._begin("list", self._list, StoreUnusable(f"the checkpoint store: {_BROKEN}"))

    def write(self, order: WriteSlot) -> None:
        """A slot into the store."""
        broken = SlotNotWritten(order.rank, order.checkpoint, _BROKEN, order.attempt)
        write = self._writes[order.rank, order.checkpoint, order.attempt] = _Write()
        self._begin(f"write-{order.rank}", lambda: self._write(order, write), broken)

    def cancel(self, order: CancelWrite) -> None:
        """Its thread ends at the next piece. One that sits in a call of the store ends with it."""
        write = self._writes.get((order.rank, order.checkpoint, order.attempt))
        if write is not None:
            write.is_cancelled = True

    def signs(self) -> tuple[WriteSigns, ...]:
        """What the writes under way have given so far."""
        return tuple(
            WriteSigns(rank, checkpoint, write.signs, attempt)
            for (rank, checkpoint, attempt), write in self._writes.items()
        )

    def commit(self, order: CommitShards) -> None:
        """The manifest, and the end of what need not be kept."""
        broken = self._ended(order, time.monotonic(), reason=_BROKEN)
        self._begin("commit", lambda: self._commit(order), broken)

    def close(self, *, is_job_over: bool) -> None:
        """The agent ends. Where the job is over too, the store is free at once for another one, if
        it says so in time.
        """
        self._is_closed.set()
        if is_job_over and self._life is not None:
            work = threading.Thread(target=self._release, name="stepfast-release", daemon=True)
            work.start()
            work.join(_RELEASE_LIMIT_S)

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
            self._writes.pop((given.rank, given.checkpoint, given.attempt), None)
        self._feed(given)

    def _store(self) -> tuple[CheckpointStore, StoreOwner]:
        with self._opening:
            if self._opened is None:
                store = open_store(self._settings.checkpoints.url)
                self._opened = store, StoreOwner(store, self._settings.job_id)
            return self._opened

    def _note(self, text: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._feed, NodeNoted("checkpoint store", text))

    def _told_to_wait(self, job_id: str) -> None:
        self._note(
            f"it was job {job_id}'s, which has not said that it ended; waiting up to"
            f" {owner.LIMIT_S:g} s for a sign that it lives"
        )

    def _live(self) -> None:
        """Until the agent ends: this job has the store."""
        _, ours = self._store()
        while not self._is_closed.wait(owner.BEAT_S):
            try:
                ours.show_life()
            except StoreTaken as error:
                self._note(f"no more checkpoints: {error}")
                return
            except (OSError, StepfastError):
                continue  # it may be back at the next beat; who writes meanwhile says what it is

    def _release(self) -> None:
        try:
            self._store()[1].release()
        except (OSError, StepfastError):
            pass  # the next job waits a while for a sign

    def _list(self) -> NodeInput:
        settings = self._settings
        try:
            store, ours = self._store()
            below = ours.take(catalog.newest_generation(store), self._told_to_wait)
            self._life = threading.Thread(target=self._live, name="stepfast-owner", daemon=True)
            self._life.start()
            seen = catalog.survey(store)
            _try_to_write(store, self._slot_root.name)
        except StoreTaken as error:
            return StoreUnusable(str(error), EXIT_USER_ERROR)
        except (OSError, StepfastError) as error:
            return StoreUnusable(f"the checkpoint store cannot be used: {error}")
        layout = memory.layout_words(settings.world_size, settings.nproc_per_node)
        found = memory.look(self._slot_root, layout)
        is_strict = settings.checkpoints.is_strict
        return judge(store.url, seen, found, is_strict=is_strict, below=below)

    def _write(self, order: WriteSlot, write: _Write) -> NodeInput:
        began = time.monotonic()
        pace = Pace(self._settings.checkpoints.bytes_per_s_max, sleep=write.rest)
        try:
            store, ours = self._store()
            ours.cover(order.checkpoint.generation)
            shard = write_slot(
                store,
                slot_of(self._slot_root / f"rank-{order.rank}", order.checkpoint),
                order.checkpoint,
                rank=order.rank,
                world_size=self._settings.world_size,
                pace=pace,
                progress=write.moved,
            )
        except (OSError, StepfastError) as error:
            return SlotNotWritten(order.rank, order.checkpoint, str(error), order.attempt)
        seconds = time.monotonic() - began
        return SlotWritten(order.rank, order.checkpoint, shard, seconds, order.attempt)

    def _commit(self, order: CommitShards) -> NodeInput:
        began = time.monotonic()
        removed, vanished = frozenset[SnapshotId](), frozenset[SnapshotId]()
        reason = None
        try:
            store, ours = self._store()
            ours.cover(order.checkpoint.generation)
            commit(store, self._manifest(order))
            removed, vanished = self._remove_old(order)
        except (OSError, StepfastError) as error:
            reason = str(error)
        ended = self._ended(order, began, reason=reason, removed=removed)
        return replace(ended, vanished=vanished)

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

    def _remove_old(
        self, order: CommitShards
    ) -> tuple[frozenset[SnapshotId], frozenset[SnapshotId]]:
        """What was removed, and what was gone already. What fails here is tried again behind the
        next commit.
        """
        vanished = frozenset[SnapshotId]()
        settings = self._settings.checkpoints
        retention = Retention(
            keep_last=settings.keep_last, keep_every_steps=settings.keep_every_steps
        )
        try:
            store, _ = self._store()
            protected = order.in_flight | {order.checkpoint}
            seen = catalog.survey(store)
            vanished = seen.lacks(order.known)
            job_id = self._settings.job_id
            removed = catalog.prune(
                store, retention, protected=protected, void=order.void, job_id=job_id, seen=seen
            )
            catalog.sweep_unfinished(store, in_flight=order.in_flight)
        except (OSError, StepfastError) as error:
            text = f"what need not be kept could not be removed, and is tried again: {error}"
            self._note(text)
            return frozenset(), vanished
        return frozenset(removed), vanished


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
