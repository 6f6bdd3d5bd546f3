"""What `run --check` finds in a job's directory, memory and store: nothing of it is changed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stepfast.agent.memory import layout_words, settle_layout
from stepfast.checkpoint import owner
from stepfast.checkpoint.arena import Arena
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.owner import StoreOwner
from stepfast.cli.check import Outlook, look_ahead, misfits, obstacles, table
from stepfast.cli.tables import span
from stepfast.config import JobConfig
from stepfast.coordinator.journal import History, Journal, is_held, read_job_id
from stepfast.core.durable import CheckpointSettings
from stepfast.core.job_state import JobState
from stepfast.core.messages import RankChecked, TrackedObject
from stepfast.core.quantities import size_text
from stepfast.core.recovery import Lineage
from stepfast.core.terms import Generation, JobId, Rank, Step
from stepfast.runtime.clock import SystemClock
from unit.core.rigs import JobRig
from unit.stored_checkpoints import Slots, snap
from unit.test_checkpoint_slots import layout_of, take

HISTORY = History(
    generation=Generation(1),
    lineage=Lineage(((Generation(1), Step(0)),)),
    steps_max=Step(9),
)


class Place:
    """A job directory with a memory and a store beside it."""

    def __init__(self, base: Path) -> None:
        self.job_dir, self.memory, self.store = base / "job", base / "memory", base / "store"
        self.memory.mkdir()
        self.config = JobConfig(
            nproc_per_node=2, memory_dir=str(self.memory), checkpoints=str(self.store)
        )
        Journal(self.job_dir, SystemClock()).close()

    def seal(self, rank: int, *steps: int, name: str = "model.weight") -> str:
        """Slots of these steps; the digest of their layout."""
        self.slot_root.parent.mkdir(exist_ok=True)
        settle_layout(self.slot_root, layout_words(2, 2))
        arena = Arena(self.slot_root / f"rank-{rank}", 3)
        for step in steps:
            take(arena, layout_of(name), step)
        arena.close()
        return layout_of(name).digest

    @property
    def slot_root(self) -> Path:
        return self.memory / f"stepfast-{os.getuid()}-{read_job_id(self.job_dir)}" / "node-0"

    def save(self, base: Path, *steps: int) -> DirectoryStore:
        """Checkpoints of another job, which is called `job`."""
        store = DirectoryStore(self.store)
        Slots(base / "slots").save(store, *(snap(step) for step in steps))
        return store

    def look(self, history: History = HISTORY) -> Outlook:
        settings = CheckpointSettings(url=str(self.store), interval_s=600.0)
        return look_ahead(self.config, settings, history, self.job_dir)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def report(number: int, layout: str = "digest", slot_bytes: int = 5000) -> RankChecked:
    return RankChecked(
        generation=Generation(1),
        rank=Rank(number),
        seconds=0.5,
        objects=(TrackedObject(name="model", type="Linear", tensors=2, size_bytes=80 + number),),
        loaders=("batches (StatefulDataLoader)",),
        slot_bytes=slot_bytes,
        layout=layout,
        once=("build",),
        keep_obstacle=None if number else "model is DDP",
        device="cpu",
        backend="gloo",
        torch_version="2.13.0",
        torch_obstacle=None,
    )


def state_of(*reports: RankChecked) -> JobState:
    rig = JobRig(nodes=1, nproc=2, check=True)
    return replace(rig.state, checked={r.rank: r for r in reports})


def test_nothing_there_begins_at_step_0(place: Place):
    outlook = place.look(History())
    assert outlook.resume == "nowhere: it begins at step 0"
    assert outlook.obstacles == ()
    assert not place.store.exists(), "only looked at"


def test_slots_that_all_ranks_hold_are_where_it_goes_on(place: Place):
    place.seal(0, 4, 5)
    place.seal(1, 3, 4)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in place.memory.rglob("slot-*")}
    assert len(before) == 6
    assert place.look().resume.startswith("step 4, from the slots in ")
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in place.memory.rglob("slot-*")}
    assert after == before


def test_a_newer_checkpoint_wins(place: Place, tmp_path: Path):
    place.seal(0, 4)
    place.seal(1, 4)
    place.save(tmp_path, 3, 7)
    outlook = place.look()
    assert outlook.resume == "step 7, from the checkpoint step-000000007-gen-0001 of job job"
    assert outlook.checkpoints_there == 2
    place.config = replace(place.config, job_id="job")
    place.job_dir = place.job_dir / "lost"
    assert place.look(History()).resume == "step 7, from the checkpoint step-000000007-gen-0001"


def tree(base: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in base.rglob("*") if p.is_file()}


def test_memory_of_another_layout_would_be_set_aside(place: Place, tmp_path: Path):
    """A step that no rank of this layout can read counts for nothing, and is in the way alone."""
    for rank in range(2):
        place.seal(rank, 9)
    place.config = replace(place.config, nproc_per_node=1)
    before = tree(tmp_path)
    outlook = place.look()
    (obstacle,) = outlook.obstacles
    assert "the store has no checkpoint to reshard from" in obstacle
    assert outlook.resume == "nowhere"
    assert any("step 9 of another layout (2 ranks, 2 per node)" in note for note in outlook.notes)
    assert tree(tmp_path) == before
    place.save(tmp_path, 7)
    outlook = place.look()
    assert outlook.obstacles == () and outlook.resume.startswith("step 7, from the checkpoint")
    # Set aside by a run that never got to its first step: there for its own layout again.
    settle_layout(place.slot_root, layout_words(1, 1))
    assert place.look().resume.startswith("step 7, ")
    place.config = replace(place.config, nproc_per_node=2)
    assert place.look().resume.startswith("step 9, from the slots in ")


def test_a_store_of_which_nothing_can_be_read_is_refused(place: Place, tmp_path: Path):
    store = place.save(tmp_path, 7)
    (manifest,) = store.root.glob("*/manifest.json")
    manifest.write_bytes(b"{}")
    (obstacle,) = place.look(History()).obstacles
    assert "of 1 checkpoint none can be read" in obstacle and str(manifest) in obstacle
    for rank in range(2):
        place.seal(rank, 3)
    outlook = place.look()
    assert outlook.obstacles == () and outlook.resume.startswith("step 3, from the slots")
    assert any("passed over" in note and str(manifest) in note for note in outlook.notes)


def test_a_store_in_which_another_job_lives_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = StoreOwner(place.save(tmp_path, 7), JobId("job"))
    other.take(Generation(1))
    monkeypatch.setattr(owner, "_POLL_S", 0.01)
    monkeypatch.setattr(owner, "LIMIT_S", 0.05)
    before = tree(place.store)
    assert place.look().obstacles == (), "it gives no sign of life: a run would take the store"
    assert tree(place.store) == before
    monkeypatch.setattr(owner, "LIMIT_S", 20.0)
    signs = threading.Timer(0.05, other.show_life)
    signs.start()
    outlook = place.look(History())
    signs.join()
    assert len(outlook.obstacles) == 1 and "is job job's, which writes" in outlook.obstacles[0]
    assert outlook.resume == "nowhere"


def test_a_job_whose_state_is_gone_would_not_start_over(place: Place):
    place.seal(0, 4)
    place.seal(1, 5)
    (obstacle,) = place.look().obstacles
    assert "--job-dir" in obstacle


def test_a_store_that_cannot_be_used_stands_in_the_way(place: Place):
    place.store.write_text("a file")
    place.config = replace(place.config, checkpoints=str(place.store / "below"))
    settings = CheckpointSettings(url=str(place.store / "below"))
    outlook = look_ahead(place.config, settings, History(), place.job_dir)
    assert len(outlook.obstacles) == 1


def test_slots_must_fit_and_own_ones_count_as_free(place: Place):
    outlook = place.look(History())
    state = state_of(report(0), report(1))
    assert obstacles(outlook, state) == []
    needed = 2 * 2 * 4096 * 4  # two ranks, two pages for 5000 bytes, three slots and one to write
    assert obstacles(replace(outlook, free_bytes=needed), state) == []
    (obstacle,) = obstacles(replace(outlook, free_bytes=needed - 1), state)
    assert "--memory-dir" in obstacle


def test_the_table_has_what_differs_between_ranks(place: Place):
    text = "\n".join(table(place.look(History()), state_of(report(0), report(1))))
    for part in (
        "80 B to 81 B a rank",
        "batches (StatefulDataLoader)",
        "built again: model is DDP",
        f"{place.store}; every 600 s, the last step; the newest 2 are kept; 0 are there now",
        "4 a rank of 4.9 KiB: 64.0 KiB of",
    ):
        assert part in text, f"{part}\n{text}"


def test_slots_of_another_layout_are_said(place: Place):
    digest = place.seal(0, 4)
    place.seal(1, 4)
    outlook = place.look()
    same = "\n".join(table(outlook, state_of(report(0, digest), report(1, digest))))
    other = "\n".join(table(outlook, state_of(report(0, digest), report(1))))
    assert "laid out otherwise" not in same
    assert "rank 1: the slots to resume from were laid out otherwise" in other


def test_what_does_not_fit_a_checkpoint_is_said_once_and_what_a_run_would_remark_is_a_note(
    place: Place, tmp_path: Path
):
    place.save(tmp_path, 7)
    outlook = place.look()
    assert outlook.checkpoint == snap(7)
    with_misfits = msgspec.structs.replace(report(0), misfits="not in it: a", remarks=("no b",))
    same = msgspec.structs.replace(report(1), misfits="not in it: a", remarks=("no b",))
    state = state_of(with_misfits, same)
    assert misfits(state) == ["not in it: a (ranks 0, 1)"]
    assert "\n".join(table(outlook, state)).count("no b") == 1
    assert misfits(state_of(report(0), same)) == ["not in it: a (rank 1)"]
    assert misfits(state_of(report(0), report(1))) == []
    place.seal(0, 8)
    place.seal(1, 8)
    assert place.look().checkpoint is None, "memory is newer"


def test_whether_a_job_directory_is_held_is_only_looked_at(place: Place):
    assert not is_held(place.job_dir)
    assert not is_held(place.job_dir / "none")
    journal = Journal(place.job_dir, SystemClock())
    assert is_held(place.job_dir)
    journal.close()
    assert not (place.job_dir / "none").exists()


def test_sizes_and_spans():
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
    ]
    assert (span([2, 2]), span([3, 1])) == ("2", "1 to 3")
