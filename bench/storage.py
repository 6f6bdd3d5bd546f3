"""What moving a larger state costs: two ranks of a torchrun job, no training.

The machine's limits (copies into and out of a tmpfs mapping, write and fsync, reads, hashing)
stand beside stepfast's own parts and the others' saves and loads; all ranks at once, each sample
the slowest one's seconds. Into BENCH_DIR/storage-RANK, one JSON line a sample, and into
BENCH_DIR/windows-RANK which system was at work when.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from saving import PEERS, local_parts, peer, state_of
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.loading import StoredCheckpoint
from stepfast.checkpoint.manifest import Manifest, checkpoint_name, shard_name
from stepfast.checkpoint.store import open_store
from stepfast.checkpoint.tensors.reshard import restore
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.writer import write_slot
from stepfast.core.terms import SnapshotId
from torchrun_run import torchrun_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_llama

SLOTS = 4  # as in a job: three, and one that is being written
PIECE_BYTES = 8 << 20
# 57 M parameters, of which two ranks hold 343 MB each, with AdamW's state.
LARGER = replace(train_llama.SIZES["small"], dim=768, layers=8, ffn_dim=2304)


class Bench:
    """The state, and the record of samples."""

    def __init__(self, directory: Path, store: Path, samples: int) -> None:
        run = torchrun_run()
        self.rank, self.world_size, self.samples = run.rank, run.world_size, samples
        self.store = store
        args = SimpleNamespace(lr=1e-3, steps=1000)
        size = train_llama.SIZES["debug"] if os.environ["BENCH_SIZE"] == "debug" else LARGER
        self.model = train_llama.build_model(run, size, 0)
        self.optimizer, _ = train_llama.build_optimizer(self.model, args)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()  # which makes the optimizer's state
        self.optimizer.zero_grad()
        self.bytes = 0
        self._samples = (directory / f"storage-{self.rank}").open("w")
        self._windows = (directory / f"windows-{self.rank}").open("w")

    def timed(self, what: str, work: Callable[[], object]) -> float:
        """The slowest rank's seconds, all having begun together. Recorded if `what`
        is not empty."""
        dist.barrier()
        began = time.perf_counter()
        work()
        seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.record(what, float(seconds))
        return float(seconds)

    def record(self, what: str, seconds: float) -> None:
        if what:
            line = {"what": what, "seconds": seconds, "bytes": self.bytes}
            self._samples.write(json.dumps(line) + "\n")
            self._samples.flush()

    def window(self, system: str, phase: str) -> None:
        """From now on `system` is at work."""
        dist.barrier()
        line = {"system": system, "phase": phase, "at_s": time.monotonic()}
        self._windows.write(json.dumps(line) + "\n")
        self._windows.flush()


# --- the machine ----------------------------------------------------------------------------------


def write_bare(path: Path, data: memoryview) -> None:
    """What no writer can do without."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done : done + PIECE_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def read_bare(path: Path, buffer: memoryview) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(buffer):
        done += os.preadv(descriptor, [buffer[done : done + PIECE_BYTES]], done)
    os.close(descriptor)


def drop_cache(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# --- stepfast -------------------------------------------------------------------------------------


class Stepfast:
    """Its parts, each in the place where a job would use it."""

    def __init__(self, bench: Bench, slots: Path) -> None:
        self.bench = bench
        self.tree = StateTree({"model": bench.model, "optimizer": bench.optimizer}, rank=bench.rank)
        self.capture = Capture(Arena(slots / f"rank-{bench.rank}", SLOTS), self.tree)
        for step in range(SLOTS):  # lay out all slots
            self.captured = self.capture.take(SnapshotId(1, step))
        bench.bytes = self.captured.slot_bytes
        self.directory_store = open_store(str(bench.store / "stepfast"))
        self.step = SLOTS

    def measure(self) -> None:
        bench = self.bench
        source = torch.empty(bench.bytes, dtype=torch.uint8)
        mapped = self.capture._arena.newest().memory
        slot = torch.frombuffer(mapped, dtype=torch.uint8)
        source.copy_(slot)
        for number in range(bench.samples):
            copy = torch.empty_like(slot)
            copy.copy_(slot)
            bench.timed("limit: copy into a tmpfs mapping", lambda: slot.copy_(source))
            bench.timed("limit: copy out of a tmpfs mapping", lambda copy=copy: copy.copy_(slot))
            del copy
            path = bench.store / f"bare-{bench.rank}"
            data = memoryview(source.numpy())
            bench.timed("limit: write and fsync", lambda p=path, d=data: write_bare(p, d))
            bench.timed("limit: hash (xxh3-64)", lambda d=data: xxhash.xxh3_64(d).digest())
            path.unlink()
            self.save_and_restore(number)

    def restore_from_store(self, number: int, snapshot: SnapshotId) -> None:
        """Beside bare reads of the same file, in turns the first: what lies below (a device's own
        cache, a limit of a virtual disk) gives the first reader after a write another rate.
        """
        file = shard_name(self.bench.rank, self.bench.world_size)
        path = Path(
            self.directory_store.url, checkpoint_name(snapshot.step, snapshot.generation), file
        )
        buffer = memoryview(bytearray(self.bench.bytes))
        read_bare(path, buffer)
        for kind in ("cold", "cached"):
            works = {
                f"limit: read, {kind}": lambda: read_bare(path, buffer),
                f"stepfast: restore from the store, {kind}": lambda: self.load(snapshot),
            }
            for what, work in sorted(works.items(), reverse=number % 2 == 0):
                if kind == "cold":
                    drop_cache(self.bench.store)
                else:
                    read_bare(path, buffer)  # a cold restore has kept nothing there
                self.bench.timed(what, work)

    def save_and_restore(self, number: int) -> None:
        bench = self.bench
        snapshot = SnapshotId(1, self.step)
        self.step += 1
        found: list[Any] = []
        bench.timed("stepfast: copy, blocking", lambda: found.append(self.capture.take(snapshot)))
        path = found.pop().slot_path
        written_s = bench.timed(
            "stepfast: write",
            lambda: found.append(
                write_slot(
                    self.directory_store,
                    path,
                    snapshot,
                    rank=bench.rank,
                    world_size=bench.world_size,
                )
            ),
        )
        files: list[Any] = [None] * bench.world_size
        dist.all_gather_object(files, found.pop())
        manifest = Manifest(
            job_id="bench",
            step=snapshot.step,
            generation=snapshot.generation,
            world_size=bench.world_size,
            nproc_per_node=bench.world_size,
            stepfast_version="",
            torch_version="",
            created_at_s=0.0,
            files=tuple(files),
        )

        def commit_once() -> None:
            if bench.rank == 0:
                commit(self.directory_store, manifest)

        bench.record("stepfast: durable", written_s + bench.timed("", commit_once))
        bench.timed(
            "stepfast: restore from a slot",
            lambda: self.capture.restore(snapshot),
        )
        self.restore_from_store(number, snapshot)
        dist.barrier()
        if bench.rank == 0:
            shutil.rmtree(bench.store / "stepfast")

    def load(self, snapshot: SnapshotId) -> None:
        checkpoint = StoredCheckpoint.open(self.directory_store, snapshot)
        done = restore(self.tree, checkpoint, world_size=self.bench.world_size)
        assert not done.is_resharded, "the same layout"


# --- the others -----------------------------------------------------------------------------------


def measure_peer(bench: Bench, name: str) -> None:
    """Saves without training beside them: the shortest time to durable."""
    bench.window(name, "base")
    saver = peer(name)
    folder = bench.store / "peer"
    for number in range(-1, bench.samples):
        if number == 0:
            bench.window(name, "save")

        def save() -> None:
            saver.save(state_of(bench.model, bench.optimizer), folder)
            saver.fence()
            while saver.durable_at_s() is None:
                time.sleep(0.001)

        bench.timed(f"{name}: durable" if number >= 0 else "", save)
        if name in ("torch.save", "dcp.save") and number >= 0:
            load = load_local_shards if name == "torch.save" else load_dcp
            for kind in ("cold", "cached"):
                if kind == "cold":
                    drop_cache(folder)
                bench.timed(f"{name}: restore, {kind}", lambda load=load: load(bench, folder))
        dist.barrier()
        if bench.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
    bench.window("", "closing")
    saver.close()


@torch.no_grad()
def load_local_shards(bench: Bench, folder: Path) -> None:
    """Read and copied in place, into the tensors that are there."""
    saved = torch.load(folder / f"shard-{bench.rank}.pt", weights_only=True)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    pair_up(local_parts(state_of(bench.model, bench.optimizer)), saved, pairs)
    torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def pair_up(live: Any, saved: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if isinstance(live, torch.Tensor):
        pairs.append((live, saved))
    elif isinstance(live, dict):
        for key, value in live.items():
            pair_up(value, saved[key], pairs)


def load_dcp(bench: Bench, folder: Path) -> None:
    """In place: the tensors of the state dict are the live ones."""
    dcp.load(state_of(bench.model, bench.optimizer), checkpoint_id=folder)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    directory, store = Path(os.environ["BENCH_DIR"]), Path(os.environ["BENCH_STORE"])
    slots, samples = Path(os.environ["BENCH_SLOTS"]), int(os.environ["BENCH_SAMPLES"])
    bench = Bench(directory, store, samples)
    bench.window("stepfast", "base")
    stepfast = Stepfast(bench, slots)
    bench.window("stepfast", "save")
    for _ in range(2):
        path = stepfast.capture.take(SnapshotId(1, stepfast.step)).slot_path
        del path
        stepfast.step += 1
    bench.window("", "measuring")
    stepfast.measure()
    del stepfast
    dist.barrier()
    if bench.rank == 0:
        shutil.rmtree(slots, ignore_errors=True)
    for name in PEERS:
        measure_peer(bench, name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
