"""The rank's device, over a double of `torch.cuda`: progress is what the device has done, an error
of it is told at once, what is left of a generation ends or costs the process.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from fakes.device import FakeCuda
from stepfast.core.faults import ErrorClass
from stepfast.core.messages import FirstStepDone, FromRank, PhaseBegan, PhaseEnded, RankRaised
from stepfast.core.terms import Generation, Rank, Step
from stepfast.core.timeouts import FIRST_TURN, TURN
from stepfast.errors import ConfigError
from stepfast.train.device import CudaDevice, NoAccelerator, device_of
from stepfast.train.progress import TURNS_WAITING_MAX, Progress
from stepfast.train.rank_device import RankDevice
from stepfast.train.rng import RngState
from unit.core.rigs import settings

G1 = Generation(1)


class Rig:
    """Progress of one rank on a device; `now` is set by the test."""

    def __init__(self, device: Any = None) -> None:
        self.cuda = FakeCuda()
        self.now = 0.0
        self.told: list[FromRank] = []
        self.broken: list[RuntimeError] = []
        self.progress = Progress(
            self.told.append, on_broken=self.broken.append, now=lambda: self.now
        )
        self.progress.begin(device or CudaDevice(3, self.cuda))

    def turn(self, step: int, turn_s: float | None = 1.0, phase: str = TURN) -> None:
        self.progress.tell(PhaseBegan(generation=G1, step=Step(step), phase=phase, turn_s=turn_s))

    def look(self, at: float) -> list[FromRank]:
        """What the monitor's thread has told at that time."""
        self.now, before = at, len(self.told)
        self.progress.look()
        return self.told[before:]


def test_on_a_cpu_a_sign_is_told_at_once_and_nobody_need_look():
    rig = Rig(NoAccelerator())
    rig.turn(4)
    assert rig.told == [PhaseBegan(generation=G1, step=Step(4), phase=TURN, turn_s=1.0)]
    assert rig.progress.poll_interval_s is None and not rig.progress.is_device_busy()


def test_a_turn_has_begun_when_the_device_has_ended_the_one_before():
    """The host is two turns ahead of a device that hangs: nothing of that is progress."""
    rig = Rig()
    rig.turn(0, None, FIRST_TURN)
    assert [m.phase for m in rig.look(0.0)] == [FIRST_TURN]
    with rig.cuda.held():
        rig.cuda.launch()
        rig.turn(1, None)
        rig.cuda.launch()
        rig.turn(2)
        assert rig.look(50.0) == [] and rig.progress.is_device_busy()
    told = rig.look(51.0)
    assert [(m.step, m.turn_s) for m in told] == [(1, None), (2, 0.0)]
    assert not rig.progress.is_device_busy() and rig.cuda.device_syncs == 0


def test_durations_are_the_devices():
    rig = Rig()
    rig.turn(1, None)
    rig.look(10.0)
    section = {"generation": G1, "step": Step(1), "phase": "section:eval"}
    with rig.cuda.held():
        rig.progress.tell(PhaseBegan(**section))
    (began,) = rig.look(12.0)
    with rig.cuda.held():
        rig.progress.tell(PhaseEnded(**section, seconds=0.001))
    (ended,) = rig.look(17.0)
    assert (began.phase, ended.seconds) == ("section:eval", 5.0)
    with rig.cuda.held():
        rig.turn(2, 0.001)
        first = FirstStepDone(generation=G1, rank=Rank(0), step=Step(2), seconds=0.5)
        rig.progress.tell(first)
    turn, step = rig.look(20.0)
    assert turn.turn_s == 20.0 - 10.0 - 5.0
    assert step.seconds == 0.5 + 3.0


def test_a_device_far_behind_gets_no_more_marks():
    rig = Rig()
    with rig.cuda.held():
        for step in range(10):
            rig.turn(step)
        assert rig.cuda.calls.count("event recorded on the current one") == TURNS_WAITING_MAX
    rig.turn(10)
    rig.look(2.0)
    told = [(m.step, m.turn_s) for m in rig.told]
    assert told == [(0, None), (1, 0.0), (2, 0.0), (3, 0.0), (10, None)]
    rig.turn(11)
    (told,) = rig.look(3.0)
    assert told.turn_s == 1.0


def test_a_generation_that_is_left_tells_nothing_more():
    rig = Rig()
    with rig.cuda.held():
        rig.turn(1)
        rig.progress.forget()
    assert rig.look(1.0) == [] and rig.told == []


@pytest.mark.parametrize("code", [700, 710, 214])
@pytest.mark.parametrize("met_by", ["look", "tell", "is_device_busy"])
def test_a_broken_device_is_told_once_by_whoever_meets_it(code: int, met_by: str):
    rig = Rig()
    with rig.cuda.held():
        rig.turn(1)
    rig.cuda.lose_context(code)
    for _ in range(2):
        if met_by == "look":
            rig.look(1.0)
        elif met_by == "tell":
            rig.turn(2)
        else:
            assert not rig.progress.is_device_busy()
    assert len(rig.broken) == 1 and isinstance(rig.broken[0], torch.AcceleratorError)


# ------------------------------------------------------------------------------------- the device


def test_each_thread_has_the_ranks_device_and_no_other_gets_a_context():
    """FC-35: a thread that never said so would have the first one, and make a context there."""
    rig = Rig()
    with rig.cuda.held():
        rig.turn(1)
    thread = threading.Thread(target=rig.progress.look)
    thread.start()
    thread.join()
    assert rig.told and rig.cuda.contexts == {3}


@pytest.mark.parametrize("asks", ["look", "is_device_busy"])
def test_who_only_looks_spoils_no_graph_that_the_training_captures(asks: str):
    cuda = FakeCuda()
    rig = Rig(CudaDevice(3, cuda, stand_aside=cuda.relax))
    with cuda.held():
        rig.turn(1)
    with cuda.captured():
        thread = threading.Thread(target=getattr(rig.progress, asks))
        thread.start()
        thread.join()
    assert rig.broken == []


def test_a_thread_stands_aside_once_and_the_training_thread_never_does():
    cuda, asides = FakeCuda(), list[str]()
    device = CudaDevice(3, cuda, stand_aside=lambda: asides.append(threading.current_thread().name))
    device.enter()
    thread = threading.Thread(target=lambda: [device.enter(), device.enter()], name="looks")
    thread.start()
    thread.join()
    assert asides == ["looks"]


def test_a_rank_without_a_gpu_of_its_own_is_refused():
    assert isinstance(device_of("cpu", 9), NoAccelerator)
    with pytest.raises(ConfigError, match="torch sees no CUDA device here"):
        device_of("cuda", 0, FakeCuda(is_available_=False))
    with pytest.raises(ConfigError, match=r"rank 2 .* no GPU of its own.*--nproc-per-node 2"):
        device_of("cuda", 2, FakeCuda(device_count_=2))
    cuda = FakeCuda()
    assert isinstance(device_of("cuda", 7, cuda), CudaDevice) and cuda.contexts == set()


def test_what_is_queued_ends_or_costs_the_process():
    cuda = FakeCuda()
    device = CudaDevice(0, cuda)
    assert device.settle(0.0) is None
    device.mark()
    cuda.launch(looks=3)
    assert device.settle(5.0) is None
    with cuda.held():
        cuda.launch()
        text = device.settle(0.01)
    assert text == "the device did not end what was queued on it within 0.01 s"
    cuda.lose_context(710)
    assert device.settle(5.0) == "the device is broken: CUDA error: device-side assert triggered"


def test_what_another_generation_cannot_go_on_with_is_named(monkeypatch: pytest.MonkeyPatch):
    class Graph:
        pass

    cuda = FakeCuda()
    device = CudaDevice(0, cuda)
    assert device.obstacle() is None
    cuda.CUDAGraph = Graph  # type: ignore[attr-defined]  # as torch.cuda has it
    graph: Any = Graph()
    assert str(device.obstacle()).startswith("1 CUDA graph with communicators")
    del graph
    symmetric: Any = ModuleType("symmetric")
    symmetric._group_name_to_store = {}
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", symmetric)
    assert device.obstacle() is None
    symmetric._group_name_to_store["0"] = object()
    assert str(device.obstacle()).startswith("symmetric memory is bound")
    symmetric._group_name_to_store.clear()
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert str(device.obstacle()).startswith("NVSHMEM (deep_ep)")


# --------------------------------------------------------------------------- through generations


class Stay:
    """One rank's device, and what its rank says."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.told: list[FromRank] = []
        self.device = RankDevice(
            self.told.append, lambda: Step(7), lambda kind, rank: CudaDevice(rank, cuda)
        )
        self.order: Any = _Order()
        self.device.enter(self.order)


class _Order:
    generation = G1
    local_rank = 1
    settings = settings(device="cuda")


def test_a_broken_device_is_the_ranks_fault_though_its_main_thread_says_nothing():
    cuda = FakeCuda()
    stay = Stay(cuda)
    stay.device.progress.tell(PhaseBegan(generation=G1, step=Step(7), phase=TURN))
    cuda.lose_context(700)
    stay.device.progress.look()
    (raised,) = stay.told
    assert isinstance(raised, RankRaised)
    assert (raised.generation, raised.step) == (1, 7)
    assert raised.error.error_class is ErrorClass.DEVICE
    assert raised.error.type == "torch.AcceleratorError"
    assert str(stay.device.leave()).startswith("the device is broken: CUDA error: an illegal")


@pytest.mark.parametrize(
    ("is_built_again", "error_class", "left_bytes"),
    [(True, ErrorClass.USER, 0), (False, ErrorClass.USER, 512), (False, ErrorClass.MEMORY, 0)],
)
def test_the_allocators_cache_is_emptied_where_that_helps(
    is_built_again: bool, error_class: ErrorClass, left_bytes: int
):
    cuda = FakeCuda(total_bytes=1024)
    stay = Stay(cuda)
    cuda.take_bytes(512)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        cuda.take_bytes(1024)
    assert caught.value is not None
    cuda.give_bytes(512)
    report: Any = type("Report", (), {"error_class": error_class})
    stay.device.raised(report)
    assert stay.device.leave() is None
    assert stay.device.free_memory(is_built_again=is_built_again) is None
    assert cuda.cached_bytes == left_bytes
    stay.device.enter(stay.order)
    assert not stay.device.ran_out_of_memory


def test_the_devices_generator_begins_every_generation_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
):
    cuda = FakeCuda()
    for name in ("is_initialized", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    before = RngState.take()
    assert before.cuda is None and before.with_device() is before
    cuda.init()
    first = before.with_device()
    drawn = [cuda.draw(), cuda.draw()]
    first.apply()
    assert [cuda.draw(), cuda.draw()] == drawn
    assert first.with_device() is first, "never what a generation made of it"
