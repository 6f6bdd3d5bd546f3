"""Claims about staging: what it holds the loop, and whether pinned memory is given back.

Never run on a GPU; see `gpu.bench`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from gpu.bench import Bench, Outcome
from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.tensors.copier import StreamCopier
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.core.terms import Generation, SnapshotId, Step

WARM_UP_TURNS = 17  # the 1st, 2nd, 4th, 8th and 16th snapshot are whole
STALL_SHARE_MAX = 0.10  # of the time that the copy takes
STALL_MS_MIN = 1.0  # less is noise of the host
COMPUTE_RATIO = 2.0  # a turn computes so many times as long as its state takes to copy
NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
_PARTS = 16


def staging_stall(bench: Bench) -> Outcome:
    """Turns with a snapshot each beside turns without, and the copy's time by itself."""
    rig = _Rig(bench)
    copy_s = rig.copy_alone_s()
    work = _Work(bench, copy_s * COMPUTE_RATIO)
    for _ in range(WARM_UP_TURNS):
        rig.turn(work, with_snapshot=True)
    without_s = [rig.turn(work, with_snapshot=False) for _ in range(bench.turns)]
    with_s = [rig.turn(work, with_snapshot=True) for _ in range(bench.turns)]
    rig.capture.fence()
    stall_s = statistics.median(with_s) - statistics.median(without_s)
    limit_s = max(STALL_MS_MIN / 1e3, STALL_SHARE_MAX * copy_s)
    numbers = {
        "state_bytes": rig.state_bytes,
        "d2h_gb_per_s": round(rig.state_bytes / copy_s / 1e9, 2),
        "copy_ms": round(copy_s * 1e3, 3),
        "turn_ms_without": round(statistics.median(without_s) * 1e3, 3),
        "turn_ms_with": round(statistics.median(with_s) * 1e3, 3),
        "held_ms": round(statistics.median(rig.held_s) * 1e3, 3),
        "stall_ms": round(stall_s * 1e3, 3),
        "limit_ms": round(limit_s * 1e3, 3),
    }
    reason = f"a turn is {stall_s * 1e3:.2f} ms longer where the copy takes {copy_s * 1e3:.1f} ms"
    return Outcome(holds=stall_s <= limit_s, reason=reason, numbers=numbers)


class _Rig:
    """A state on the device, an optimizer over it, and its capture."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        model = nn.ParameterList(
            torch.zeros(bench.state_bytes // _PARTS // 4, device=bench.device)
            for _ in range(_PARTS)
        )
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.copier = StreamCopier(bench.cuda)
        copiers = {bench.device_type: self.copier}
        tree = StateTree({"model": model, "optimizer": self.optimizer}, copiers=copiers)
        arena = Arena(bench.new_directory("slots"), SLOTS_WITH_OVERLAP)
        self.held_s: list[float] = []
        self.capture = Capture(arena, tree, on_sealed=self._sealed)
        self.state_bytes = sum(p.numel() * 4 for p in model)
        self._sources = [p.detach() for p in model]
        self._arena, self._tree = arena, tree
        self._step = 0

    def _sealed(self, captured: Any) -> None:
        if captured.overlapped:
            self.held_s.append(captured.blocked_s)

    def copy_alone_s(self) -> float:
        """The least of three copies into a pinned slot, nothing beside them."""
        self._arena.claim(self._tree.collect().layout)
        slot = self._arena.slots[0]
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        start = -(-(slot.layout.file_bytes - self.state_bytes) // 4 // _PARTS) * 4
        targets = [
            memory[start + i * part : start + (i + 1) * part].view(torch.float32)
            for i, part in enumerate([self.state_bytes // _PARTS] * _PARTS)
        ]
        took_s = []
        for _ in range(3):
            began = time.perf_counter()
            copying = self.copier.start(slot, ([], []), (targets, self._sources))
            assert copying.wait(60.0), "a copy took a minute"
            took_s.append(time.perf_counter() - began)
        return min(took_s)

    def turn(self, work: _Work, *, with_snapshot: bool) -> float:
        """Boundary, forward and backward, the fence, the optimizer's step; until all is done."""
        began = time.perf_counter()
        if with_snapshot:
            self._step += 1
            self.capture.stage(SnapshotId(Generation(1), Step(self._step)))
        work.queue()
        self.capture.fence()
        self.optimizer.step()
        self.bench.cuda.current_stream().synchronize()
        return time.perf_counter() - began


class _Work:
    """Work of some length on the current stream."""

    def __init__(self, bench: Bench, wanted_s: float) -> None:
        self._matrix = torch.ones(256 if bench.is_fake else 4096, 8, device=bench.device)
        self._square = self._matrix @ self._matrix.T
        self._bench = bench
        self._rounds = 1
        one_s = max(1e-6, min(self._timed_s() for _ in range(3)))
        self._rounds = max(1, min(10_000, round(wanted_s / one_s)))

    def _timed_s(self) -> float:
        began = time.perf_counter()
        self.queue()
        self._bench.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    def queue(self) -> None:
        for _ in range(self._rounds):
            torch.mm(self._square, self._square, out=torch.empty_like(self._square))


def pinned_given_back(bench: Bench) -> Outcome:
    """Slots are laid, pinned and dropped again and again; none of it stays registered."""
    runtime = bench.cuda.cudart()
    rounds, codes = 5, []
    for number in range(rounds):
        copier = StreamCopier(bench.cuda)
        tree = StateTree({"model": nn.Linear(256, 256)})
        arena = Arena(bench.new_directory(f"pinned-{number}"))
        arena.claim(tree.collect().layout)
        source = torch.ones(4, device=bench.device)
        kept = []
        for slot in arena.slots:
            assert copier.start(slot, ([], []), ([torch.zeros(4)], [source])).wait(10.0)
            kept.append(torch.frombuffer(slot.memory, dtype=torch.uint8))  # the mapping stays
        del slot
        arena.close()
        codes += [int(runtime.cudaHostUnregister(memory.data_ptr())) for memory in kept]
        # The question above leaves an error behind, which must not be taken for another's.
        _forget_last_error(bench)
    holds = all(code == NOT_REGISTERED for code in codes)
    reason = f"{len(codes)} slots pinned and dropped" if holds else f"still registered: {codes}"
    return Outcome(holds=holds, reason=reason, numbers={"slots": len(codes), "rounds": rounds})


def _forget_last_error(bench: Bench) -> None:
    """torch looks for one behind each launch, and clears what it raises; it has no other name."""
    with suppress(RuntimeError):
        torch.zeros(1, device=bench.device)


def host_ahead(bench: Bench) -> Outcome:
    """The host queues work of a second and goes on; progress says what the device has done."""
    from stepfast.core.messages import PhaseBegan
    from stepfast.core.timeouts import TURN
    from stepfast.train.device import CudaDevice
    from stepfast.train.progress import Progress

    told: list[Any] = []
    progress = Progress(told.append)
    progress.begin(CudaDevice(bench.cuda.current_device(), bench.cuda))
    began = time.perf_counter()
    bench.cuda._sleep(1_000_000_000)
    turn = PhaseBegan(generation=Generation(1), step=Step(1), phase=TURN, turn_s=None)
    progress.tell(turn)
    told_at_once, was_busy = len(told), progress.is_device_busy()
    marked_s = time.perf_counter() - began
    while not told and time.perf_counter() - began < 60.0:
        progress.look()
    passed_s = time.perf_counter() - began
    holds = told_at_once == 0 and was_busy and len(told) == 1
    reason = f"marked after {marked_s * 1e3:.2f} ms, told after {passed_s * 1e3:.0f} ms"
    numbers = {"mark_ms": round(marked_s * 1e3, 3), "told_ms": round(passed_s * 1e3, 1)}
    return Outcome(holds=holds, reason=reason, numbers=numbers)
