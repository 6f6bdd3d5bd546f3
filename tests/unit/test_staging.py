"""Snapshots that are copied beside the next turn: what is sealed is the boundary's state, bit for
bit, whatever the turn does meanwhile; and what cannot be is void or copied at the boundary.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.device import FakeCuda
from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena, Slot, sealed_slots
from stepfast.checkpoint.capture import Capture, Captured
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.tensors.copier import (
    Copied,
    Copying,
    Pairs,
    StreamCopier,
    ThreadCopier,
    ThreadCopying,
    copy_all,
    copy_few,
    pieces,
)
from stepfast.checkpoint.tensors.local import over
from stepfast.checkpoint.tensors.tree import StateTree, refuse_several_devices
from stepfast.checkpoint.writer import write_slot
from stepfast.core.faults import ErrorClass
from stepfast.core.terms import Generation, SnapshotId, Step
from stepfast.errors import Interrupted, OperatingError, ScriptError
from stepfast.train.host import PlainHost
from stepfast.train.report import class_of
from stepfast.train.session import Run
from stepfast.train.snapshot_cost import SnapshotCost
from stepfast.train.snapshots import Snapshots

Objects = dict[str, Any]
NOTHING: Pairs = ([], [])


def snap(step: int) -> SnapshotId:
    return SnapshotId(Generation(1), Step(step))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """A step too small to change a parameter's bits is a change to its version alone."""
    torch.manual_seed(3)


class LateCopier:
    """Copies nothing before it is waited for: the turn has all the time to spoil it."""

    calls_at_end = False

    def __init__(self) -> None:
        self.started = 0
        self.error: Exception | None = None
        self.never_ends = False
        self.stands_after_abort = True

    def start(
        self, slot: Slot, now: Pairs, later: Pairs, at_end: Callable[[], object] = print
    ) -> Copying:
        copy_few(*now)
        if not later[0]:
            return Copied()
        self.started += 1
        return LateCopying(self, *later)


class LateCopying:
    own_s = 0.0

    def __init__(self, copier: LateCopier, *pairs: list[Tensor]) -> None:
        self._copier, self._pairs = copier, pairs
        self.stands_after_abort = copier.stands_after_abort
        self.cancelled = False

    def wait(self, limit_s: float) -> bool:
        if limit_s == 0.0 or self._copier.never_ends:
            return False
        if self._copier.error is not None:
            raise self._copier.error
        if not self.cancelled:
            copying = ThreadCopying(*self._pairs)
            copying.run()
            assert copying.wait(limit_s)
        return True

    def cancel(self) -> None:
        self.cancelled = True


class Rig:
    """Objects that are trained, their capture, and what each sealed slot should hold."""

    def __init__(self, directory: Path, objects: Objects, copier: Any = None) -> None:
        self.objects = objects
        self.copier = LateCopier() if copier is None else copier
        self.tree = StateTree(objects, copiers={"cpu": self.copier})
        self.notes: list[tuple[str, str]] = []
        self.sealed: list[Captured] = []
        self.wanted: dict[int, dict[str, Tensor]] = {}
        self.protected: Callable[[], frozenset[SnapshotId]] = frozenset
        self.capture = Capture(
            Arena(directory, SLOTS_WITH_OVERLAP),
            self.tree,
            protected=lambda: self.protected(),
            on_sealed=self._check_sealed,
            note=lambda topic, text: self.notes.append((topic, text)),
        )
        for optimizer in objects.values():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._fence)

    def _fence(self, *_: Any) -> None:
        self.capture.fence()

    def boundary(self, step: int) -> None:
        self.capture.fence()
        state = self.tree.collect()
        names = [entry.name for entry in state.layout.entries]
        copies = [tensor.detach().clone() for tensor in state.tensors]
        self.wanted[step] = dict(zip(names, copies, strict=True))
        self.capture.stage(snap(step))

    def _check_sealed(self, captured: Captured) -> None:
        self.sealed.append(captured)
        slot = open_sealed(captured.slot_path, captured.snapshot)
        wanted = self.wanted[captured.snapshot.step]
        assert set(wanted) == set(slot.layout.by_name)
        for name, entry in slot.layout.by_name.items():
            assert bits(over(slot.view(entry), entry)) == bits(wanted[name]), name

    @property
    def overlapped(self) -> list[int]:
        return [c.snapshot.step for c in self.sealed if c.overlapped]

    @property
    def steps(self) -> list[int]:
        return [c.snapshot.step for c in self.sealed]


def bits(tensor: Tensor) -> bytes:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(raw.tolist())


class Net(nn.Module):
    """Tied and frozen weights, buffers that change in forward and one that is rebound there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen = self.seen + 1
        logits: Tensor = self.head(self.frozen(self.body(self.embed(tokens)))) * self.scale
        return logits


def backward(objects: Objects, micro_batches: int = 1) -> None:
    model = objects["model"]
    for _ in range(micro_batches):
        tokens = torch.randint(0, 10, (8,))
        nn.functional.cross_entropy(model(tokens).float(), tokens).backward()


def train(rig: Rig, turns: int, begin: Callable[[Objects], object] = lambda _: None) -> None:
    first = len(rig.wanted)
    for step in range(first, first + turns):
        rig.boundary(step)
        begin(rig.objects)
        backward(rig.objects, 2)
        for name in ("optimizer", "second"):
            if name in rig.objects:
                rig.objects[name].step()
                rig.objects[name].zero_grad()
    rig.capture.fence()


class Masters(torch.optim.Optimizer):
    """bf16 parameters with fp32 masters in the state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss here
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                state["master"].sub_(parameter.grad.float(), alpha=0.1)
                parameter.copy_(state["master"])


def two_optimizers() -> Objects:
    model = Net()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW([*model.body.parameters(), model.scale]),
        "second": torch.optim.SGD([model.embed.weight, model.nothing], lr=0.1, momentum=0.9),
    }


def with_average() -> Objects:
    model = Net()
    return {
        "model": model,
        "average": torch.optim.swa_utils.AveragedModel(model),
        "optimizer": torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False),
    }


def trained_by(make: Callable[[Any], torch.optim.Optimizer], dtype: Any = None) -> Objects:
    model = Net().to(dtype)
    return {"model": model, "optimizer": make(model.parameters())}


def strided() -> Objects:
    model: Any = Net()
    model.body[0].weight = nn.Parameter(torch.randn(6, 6).t())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


KINDS: dict[str, Callable[[], Objects]] = {
    "fused": lambda: trained_by(lambda p: torch.optim.AdamW(p, fused=True)),
    "foreach": lambda: trained_by(lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True)),
    "single": lambda: trained_by(lambda p: torch.optim.AdamW(p, foreach=False)),
    "sgd": lambda: trained_by(lambda p: torch.optim.SGD(p, lr=0.1)),
    "masters": lambda: trained_by(Masters, torch.bfloat16),
    "two_optimizers": two_optimizers,
    "average": with_average,
    "strided": strided,
}


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_sealed_is_the_state_of_its_boundary(tmp_path: Path, kind: str, late: bool) -> None:
    rig = Rig(tmp_path, KINDS[kind](), None if late else ThreadCopier())
    train(rig, 7)
    assert rig.steps == list(range(7))
    assert rig.overlapped == [2, 4, 5, 6]  # the first, second, fourth ... are whole
    assert rig.notes == []
    assert all(captured.blocked_s > 0 for captured in rig.sealed)


def test_an_average_may_be_updated_at_any_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, with_average())
    train(rig, 6, lambda objects: objects["average"].update_parameters(objects["model"]))
    assert rig.steps == list(range(6)) and rig.notes == []


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp", "fsdp1", "fsdp1_flat"])
@pytest.mark.filterwarnings("ignore:FSDP is switching to use .NO_SHARD.")  # there is one rank
def test_sharded_and_replicated_models(tmp_path: Path, wrapper: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model: Any = Net()
    del model.nothing  # gets no gradient, which DDP does not take
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrapper != "fsdp2":
        model.scale = nn.Parameter(torch.tensor([0.5]))
        model.requires_grad_(True)
        flat = FullyShardedDataParallel
        model = flat(model, use_orig_params=wrapper == "fsdp1", device_id=torch.device("cpu"))
    else:
        model.scale = nn.Parameter(torch.tensor([0.5]))
        model.requires_grad_(True)
        fully_shard(model.body)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rig = Rig(tmp_path, {"model": model, "optimizer": optimizer})
    train(rig, 6)
    assert rig.steps == list(range(6)) and rig.overlapped == [2, 4, 5] and rig.notes == []
    assert rig.copier.started == 3  # there was something to be copied beside the training


# ------------------------------------------------- what changes between boundary and optimizer


def clamp(objects: Objects) -> None:
    with torch.no_grad():
        objects["model"].scale.clamp_(-1, 1)


def rebind(objects: Objects) -> None:
    objects["model"].scale.data = objects["model"].scale.data.clone()


def clamp_without_a_trace(objects: Objects) -> None:
    objects["model"].scale.data.add_(1)


def only_at(turns: set[int], change: Callable[[Objects], None]) -> Callable[[Objects], None]:
    count = itertools.count()
    return lambda objects: change(objects) if next(count) in turns else None


@pytest.mark.parametrize("change", [clamp, rebind])
def test_a_change_voids_the_slot_and_the_tensor_is_copied_at_the_boundary(
    tmp_path: Path, change: Callable[[Objects], None]
) -> None:
    rig = Rig(tmp_path, KINDS["fused"]())
    train(rig, 5)
    train(rig, 6, only_at({1, 3, 4, 5}, change))
    assert rig.steps == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert [topic for topic, _ in rig.notes] == ["snapshot void"]
    assert "step 6: model.scale changed" in rig.notes[0][1]
    # Behind the void one is a whole one, then they overlap again, but for that tensor.
    assert rig.overlapped[-4:] == [5, 8, 9, 10]


def test_a_change_that_leaves_no_trace_is_found_by_comparing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, KINDS["fused"]())
    train(rig, 6, clamp_without_a_trace)
    assert rig.steps == list(range(6)) and rig.overlapped == [2, 4, 5]
    assert [topic for topic, _ in rig.notes] == ["copied at the boundary"]
    assert "model.scale changes" in rig.notes[0][1]


class InBackward:
    """Steps as gradients come, by torch's own optimizers, and shows none of them."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step)

    @torch.no_grad()
    def _step(self, parameter: Any) -> None:
        parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("tracked_too", [True, False])
def test_an_optimizer_without_hooks_degrades_to_copies_at_the_boundary(
    tmp_path: Path, tracked_too: bool
) -> None:
    model = Net()
    objects: Objects = {"model": model, "mine": InBackward(model)}
    if tracked_too:  # it holds the parameters, and never steps
        objects["idle"] = torch.optim.SGD(model.parameters(), lr=0.1)
    rig = Rig(tmp_path, objects)
    train(rig, 6)
    assert rig.steps == list(range(6))
    assert len(rig.notes) == tracked_too


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots(
        protected=frozenset,
        on_sealed=lambda _: None,
        note=lambda topic, text: None,
        check=lambda: None,
        seal_obstacle=lambda: None,
        shield=contextlib.nullcontext,
    )
    yield made
    made.close()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_fence_stands_before_every_optimizer_on_any_thread(
    tmp_path: Path, snapshots: Snapshots, elsewhere: bool
) -> None:
    """One that is not tracked, and leaves no trace in versions, updates tracked parameters."""
    model = nn.Linear(3, 3)
    tracked = torch.optim.SGD(model.parameters(), lr=0.1)
    stranger = torch.optim.AdamW(model.parameters(), fused=True)
    tree = StateTree({"model": model, "optimizer": tracked}, copiers={"cpu": LateCopier()})
    snapshots.attach(tmp_path, tree)
    for step in range(6):
        snapshots.begin(snap(step))
        weight = model.weight.detach().clone()
        model(torch.ones(3)).sum().backward()
        if elsewhere:
            thread = threading.Thread(target=stranger.step)
            thread.start()
            thread.join()
        else:
            stranger.step()
        snapshots.fence()
        newest = sealed_slots(tmp_path)[-1]
        slot = open_sealed(newest.path, snap(step))
        entry = slot.layout.by_name["model.weight"]
        assert torch.equal(over(slot.view(entry), entry), weight)
        assert not torch.equal(model.weight, weight)


def test_a_section_seals_what_has_been_copied(tmp_path: Path, snapshots: Snapshots) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.attach(tmp_path, StateTree({"model": model, "optimizer": optimizer}))
    for step in range(3):
        snapshots.begin(snap(step))
    assert snapshots.is_copying
    snapshots.hold()
    snapshots.try_seal()
    assert not snapshots.is_copying and sealed_slots(tmp_path)[-1].snapshot == snap(2)


def test_a_tracked_optimizer_that_steps_in_backward_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(PlainHost(rank=0, world_size=1, local_rank=0, device_type="cpu"))
    run.track(model=model, sgd=optimizer)
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ScriptError, match=r"'sgd' steps inside of backward\(\); call"):
        model(torch.ones(1, 2)).sum().backward()


# ------------------------------------------------------------------------ failures and interrupts


def staged(tmp_path: Path) -> Rig:
    """A rig with an overlapped snapshot of step 3 under way."""
    rig = Rig(tmp_path, KINDS["fused"]())
    train(rig, 2)
    rig.boundary(2)
    backward(rig.objects)
    assert rig.capture.is_copying and not rig.capture.has_copied
    return rig


def held_by_slots(rig: Rig) -> list[int]:
    return [slot.snapshot.step for slot in sealed_slots(rig.sealed[0].slot_path.parent)]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), MemoryError()])
def test_what_stopped_the_copy_rises_at_the_fence(tmp_path: Path, error: Exception) -> None:
    rig = staged(tmp_path)
    rig.copier.error = error
    with pytest.raises(type(error)) as caught:
        rig.objects["optimizer"].step()
    assert caught.value is error
    assert held_by_slots(rig) == [0, 1] and not rig.capture.is_copying
    rig.copier.error = None
    train(rig, 3)
    assert held_by_slots(rig) == [3, 4, 5]


def test_an_interrupt_seals_what_is_sound(tmp_path: Path) -> None:
    rig = staged(tmp_path)
    rig.capture.settle(aborted=True)
    assert held_by_slots(rig) == [0, 1, 2] and rig.overlapped == [2]
    assert not rig.capture.is_copying and rig.capture.settle(aborted=True) is None


@pytest.mark.parametrize("spoiled", ["changed", "aborted collectives"])
def test_an_interrupt_drops_what_is_not(tmp_path: Path, spoiled: str) -> None:
    rig = Rig(tmp_path, KINDS["fused"]())
    rig.copier.stands_after_abort = spoiled != "aborted collectives"
    train(rig, 2)
    rig.boundary(2)
    if spoiled == "changed":
        clamp(rig.objects)
    rig.capture.settle(aborted=True)
    assert held_by_slots(rig) == [0, 1] and not rig.capture.is_copying


def test_a_copy_that_never_ends_costs_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = staged(tmp_path)
    rig.copier.never_ends = True
    with pytest.raises(OperatingError, match="did not end within 1 s"):
        rig.capture.settle(aborted=True)
    monkeypatch.setattr("stepfast.checkpoint.capture.COPY_LIMIT_S", 2.0)
    with pytest.raises(OperatingError, match="did not end within 2 s"):
        rig.capture.fence()
    assert held_by_slots(rig) == [0, 1]


def test_a_copy_is_cancelled_between_two_pieces(slot: Slot) -> None:
    began, go_on = threading.Event(), threading.Event()

    class Watched(Tensor):
        """Not plain, so that it is copied by `copy_`, which tells and waits."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is Tensor.copy_:
                began.set()
                assert go_on.wait(10)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    large = [torch.ones(1 << 18).as_subclass(Watched), torch.ones(1 << 18)]
    targets = [torch.zeros(1 << 18), torch.zeros(1 << 18)]
    copying = ThreadCopier().start(slot, NOTHING, (targets, large))
    assert began.wait(10) and not copying.wait(0.0)
    copying.cancel()
    go_on.set()
    assert copying.wait(10)
    assert targets[0].sum() == 1 << 18 and targets[1].sum() == 0


# ------------------------------------------------------------------------------------- the copier


def test_pieces_are_small_and_copy_everything() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (0, 3), (7,), (3, 5), (300_000,), (2_500_000,), (700, 700)]
    sources = [torch.randn(shape, generator=generator) for shape in shapes]
    sources += [torch.randn(700, 800).t(), torch.randn(9, 7).t(), torch.randn(400_000).bfloat16()]
    sources.append(torch.randn(200_000, dtype=torch.complex64).conj())
    targets = [torch.empty(s.shape, dtype=s.dtype) for s in sources]
    calls = list(pieces(targets, sources))
    assert len(calls) == 2 + 1 + 1 + 2 + 1 + 1 + 1 - 1
    for call in calls:
        call()
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))


def test_copying_in_the_calling_thread_takes_any_tensor_and_is_seen_by_autograd() -> None:
    large = torch.randn(700, 800)
    sources = [large, large.clone(), large.t(), large, torch.randn(3), large.double()]
    kept = torch.nn.Parameter(torch.zeros(700, 800))
    with torch.inference_mode():
        unversioned = torch.zeros(700, 800)
    targets = [kept, torch.zeros(800, 700).t(), torch.zeros(800, 700), unversioned]
    targets += [torch.zeros(3), torch.zeros(700, 800)]
    loss = (kept * kept).sum()
    with torch.no_grad():
        copy_all(targets, sources)
    assert all(torch.equal(t, s.to(t.dtype)) for t, s in zip(targets, sources, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    arena = Arena(tmp_path / "other")
    arena.claim(Rig(tmp_path, {"model": nn.Linear(2, 2)}).tree.collect().layout)
    free = arena.free_slot()
    assert free is not None
    arena.close()
    return free


def test_the_stream_copier_copies_behind_what_is_queued(slot: Slot):
    cuda = FakeCuda()
    copier = StreamCopier(cuda)
    target, source = torch.zeros(3), torch.ones(3)
    with cuda.held():
        cuda.launch()  # the step that made `source`
        copying = copier.start(slot, NOTHING, ([target], [source]))
        cuda.launch()  # the next one is nothing to it
    queued = ["on the side stream", "event recorded on side stream", "back"]
    assert cuda.calls[-4:] == ["side stream waits for the current one", *queued]
    assert torch.equal(target, source) and copying.wait(0.0) and not copying.stands_after_abort
    cuda.launch(looks=3)
    late = copier.start(slot, NOTHING, ([target], [source]))
    assert not late.wait(0.0) and late.wait(1.0)
    assert cuda.device_syncs == 0 and "synchronized" not in " ".join(cuda.calls)


class CopiesSeen(TorchDispatchMode):
    """Says how copies are queued, among the calls of the double."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        targets, _, *non_blocking = args
        waits = "" if non_blocking == [True] else ", waited for"
        self._cuda.calls.append(f"{len(targets)} copied{waits}")
        return func(*args, **(kwargs or {}))


def test_what_may_change_at_once_is_queued_before_it_can_and_the_host_goes_on(slot: Slot):
    """A buffer, or what another copies at the boundary: it is no reason to wait for the device."""
    cuda = FakeCuda()
    now, later = ([torch.zeros(2)], [torch.ones(2)]), ([torch.zeros(3)] * 2, [torch.ones(3)] * 2)
    copier = StreamCopier(cuda)
    with cuda.held(), CopiesSeen(cuda):
        cuda.launch()
        copying = copier.start(slot, now, later)
        assert not copying.wait(0.0)
    assert copying.wait(0.0)
    queued = ["1 copied", "side stream waits for the current one", "on the side stream"]
    assert cuda.calls[-6:] == [*queued, "2 copied", "event recorded on side stream", "back"]


def test_a_copy_behind_work_that_never_ends_has_not_ended(slot: Slot):
    cuda = FakeCuda()
    with cuda.held():
        cuda.launch()
        copying = StreamCopier(cuda).start(slot, NOTHING, ([torch.zeros(3)], [torch.ones(3)]))
        copying.cancel()
        assert not copying.wait(0.001)
    assert copying.wait(0.0)


def test_what_breaks_the_device_rises_where_its_copy_is_waited_for(slot: Slot):
    cuda = FakeCuda()
    copying = StreamCopier(cuda).start(slot, NOTHING, ([torch.zeros(3)], [torch.ones(3)]))
    cuda.lose_context(214)
    with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC"):
        copying.wait(0.0)


def test_slots_are_pinned_once_each_and_given_back_when_they_go(tmp_path: Path):
    cuda = FakeCuda()
    tree = Rig(tmp_path, {"model": nn.Linear(2, 2)}).tree
    arena = Arena(tmp_path / "other")
    arena.claim(tree.collect().layout)
    copier = StreamCopier(cuda)
    for slot in [*arena.slots, *arena.slots]:
        copier.start(slot, NOTHING, ([torch.zeros(1)], [torch.ones(1)]))
    size_bytes = tree.collect().layout.file_bytes
    assert list(cuda.pinned.values()) == [size_bytes] * len(arena.slots)
    assert cuda.calls.count(f"{size_bytes} bytes pinned") == len(arena.slots)
    arena.close()
    del slot
    assert cuda.pinned == {} and cuda.calls[-1] == "unpinned"


def test_a_device_that_is_broken_when_a_slot_is_to_be_pinned_is_no_matter_of_memory(slot: Slot):
    cuda = FakeCuda()
    cuda.lose_context(710)
    with pytest.raises(RuntimeError, match=r"CUDA error: 710, met when .*slot-0") as caught:
        StreamCopier(cuda).start(slot, NOTHING, NOTHING)
    assert class_of(caught.value) is ErrorClass.DEVICE


def test_memory_that_cannot_be_pinned_is_one_clear_line(slot: Slot):
    cuda = FakeCuda(pinned_bytes_max=0)
    with pytest.raises(OperatingError, match=r"slot-0.*refused to pin .* \(ulimit -l") as caught:
        StreamCopier(cuda).start(slot, NOTHING, NOTHING)
    assert "\n" not in str(caught.value) and cuda.pinned == {}


def test_a_state_on_two_gpus_is_refused_for_its_copy_would_hold_the_loop():
    gpus = [torch.device("cuda", 0), torch.device("cuda", 0), torch.device("cuda", 1)]
    refuse_several_devices(zip(["model.a", "model.b"], gpus[:2], strict=True))
    with pytest.raises(ScriptError, match=r"model\.a is on cuda:0 and model\.c on cuda:1: a rank"):
        refuse_several_devices(zip(["model.a", "model.b", "model.c"], gpus, strict=True))


# ---------------------------------------------------------------------------------- slots and cost


def test_a_due_snapshot_waits_for_a_slot(tmp_path: Path) -> None:
    rig = Rig(tmp_path, KINDS["fused"]())
    train(rig, 3)
    asked = itertools.count()
    everything = frozenset(map(snap, range(3)))
    rig.protected = lambda: everything if next(asked) < 3 else frozenset()
    train(rig, 1)
    assert rig.sealed[-1].snapshot == snap(3)
    assert 0 < rig.sealed[-1].waited_s <= rig.sealed[-1].blocked_s
    assert rig.sealed[-2].waited_s < rig.sealed[-1].waited_s


def test_a_wait_for_a_slot_ends_with_the_generation(tmp_path: Path) -> None:
    rig = Rig(tmp_path, KINDS["sgd"]())

    def leave() -> None:
        raise Interrupted

    train(rig, 3)
    everything = frozenset(map(snap, range(3)))
    capture = Capture(
        Arena(tmp_path, SLOTS_WITH_OVERLAP), rig.tree, protected=lambda: everything, check=leave
    )
    with pytest.raises(Interrupted):
        capture.stage(snap(3))
    assert held_by_slots(rig) == [0, 1, 2]


def test_ranks_a_step_apart_hold_a_common_step_at_any_instant(tmp_path: Path) -> None:
    """Random schedules; on one rank, or on both at once, snapshots become void again and again.

    Looked at behind every single action.
    """
    for seed in range(12):
        chance = random.Random(seed)
        rigs = []
        for rank in range(2):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rigs.append(Rig(tmp_path / f"{seed}-{rank}", {"model": model, "optimizer": optimizer}))
            rigs[rank].boundary(0)
            rigs[rank].capture.fence()
        turns = [0, 0]  # turn t of a rank begins behind its boundary t
        for _ in range(40):
            rank = chance.randrange(2)
            rig, model = rigs[rank], rigs[rank].objects["model"]
            odd_turn_of_both = seed % 2 == 0 and turns[rank] % 3 == 1
            if odd_turn_of_both or (seed % 2 == 1 and rank == 0 and chance.random() < 0.5):
                with torch.no_grad():
                    model.weight.add_(1)
            if chance.random() < 0.2:
                rig.capture.fence()
            elif turns[rank] <= turns[1 - rank]:
                rig.capture._at_boundary.clear()  # so that it may happen again and again
                rig.boundary(turns[rank] + 1)
                turns[rank] += 1
            held = [set(held_by_slots(rig)) for rig in rigs]
            assert held[0] & held[1], (seed, turns, held)


def test_the_account_says_what_snapshots_cost() -> None:
    cost = SnapshotCost()
    cost.boundary(0.100, whole=True)
    cost.fence(0.028, whole=True)
    cost.drop_turn()
    for turn in range(20):
        cost.boundary(0.001, whole=False)
        cost.copied(0.030)
        cost.fence(0.002, whole=False)
        assert (cost.words(1) is None) == (turn < 10)
        cost.turn(1.003 if turn > 3 else 2.0, copying=True)
    words = cost.words(1)
    assert words is not None
    assert "3.6% of a step of 970.0 ms" in words and "4 steps would keep it under 1%" in words
    assert "its own processor time" in words
    for _ in range(8):
        cost.turn(0.996, copying=False)
    words = cost.words(1)
    assert words is not None
    assert "0.9% of a step of 996.0 ms" in words and "interval" not in words
    assert "20 turns with, 8 without" in words


def test_a_held_write_has_the_bytes_of_its_boundary(tmp_path: Path) -> None:
    """The writer of a pinned slot is held for several steps between two of its pieces."""
    rig = Rig(tmp_path / "memory", two_optimizers())
    train(rig, 4)
    pinned = rig.sealed[-1]
    rig.protected = lambda: frozenset({pinned.snapshot})
    before = pinned.slot_path.read_bytes()
    store = DirectoryStore(tmp_path / "store")
    held: list[int] = []

    def hold(done: int, total: int) -> None:
        if not held:
            train(rig, 5)
            held.append(len(rig.sealed))

    shard = write_slot(
        store, pinned.slot_path, pinned.snapshot, rank=0, world_size=1, progress=hold
    )
    assert held == [9], "training went on meanwhile"
    (name,) = store.names()
    assert name.endswith(shard.name) and store.read(name) == before
    stored = open_sealed(store.root / name, pinned.snapshot)
    for name, wanted in rig.wanted[pinned.snapshot.step].items():
        entry = stored.layout.by_name[name]
        assert bits(over(stored.view(entry), entry)) == bits(wanted), name


def test_slots_that_are_removed_under_a_running_loop_are_named_once_and_laid_anew(tmp_path: Path):
    rig = Rig(tmp_path / "rank", KINDS["fused"]())
    rig.boundary(1)
    rig.capture.fence()
    shutil.rmtree(tmp_path / "rank")
    assert not rig.capture.holds(Step(1)), "nobody else will find it"
    for step in (2, 3):
        rig.boundary(step)
        rig.capture.fence()
    (note,) = rig.notes
    assert note[0] == "snapshots removed" and "RemoveIPC" in note[1]
    assert [s.snapshot.step for s in sealed_slots(tmp_path / "rank")] == [2, 3]
