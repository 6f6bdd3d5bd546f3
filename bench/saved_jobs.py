"""Run the checkpoint bench's jobs and read what their ranks wrote down.

Owns: the command lines, the memory's peaks, the arithmetic from turns to seconds lost. Does not
own: what the jobs do (`llama_saved_by_*`, `storage`), limits and rows (`claims`).
"""

import json
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import HERE, BenchError, run
from stepfast.agent.zygotes import COPIES
from turns import BLOCK_TURNS, CYCLE_TURNS, DURABLE_TURNS, is_without

RANKS = 2
NEVER = "1000000"
SAMPLE_EVERY_S = 0.05
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


@dataclass(slots=True)
class Saves:
    """One system's durable saves in a training loop, a number for each save, in seconds."""

    blocked_s: list[float] = field(default_factory=list)  # at the boundary and at the fence
    boundary_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)  # turns meanwhile, less as many clean ones
    slower: list[float] = field(default_factory=list)  # a turn meanwhile, over a clean one
    durable_s: list[float] = field(default_factory=list)  # from the boundary on
    clean_s: list[float] = field(default_factory=list)

    def add(self, turns_s: list[float], clean_s: list[float]) -> None:
        step_s = statistics.median(clean_s)
        self.lost_s.append(sum(turns_s) - len(turns_s) * step_s)
        self.slower.append(statistics.fmean(turns_s) / step_s)
        self.clean_s.append(step_s)


@dataclass(slots=True)
class Pair:
    """Turns with a snapshot at each beside turns without any."""

    with_s: list[float]
    without_s: list[float]
    boundary_s: list[float]
    fence_s: list[float]


def model_words(size: str, tokens: int) -> list[str]:
    length = min(tokens, 256)
    batch = tokens // length
    return ["--size", size, "--sequence-length", str(length), "--batch-size", str(batch)]


# --- stepfast in a job ----------------------------------------------------------------------------


def stepfast_job(cycles: int, words: list[str], directory: Path) -> tuple[Saves, list[Pair]]:
    """Every snapshot and every durable checkpoint by the real thing, agents and all."""
    directory.mkdir()
    steps = (cycles + 1) * CYCLE_TURNS + 2
    command = [sys.executable, "-m", "stepfast", "run", "--nproc-per-node", str(RANKS)]
    command += ["--job-dir", str(directory / "job"), "--checkpoints", str(directory / "store")]
    command += ["--checkpoint-interval-steps", str(CYCLE_TURNS), "--checkpoint-interval-s", "0"]
    command += [str(HERE / "llama_saved_by_stepfast.py"), *words]
    run(
        [*command, "--steps", str(steps), "--eval-every", NEVER],
        directory,
        BENCH_DIR=str(directory),
    )
    lines = (directory / "job" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    committed = {
        event["event"]["step"]: event["t"]
        for event in events
        if event["event"]["type"] == "CheckpointCommitted"
    }
    ranks = [read_turns(directory / f"turns-{rank}") for rank in range(RANKS)]
    saves, pairs = Saves(), []
    for cycle in range(1, cycles + 1):
        pairs.append(pair_of(cycle, ranks))
        add_durable(cycle, ranks, committed, saves)
    return saves, pairs


def read_turns(path: Path) -> dict[int, dict[str, float]]:
    return {turn["step"]: turn for turn in map(json.loads, path.read_text().splitlines())}


def turns_of(ranks: list[dict[int, dict[str, float]]], steps: range, name: str) -> list[float]:
    """Of the rank that takes longer, turn by turn; `turn`: its whole time."""

    def value(turn: dict[str, float]) -> float:
        return turn["ended_s"] - turn["began_s"] if name == "turn" else turn[name]

    try:
        return [max(value(turns[step]) for turns in ranks) for step in steps]
    except KeyError as error:
        raise BenchError(f"turn {error} is missing") from error


def pair_of(cycle: int, ranks: list[dict[int, dict[str, float]]]) -> Pair:
    first = cycle * CYCLE_TURNS + DURABLE_TURNS
    blocks = [range(first + i * BLOCK_TURNS, first + (i + 1) * BLOCK_TURNS) for i in (0, 1)]
    blocks.sort(key=lambda block: is_without(block[0]))
    with_steps, without_steps = blocks
    return Pair(
        with_s=turns_of(ranks, with_steps, "turn"),
        without_s=turns_of(ranks, without_steps, "turn"),
        boundary_s=turns_of(ranks, with_steps, "boundary_s"),
        fence_s=turns_of(ranks, with_steps, "fence_s"),
    )


def add_durable(
    cycle: int,
    ranks: list[dict[int, dict[str, float]]],
    committed: dict[int, float],
    saves: Saves,
) -> None:
    """Turns with a snapshot at each until the first one of them is durable."""
    step = cycle * CYCLE_TURNS
    if step not in committed:
        raise BenchError(f"step {step} never became durable")
    began_s = min(turns[step]["began_s"] for turns in ranks)
    steps = range(step, step + DURABLE_TURNS)
    ends = [max(turns[s]["ended_s"] for turns in ranks) for s in steps]
    count = 1 + sum(end < committed[step] for end in ends)
    if count > DURABLE_TURNS:
        raise BenchError(f"step {step} became durable after more than {DURABLE_TURNS} turns")
    first = cycle * CYCLE_TURNS + DURABLE_TURNS
    clean = [s for s in range(first, first + 2 * BLOCK_TURNS) if is_without(s)]
    whole = range(clean[0], clean[-1] + 1)
    saves.add(turns_of(ranks, steps[:count], "turn"), turns_of(ranks, whole, "turn"))
    boundary = turns_of(ranks, steps[:1], "boundary_s")[0]
    saves.boundary_s.append(boundary)
    saves.blocked_s.append(boundary + turns_of(ranks, steps[:1], "fence_s")[0])
    saves.durable_s.append(committed[step] - began_s)


# --- the others in a job --------------------------------------------------------------------------


def peers_job(rounds: int, words: list[str], directory: Path) -> dict[str, Saves]:
    """The same model and steps, one system after the other in one loop."""
    directory.mkdir()
    (directory / "store").mkdir()
    run(
        [sys.executable, *_TORCHRUN, str(HERE / "llama_saved_by_peers.py"), *words],
        directory,
        BENCH_DIR=str(directory),
        BENCH_STORE=str(directory / "store"),
        BENCH_ROUNDS=str(rounds),
        OMP_NUM_THREADS="1",
    )
    ranks = [
        [json.loads(line) for line in (directory / f"saves-{rank}").read_text().splitlines()]
        for rank in range(RANKS)
    ]
    found: dict[str, Saves] = {}
    for per_rank in zip(*ranks, strict=True):
        saves = found.setdefault(per_rank[0]["system"], Saves())
        slowest = max(per_rank, key=lambda save: sum(save["turns_s"]))
        saves.add(slowest["turns_s"], slowest["clean_s"])
        saves.boundary_s.append(max(save["boundary_s"] for save in per_rank))
        saves.blocked_s.append(max(save["boundary_s"] + save["fence_s"] for save in per_rank))
        saves.durable_s.append(max(save["durable_s"] for save in per_rank))
    return found


# --- a larger state -------------------------------------------------------------------------------


def storage_job(
    samples: int, directory: Path, slots: Path, *, is_quick: bool
) -> tuple[dict[str, list[float]], int, dict[str, float]]:
    """Seconds by what was done, the bytes of each rank, and each system's peak of memory in MB."""
    directory.mkdir()
    (directory / "store").mkdir()
    watch = MemoryWatch()
    watch.start()
    try:
        run(
            [sys.executable, *_TORCHRUN, str(HERE / "storage.py")],
            directory,
            BENCH_DIR=str(directory),
            BENCH_STORE=str(directory / "store"),
            BENCH_SLOTS=str(slots),
            **COPIES,  # as ranks have it
            BENCH_SAMPLES=str(samples),
            BENCH_SIZE="debug" if is_quick else "larger",
            OMP_NUM_THREADS="1",
        )
    finally:
        watch.stop()
    found: dict[str, list[float]] = {}
    size_bytes = 0
    for line in map(json.loads, (directory / "storage-0").read_text().splitlines()):
        found.setdefault(line["what"], []).append(line["seconds"])
        size_bytes = line["bytes"]
    windows = [json.loads(line) for line in (directory / "windows-0").read_text().splitlines()]
    return found, size_bytes, watch.peaks_mb(windows)


class MemoryWatch(threading.Thread):
    """Private memory of all processes below this one, and what lies in /dev/shm, now and then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._seen: list[tuple[float, int]] = []

    def run(self) -> None:
        processes: list[int] = []
        for turn in range(10**9):
            if turn % 10 == 0:
                processes = below_this_one()
            private = sum(map(private_bytes, processes))
            self._seen.append((time.monotonic(), private + shared_bytes()))
            if self._ended.wait(SAMPLE_EVERY_S):
                return

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def peaks_mb(self, windows: list[dict[str, Any]]) -> dict[str, float]:
        """By system: the most while it saved, less what there was before it was there."""
        ends = [window["at_s"] for window in windows[1:]] + [float("inf")]
        peaks: dict[tuple[str, str], int] = {}
        for window, end in zip(windows, ends, strict=True):
            within = [size for at, size in self._seen if window["at_s"] <= at < end]
            choose = min if window["phase"] == "base" else max
            if window["system"] and within:
                peaks[window["system"], window["phase"]] = choose(within)
        names = {system for system, phase in peaks if phase == "save"}
        return {n: (peaks[n, "save"] - peaks[n, "base"]) / 1e6 for n in sorted(names)}


def below_this_one() -> list[int]:
    """The processes that this one started, and those that they did."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            behind_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        children.setdefault(int(behind_name[1]), []).append(int(path.parent.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def shared_bytes() -> int:
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize
