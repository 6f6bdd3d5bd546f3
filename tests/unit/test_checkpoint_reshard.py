"""What happens to state that does not simply fit: misfits, ranks' own state, flattened slices."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from property.layouts import (
    SNAPSHOT,
    Layout,
    Recipe,
    build,
    digests,
    manifest_of,
    on_rank,
    save,
    seed_rank,
    train,
)
from stepfast.checkpoint import layout as layouts
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.commit import commit
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.layout import DTYPE_BYTES, TensorSpec, private_rank
from stepfast.checkpoint.loading import CheckpointDamaged, StoredCheckpoint
from stepfast.checkpoint.tensors.reshard import Restored, restore
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.writer import write_slot
from stepfast.errors import ScriptError, StateError
from stepfast.train.data import TrackedLoader
from stepfast.train.whereabouts import Whereabout
from unit.stored_checkpoints import commit_unchecked

Objects = dict[str, Any]
PLAIN = Layout("plain")


def save_ranks(root: Path, ranks: list[Objects]) -> DirectoryStore:
    """A checkpoint of plain objects, one dict for each rank."""
    store, files = DirectoryStore(root / "store"), []
    for rank, objects in enumerate(ranks):
        seed_rank(rank)
        tree = StateTree(objects, rank=rank)
        taken = Capture(Arena(root / f"rank-{rank}"), tree).take(SNAPSHOT)
        files.append(write_slot(store, taken.slot_path, SNAPSHOT, rank=rank, world_size=len(ranks)))
    commit(store, manifest_of(files))
    return store


def load(
    store: DirectoryStore, objects: Objects, *, rank: int = 0, world_size: int = 1, **options: Any
) -> Restored:
    checkpoint = StoredCheckpoint.open(store, SNAPSHOT)
    return restore(StateTree(objects, rank=rank), checkpoint, world_size=world_size, **options)


class Odd:
    """An object with state of its own."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Batches(Odd):
    """A loader."""

    def __iter__(self) -> Any:
        return iter(())


class Epochs(Batches):
    """A loader that can say what is left of a position."""

    def state_in_other_world(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"epoch": state["epoch"]}


# --- what does not fit -------------------------------------------------------------------------


def test_all_misfits_are_in_one_error_and_nothing_is_touched(tmp_path: Path) -> None:
    store = save(tmp_path, Layout("fsdp", (2,)), Recipe())
    objects = build(PLAIN, Recipe(seed=2))
    model = objects["model"]
    model.extra = nn.Linear(2, 2)
    model.up = nn.Linear(6, 14)
    del model.gain
    objects["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1)
    objects["odd"] = Odd()
    before = digests(objects, 0)
    with pytest.raises(StateError) as raised:
        load(store, objects)
    message = str(raised.value)
    for words in (
        "step-000000050-gen-0003",
        "not in the checkpoint: odd, model.extra.weight F32 [2, 2], model.extra.bias F32 [2]",
        "only in the checkpoint: model.gain [1], optimizer.state.gain",
        "different: model.up.weight is F32 [14, 6] here and F32 [13, 6] there",
        "model.up.bias is F32 [14] here and F32 [13] there",
    ):
        assert words in message
    assert "\n" not in message and "exp_avg" not in message
    assert digests(objects, 0) == before


def test_what_fits_is_loaded_if_that_is_asked_for(tmp_path: Path) -> None:
    store = save(tmp_path, Layout("fsdp", (2,)), Recipe())
    native = build(PLAIN, Recipe())
    train(native, 0)
    objects = build(PLAIN, Recipe(seed=2))
    model = objects["model"]
    model.extra, model.up = nn.Linear(2, 2), nn.Linear(6, 14)
    parameters = list(model.parameters())
    objects["optimizer"] = torch.optim.AdamW(
        [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    )
    objects |= {"odd": Odd(x=1), "noise": torch.Generator().manual_seed(3)}
    del objects["scheduler"]
    kept = {n: p.clone() for n, p in model.named_parameters() if n.startswith(("extra", "up"))}
    told: list[str] = []
    load(store, objects, is_strict=False, on_warning=told.append)
    assert len(told) == 1 and "what does not fit stays as it is" in told[0]
    for words in ("odd", "noise", "only in the checkpoint: scheduler", "2 parameter groups here"):
        assert words in told[0]
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], value) for n, value in kept.items())
    assert torch.equal(after["cube"], native["model"].cube)
    state, wanted = objects["optimizer"].state, native["optimizer"].state
    assert torch.equal(state[model.cube]["exp_avg"], wanted[native["model"].cube]["exp_avg"])
    assert model.up.weight not in state
    assert objects["optimizer"].param_groups[0]["lr"] == 0.5
    assert objects["odd"].state == {"x": 1} and objects["noise"].initial_seed() == 3


def test_other_dtypes_are_misfits(tmp_path: Path) -> None:
    store = save(tmp_path, PLAIN, Recipe())
    objects = build(PLAIN, Recipe(dtype=torch.bfloat16))
    with pytest.raises(StateError, match=r"model\.gain is BF16 \[1\] here and F32 \[1\] there"):
        load(store, objects)


def test_a_buffer_that_was_not_saved_is_a_misfit(tmp_path: Path) -> None:
    store = save(tmp_path, PLAIN, Recipe())
    objects = build(PLAIN, Recipe())
    objects["model"].register_buffer("late", torch.ones(2))
    with pytest.raises(StateError, match=r"not in the checkpoint: model\.late F32 \[2\]"):
        load(store, objects)


def test_a_buffer_that_was_registered_later_is_made(tmp_path: Path) -> None:
    saved = build(PLAIN, Recipe())
    saved["model"].up.register_buffer("late", torch.arange(3))
    store = save_ranks(tmp_path, [saved, saved])
    objects = build(PLAIN, Recipe(seed=2))
    assert load(store, objects).is_resharded
    assert torch.equal(objects["model"].up.late, torch.arange(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_that_shows_while_parts_are_read_leaves_all_as_it_was(
    tmp_path: Path, rank: int
) -> None:
    store = save(tmp_path, Layout("fsdp", (2,)), Recipe())
    path = store.root / f"step-000000050-gen-0003/rank-{rank:05d}-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    start = layouts.header_bytes(bytes(data[:8]))
    data[start + 100] ^= 1
    path.write_bytes(data)
    objects = build(PLAIN, Recipe(seed=2))
    before = digests(objects, 0)
    for world_size in (1, 3):
        with pytest.raises(CheckpointDamaged, match=rf"rank-{rank:05d}.*checksum") as raised:
            load(store, objects, world_size=world_size)
        assert raised.value.snapshot == SNAPSHOT
    assert digests(objects, 0) == before


# --- what is one rank's alone ------------------------------------------------------------------


def test_more_and_fewer_ranks_give_up_positions_and_say_so(tmp_path: Path) -> None:
    saved = [
        {"weight": torch.ones(3), "a": Epochs(epoch=4, at=torch.tensor([rank])), "b": Batches(n=1)}
        for rank in range(2)
    ]
    store = save_ranks(tmp_path, saved)
    for world_size, rank in ((4, 3), (4, 0), (1, 0)):
        objects: Objects = {"weight": torch.zeros(3), "a": Epochs(), "b": Batches(fresh=True)}
        told: list[str] = []
        load(store, objects, rank=rank, world_size=world_size, on_warning=told.append)
        assert torch.equal(objects["weight"], torch.ones(3))
        assert objects["a"].state == {"epoch": 4} and objects["b"].state == {"fresh": True}
        assert len(told) == 2
        assert told[0].startswith("a: ") and "its present epoch begins anew" in told[0]
        assert told[1].startswith("b: ") and "it begins anew" in told[1]
        for text in told:
            assert f"{store.url}/step-000000050-gen-0003 (step 50)" in text
            assert "the positions of 2 ranks" in text and f"and {world_size} load it" in text


def test_as_many_ranks_each_take_their_own(tmp_path: Path) -> None:
    saved = [{"weight": torch.ones(6), "a": Epochs(at=torch.tensor([rank]))} for rank in range(2)]
    store = save_ranks(tmp_path, saved)
    for rank in range(2):
        objects: Objects = {"weight": torch.zeros(6), "a": Epochs()}
        told: list[str] = []
        done = load(store, objects, rank=rank, world_size=2, on_warning=told.append)
        assert not done.is_resharded and not told
        assert objects["a"].state["at"].tolist() == [rank]
        assert torch.equal(objects["weight"], torch.ones(6))


def test_as_many_ranks_keep_their_generators_in_another_layout(tmp_path: Path) -> None:
    store = save(tmp_path, Layout("fsdp", (2,)), Recipe())
    for rank in range(2):
        with on_rank(rank, 2):
            objects = build(Layout("ddp", (2,)), Recipe(seed=2))
            assert load(store, objects, rank=rank, world_size=2).is_resharded
            found = torch.rand(2).tolist(), random.random()
            seed_rank(rank)
            assert found == (torch.rand(2).tolist(), random.random())


def drawn(store: DirectoryStore, rank: int, world_size: int) -> tuple[object, ...]:
    noise = torch.Generator()
    load(store, {"weight": torch.zeros(2), "noise": noise}, rank=rank, world_size=world_size)
    numbers = torch.rand(2).tolist(), random.random(), torch.rand(1, generator=noise).item()
    return tuple(map(str, numbers))


def test_generators_of_new_ranks_follow_the_saved_ones(tmp_path: Path) -> None:
    saved: list[Objects] = [
        {"weight": torch.ones(2), "noise": torch.Generator().manual_seed(7)} for _ in range(2)
    ]
    store = save_ranks(tmp_path / "two", saved)
    of_two = [drawn(store, rank, 2) for rank in range(2)]
    of_five = [drawn(store, rank, 5) for rank in range(5)]
    assert of_five[:2] == of_two and drawn(store, 0, 1) == of_two[0]
    assert [drawn(store, rank, 5) for rank in range(5)] == of_five
    for kind in (0, 1):  # torch's and Python's, which differ between the saved ranks
        assert len({numbers[kind] for numbers in of_five}) == 5
    assert len({numbers[2] for numbers in of_five}) == 1  # the same on all saved ranks
    alone = save_ranks(tmp_path / "one", saved[:1])
    assert len({drawn(alone, rank, 3) for rank in range(3)}) == 1


def test_flags_and_extra_state_pass_through_wrappers(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return {"scale": torch.full((2,), 7.0), "n": 3}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    def model() -> Any:
        return nn.Sequential(Extra(2, 2), nn.Dropout())

    with on_rank(0, 2):
        saved = {"model": nn.parallel.DistributedDataParallel(model())}
        saved["model"].module[1].eval()
        store = save_ranks(tmp_path, [saved, saved])
    objects = {"model": model()}
    load(store, objects)
    extra, dropout = objects["model"]
    assert extra.seen["n"] == 3 and torch.equal(extra.seen["scale"], torch.full((2,), 7.0))
    assert not dropout.training and extra.training


def test_an_objects_own_tensors_are_laid_out_as_it_has_them(tmp_path: Path) -> None:
    """As those of an average of the weights, kept by hand."""
    recipe, sharded = Recipe(), Layout("fsdp", (2,))
    with on_rank(1, 2):
        model = build(sharded, recipe)["model"]
        held = {n: p.detach().clone() for n, p in model.named_parameters()}
        state = {"model": model, "average": Odd(**held, n=5, tail=torch.ones(2))}
        whole = build(PLAIN, recipe)["model"]
        full = {n: p.detach() + 1 for n, p in whole.named_parameters()}
        full_average = Odd(**full, n=6, tail=torch.zeros(2))
        store = save_ranks(tmp_path, [{"model": whole, "average": full_average}])
        load(store, state, rank=1, world_size=2)
        average = state["average"].state
        assert average["n"] == 6 and torch.equal(average["tail"], torch.zeros(2))
        rows = average["up.weight"].to_local()
        assert torch.equal(rows, full["up.weight"][7:])


# --- flattened slices, as FSDP1 has them -------------------------------------------------------


def save_flat(root: Path, world_size: int) -> DirectoryStore:
    """Each tensor of more than one dimension as slices of it flattened, cut anywhere; what a rank
    holds nothing of has no state in its optimizer.
    """
    store, files = DirectoryStore(root / "store"), []
    for rank in range(world_size):
        objects = build(PLAIN, Recipe())
        train(objects, 0)
        model, optimizer = objects["model"], objects["optimizer"]
        if rank == 0:
            optimizer.state.pop(model.cube)
        state = StateTree(objects, rank=rank).collect()
        specs, contents = [], {}
        for entry, tensor in zip(state.layout.entries, state.tensors, strict=True):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            count = math.prod(entry.shape)
            spec, size = entry.spec, DTYPE_BYTES[entry.dtype]
            if len(entry.shape) > 1 and private_rank(entry.name) is None:
                first, end = (count * (rank + i) // world_size for i in (0, 1))
                if "cube" in entry.name:
                    first = 0 if rank < 2 else first
                    end = 0 if rank == 0 else end
                spec = TensorSpec(
                    entry.name, entry.dtype, (end - first,), (count,), (first,),
                    original_shape=entry.shape,
                )  # fmt: skip
                raw = raw[first * size : end * size]
            specs.append(spec)
            contents[spec.name] = raw.numpy().tobytes()
        layout = layouts.Layout.build(specs, len(state.plain), rank=rank)
        arena = Arena(root / f"flat-{rank}")
        arena.claim(layout)
        slot = arena.free_slot()
        assert slot is not None
        for entry in layout.entries:
            slot.view(entry)[:] = contents[entry.name]
        slot.write_plain(state.plain)
        slot.seal(SNAPSHOT)
        files.append(write_slot(store, slot.path, SNAPSHOT, rank=rank, world_size=world_size))
    commit(store, manifest_of(files))
    return store


@pytest.mark.parametrize("wanted", [PLAIN, Layout("fsdp", (3,)), Layout("hsdp", (2, 2))])
def test_flattened_slices_become_whole_or_sharded(tmp_path: Path, wanted: Layout) -> None:
    store = save_flat(tmp_path, 3)
    for rank in range(wanted.world_size):
        with on_rank(rank, wanted.world_size):
            native, loaded = build(wanted, Recipe()), build(wanted, Recipe(seed=2))
            train(native, rank)
            load(store, loaded, rank=rank, world_size=wanted.world_size)
            assert digests(loaded, rank) == digests(native, rank)


def test_a_part_that_no_file_has_makes_the_checkpoint_a_damaged_one(tmp_path: Path) -> None:
    store, files = DirectoryStore(tmp_path / "store"), []
    for rank in range(2):
        objects: Objects = {"weight": torch.ones(4), "own": torch.ones(3)}
        state = StateTree(objects, rank=rank).collect()
        specs = [
            TensorSpec(e.name, e.dtype, (2,), (4,), (0,)) if e.name == "weight" else e.spec
            for e in state.layout.entries
        ]
        arena = Arena(tmp_path / f"part-{rank}")
        arena.claim(layouts.Layout.build(specs, len(state.plain), rank=rank))
        slot = arena.free_slot()
        assert slot is not None
        slot.write_plain(state.plain)
        slot.seal(SNAPSHOT)
        files.append(write_slot(store, slot.path, SNAPSHOT, rank=rank, world_size=2))
    words = r"not whole: weight: no rank has \[2:4\] of F32 \[4\]"
    with pytest.raises(StateError, match=words):
        commit(store, manifest_of(files))
    commit_unchecked(store, manifest_of(files))
    live = {"weight": torch.zeros(4), "own": torch.zeros(3)}
    with pytest.raises(CheckpointDamaged, match=words):
        load(store, live)
    assert not live["own"].any(), "nothing live was touched"


def test_a_rank_that_could_take_its_own_file_sees_that_others_do_not_fit(tmp_path: Path) -> None:
    """One rank looks for all of them; here it is rank 0."""
    store, files = DirectoryStore(tmp_path / "store"), []
    for rank, width in ((0, 6), (1, 9)):
        with on_rank(rank, 2):
            tree = StateTree(build(Layout("fsdp", (2,)), Recipe(width=width)), rank=rank)
            taken = Capture(Arena(tmp_path / f"rank-{rank}"), tree).take(SNAPSHOT)
            files.append(write_slot(store, taken.slot_path, SNAPSHOT, rank=rank, world_size=2))
    commit_unchecked(store, manifest_of(files))
    with on_rank(0, 2), pytest.raises(CheckpointDamaged, match=r"not whole: model\.down\.weight: "):
        load(store, build(Layout("fsdp", (2,)), Recipe()), rank=0, world_size=2)


@pytest.mark.parametrize("consumed", [0, 3])
def test_a_tracked_loader_begins_its_epoch_anew_in_another_world(
    tmp_path: Path, consumed: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> TrackedLoader:
        generator = torch.Generator().manual_seed(5)
        made = stateful.StatefulDataLoader(
            list(range(8)), batch_size=2, shuffle=True, generator=generator
        )
        return TrackedLoader("batches", made, Whereabout())

    saved = loader()
    first_epoch = [next(saved).tolist() for _ in range(4)]
    second_epoch = [next(saved).tolist() for _ in range(consumed)]
    store = save_ranks(tmp_path, [{"batches": saved}, {"batches": saved}])
    told: list[str] = []
    objects = {"batches": loader()}
    load(store, objects, on_warning=told.append)
    assert len(told) == 1 and "its present epoch begins anew" in told[0]
    found = [next(objects["batches"]).tolist() for _ in range(4)]
    if consumed:
        assert objects["batches"].epoch == 1 and found[:consumed] == second_epoch
    else:
        assert objects["batches"].epoch == 0 and found == first_epoch


def test_a_part_that_is_not_in_one_piece_is_refused() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    with on_rank(1, 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        rows = DTensor.from_local(
            torch.zeros(4, 2), mesh, [_StridedShard(0, split_factor=2)], run_check=False,
            shape=torch.Size((8, 2)), stride=(2, 1),
        )  # fmt: skip
        with pytest.raises(ScriptError, match=r"weight is a DTensor .* redistribute it"):
            StateTree({"weight": rows})
