"""A crash or an error at every single call: what was committed stays, what loads is right, and
trying again ends well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from stepfast.checkpoint.catalog import (
    Retention,
    committed,
    prune,
    survey,
    sweep_unfinished,
    verify,
)
from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.manifest import checkpoint_name, shard_name
from stepfast.core.terms import SnapshotId
from stepfast.errors import OperatingError
from unit.stored_checkpoints import ROOT, WORLD_SIZE, Slots, in_memory, small_pieces, snap
from unit.torn_disk import AFTER, BEFORE, KINDS_OF_FAILURE, Crashed, Plan, TornDisk

# How a disk may be found after a crash; the number is the seed of what is torn.
FOUND = [("kept", 0), ("lost", 0), ("torn", 1), ("torn", 2)]
# What may not be opened there was not made by us; the error is passed over.
NOT_OURS = [("sync_directory", "/"), ("sync_directory", str(ROOT.parent))]
FIRST, SECOND, THIRD, FOURTH = snap(10), snap(20), snap(30), snap(40, generation=2)


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    with small_pieces():
        yield Slots(tmp_path_factory.mktemp("slots"))


@dataclass(frozen=True)
class Scenario:
    """What is on the disk before, what is done, what must be there at all times and at the end."""

    before: Callable[[DirectoryStore, Slots], object]
    do: Callable[[DirectoryStore, Slots], object]
    always: set[SnapshotId]
    at_the_end: set[SnapshotId]
    calls_min: int


def begin(store: DirectoryStore, slots: Slots, *unfinished: SnapshotId) -> None:
    """Checkpoints that nobody committed, and one whose writer died in the middle of a file."""
    for snapshot in unfinished:
        slots.write(store, snapshot)
    writer = store.writer(f"{checkpoint_name(5, 1)}/{shard_name(0, WORLD_SIZE)}")
    writer.__enter__()
    writer.write(b"half")


SCENARIOS = {
    "commit": Scenario(
        before=lambda store, slots: slots.save(store, FIRST),
        do=lambda store, slots: slots.save(store, SECOND),
        always={FIRST},
        at_the_end={FIRST, SECOND},
        calls_min=30,
    ),
    "first commit": Scenario(
        before=lambda store, slots: None,
        do=lambda store, slots: slots.save(store, FIRST),
        always=set(),
        at_the_end={FIRST},
        calls_min=30,
    ),
    "prune": Scenario(
        before=lambda store, slots: slots.save(store, FIRST, SECOND, THIRD, FOURTH),
        do=lambda store, slots: prune(store, Retention(keep_last=2)),
        always={THIRD, FOURTH},
        at_the_end={THIRD, FOURTH},
        calls_min=12,
    ),
    "sweep": Scenario(
        before=lambda store, slots: (
            slots.save(store, THIRD),
            begin(store, slots, FIRST, SECOND),
        ),
        do=lambda store, slots: sweep_unfinished(store),
        always={THIRD},
        at_the_end={THIRD},
        calls_min=8,
    ),
}


def check(disk: TornDisk, slots: Slots, scenario: Scenario) -> set[SnapshotId]:
    """What exists is right, byte for byte, and what must exist does."""
    store = DirectoryStore(ROOT, disk)
    there = committed(store)
    assert scenario.always <= set(there) <= scenario.always | scenario.at_the_end | {FIRST, SECOND}
    for snapshot in there:
        assert verify(store, snapshot, threads=1) == []
        for rank in range(WORLD_SIZE):
            name = f"{checkpoint_name(snapshot.step, snapshot.generation)}"
            data = store.read(f"{name}/{shard_name(rank, WORLD_SIZE)}")
            assert data == slots.content(snapshot, rank)
    return set(there)


def check_retry(disk: TornDisk, slots: Slots, scenario: Scenario) -> None:
    """The same again succeeds, durably, and a sweep leaves nothing behind."""
    store = DirectoryStore(ROOT, disk)
    scenario.do(store, slots)
    sweep_unfinished(store)
    assert check(disk, slots, scenario) == scenario.at_the_end
    assert check(disk.after_crash("lost"), slots, scenario) == scenario.at_the_end
    seen = survey(store)
    assert not seen.unfinished and not seen.damaged
    for name in store.directories():
        files = {entry for entry, _ in disk.entries(str(ROOT / name))}
        assert files == {"manifest.json", *(shard_name(r, WORLD_SIZE) for r in range(WORLD_SIZE))}


def prepared(scenario: Scenario, slots: Slots) -> TornDisk:
    """The disk before, all of it durable."""
    store, disk = in_memory()
    scenario.before(store, slots)
    return disk.after_crash("kept")


def calls_of(scenario: Scenario, slots: Slots) -> list[tuple[str, str]]:
    disk = prepared(scenario, slots)
    scenario.do(DirectoryStore(ROOT, disk), slots)
    assert check(disk.after_crash("lost"), slots, scenario) == scenario.at_the_end
    return disk.calls


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_call_loses_nothing(name: str, slots: Slots) -> None:
    scenario = SCENARIOS[name]
    count = len(calls_of(scenario, slots))
    assert count >= scenario.calls_min
    start = prepared(scenario, slots)
    for at in range(count):
        for when in (BEFORE, AFTER):
            disk = start.after_crash("kept")
            disk.plan = Plan(at, "crash", when)
            try:
                scenario.do(DirectoryStore(ROOT, disk), slots)
            except Crashed:
                pass
            for mode, seed in FOUND:
                found = disk.after_crash(mode, seed)
                check(found, slots, scenario)
                check_retry(found, slots, scenario)


@pytest.mark.parametrize("kind", KINDS_OF_FAILURE)
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_call_is_one_clear_line_and_loses_nothing(
    name: str, kind: str, slots: Slots
) -> None:
    scenario = SCENARIOS[name]
    start, errors = prepared(scenario, slots), 0
    for at, call in enumerate(calls_of(scenario, slots)):
        if kind == "EACCES" and call in NOT_OURS:
            continue
        disk = start.after_crash("kept")
        disk.plan = Plan(at, kind)
        text = ""
        try:
            scenario.do(DirectoryStore(ROOT, disk), slots)
            is_done = True
        except OperatingError as error:
            is_done, text = False, str(error)
        assert is_done or (str(ROOT) in text and "\n" not in text)
        errors += not is_done
        assert len(disk.calls) > at
        there = check(disk, slots, scenario)
        after_power_loss = check(disk.after_crash("lost"), slots, scenario)
        assert there <= after_power_loss, "what is seen is durable"
        if is_done and name != "sweep":
            assert there == scenario.at_the_end
        check_retry(disk, slots, scenario)
    assert errors >= 5


@pytest.mark.parametrize("name", ["commit", "first commit"])
def test_a_write_that_takes_less_is_gone_on_with(name: str, slots: Slots) -> None:
    scenario = SCENARIOS[name]
    start = prepared(scenario, slots)
    for at in range(len(calls_of(scenario, slots))):
        disk = start.after_crash("kept")
        disk.plan = Plan(at, "short")
        scenario.do(DirectoryStore(ROOT, disk), slots)
        assert check(disk.after_crash("lost"), slots, scenario) == scenario.at_the_end


def test_a_disk_that_is_full_at_any_point_is_an_error_and_keeps_what_was_there(
    slots: Slots,
) -> None:
    store, disk = in_memory()
    slots.save(store, FIRST)
    need = sum(len(slots.content(FIRST, rank)) for rank in range(WORLD_SIZE))
    for share in range(20):
        full = disk.after_crash("kept")
        used = full._used_bytes()
        full.bytes_max = used + need * share // 20
        with pytest.raises(OperatingError, match="No space left on device; free some space"):
            slots.save(DirectoryStore(ROOT, full), SECOND)
        check(full, slots, SCENARIOS["commit"])
        sweep_unfinished(DirectoryStore(ROOT, full), in_flight=())
        full.bytes_max = None
        check_retry(full, slots, SCENARIOS["commit"])


def test_a_store_that_cannot_be_written_to_can_be_read(slots: Slots) -> None:
    store, disk = in_memory()
    slots.save(store, FIRST)

    class ReadOnly(TornDisk):
        def _reach(self, call: str, path: str = "") -> bool:
            raise OSError(30, "Read-only file system")

    frozen = DirectoryStore(ROOT, ReadOnly(disk.root))
    assert committed(frozen) == [FIRST] and verify(frozen, FIRST) == []
    with pytest.raises(OperatingError, match="Read-only file system; choose a place"):
        slots.save(frozen, SECOND)
    with pytest.raises(OperatingError, match="Read-only file system"):
        frozen.delete(f"{checkpoint_name(10, 1)}/manifest.json")
    assert verify(frozen, FIRST) == []
