"""The agent's threads in the checkpoint store: whatever happens there, the machine hears an end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from stepfast.agent.durable import DurableWork
from stepfast.core.durable import CheckpointSettings
from stepfast.core.node_state import NodeInput, SlotNotWritten
from stepfast.core.outputs import CancelWrite, WriteSlot
from stepfast.core.terms import Rank
from unit.core.rigs import settings
from unit.stored_checkpoints import Slots, snap


def slots_of_rank_0(tmp_path: Path) -> None:
    slot = Slots(tmp_path / "made").path(snap(8), 0)
    slot.parent.rename(tmp_path / "rank-0")


def test_a_write_gives_signs_while_it_is_held_to_a_rate_and_can_be_called_off(tmp_path: Path):
    slow = CheckpointSettings(url=str(tmp_path / "store"), bytes_per_s_max=1.0)
    slots_of_rank_0(tmp_path)

    async def write() -> NodeInput:
        heard: asyncio.Future[NodeInput] = asyncio.get_running_loop().create_future()
        work = DurableWork(settings(checkpoints=slow), tmp_path, heard.set_result)
        work.write(WriteSlot(Rank(0), snap(8)))
        while not any(told.signs for told in work.signs()):
            await asyncio.sleep(0.01)
        assert [(t.rank, t.checkpoint) for t in work.signs()] == [(0, snap(8))]
        work.cancel(CancelWrite(Rank(0), snap(8)))
        work.cancel(CancelWrite(Rank(1), snap(8)))  # of no write: nothing happens
        given = await asyncio.wait_for(heard, 10)
        assert work.signs() == ()
        return given

    given = asyncio.run(write())
    assert isinstance(given, SlotNotWritten)
    assert "called off" in given.reason
    assert not list((tmp_path / "store").rglob("*.part")), "nothing is left of it"


def test_a_thread_that_dies_of_what_nobody_expected_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda died: shown.append(died.exc_type))
    wrong = CheckpointSettings(url=str(tmp_path / "store"), bytes_per_s_max=-1.0)

    async def write() -> NodeInput:
        heard: asyncio.Future[NodeInput] = asyncio.get_running_loop().create_future()
        work = DurableWork(settings(checkpoints=wrong), tmp_path, heard.set_result)
        work.write(WriteSlot(Rank(0), snap(8)))
        return await asyncio.wait_for(heard, 5)

    slots_of_rank_0(tmp_path)
    given = asyncio.run(write())
    for thread in threading.enumerate():
        if thread.name.startswith("stepfast-write"):
            thread.join()
    assert shown == [AssertionError], "its traceback is shown"
    assert isinstance(given, SlotNotWritten)
    assert "traceback" in given.reason
