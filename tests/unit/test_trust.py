"""What a boundary believes: it is right while only optimizers' steps change it, and found out
where it is wrong, before anything is sealed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepfast.checkpoint.arena import SLOTS_WITH_OVERLAP, Arena
from stepfast.checkpoint.capture import Capture
from stepfast.checkpoint.layout import Layout
from stepfast.checkpoint.restore import open_sealed
from stepfast.checkpoint.tensors.copier import ThreadCopier
from stepfast.checkpoint.tensors.local import over
from stepfast.checkpoint.tensors.tree import StateTree
from stepfast.checkpoint.tensors.trust import Trust
from stepfast.core.terms import Generation, SnapshotId, Step

STAGED = 9  # from here on none is whole until the 16th


class Job:
    """A model that trains with a snapshot at every step, what each has to hold, and what it did."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.notes: list[str] = []
        self.sealed: dict[int, dict[str, bytes]] = {}
        self.wanted: dict[int, dict[str, bytes]] = {}
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.tree = StateTree(objects, copiers={"cpu": ThreadCopier()})
        self.capture = Capture(
            Arena(directory, SLOTS_WITH_OVERLAP),
            self.tree,
            on_sealed=self._keep,
            note=lambda topic, text: self.notes.append(f"{topic}: {text}"),
        )
        self.step = 0

    def _keep(self, captured: Any) -> None:
        slot = open_sealed(captured.slot_path, captured.snapshot)
        held = {n: bits(over(slot.view(e), e)) for n, e in slot.layout.by_name.items()}
        self.sealed[captured.snapshot.step] = {n: v for n, v in held.items() if "rng" not in n}

    def boundary(self) -> None:
        self.step += 1
        # By another tree: one that is asked by nobody else believes.
        other = StateTree({"model": self.model, "optimizer": self.optimizer}).collect()
        pairs = zip(other.layout.entries, other.tensors, strict=True)
        self.wanted[self.step] = {e.name: bits(t) for e, t in pairs if "rng" not in e.name}
        self.capture.stage(SnapshotId(Generation(1), Step(self.step)))

    def turn(self) -> None:
        self.model(torch.randn(2, 4)).sum().backward()
        self.capture.fence()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def until_staged(self) -> None:
        while self.step < STAGED:
            self.boundary()
            self.turn()
        assert sorted(self.sealed) == list(range(1, STAGED + 1)) and self.notes == []

    def check(self, *void: int) -> None:
        assert sorted(self.sealed) == [s for s in range(1, self.step + 1) if s not in void]
        for step, held in self.sealed.items():
            assert held == self.wanted[step], step


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.until_staged()
    return job


def states_of(job: Job) -> list[dict[str, Tensor]]:
    return list(job.optimizer.state.values())


def put_others(job: Job) -> None:
    for state in states_of(job):
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def put_another_shape(job: Job) -> None:
    states_of(job)[0]["exp_avg"] = torch.ones(3)


def reshape_in_place(job: Job) -> None:
    states_of(job)[0]["exp_avg"].data = torch.ones(3)


def convert_in_place(job: Job) -> None:
    states_of(job)[0]["exp_avg"].data = torch.ones(4, 4, dtype=torch.bfloat16)


def drop_one(job: Job) -> None:
    job.optimizer.state.popitem()


def empty(job: Job) -> None:
    job.optimizer.state.clear()


def fill_what_was_empty(job: Job) -> None:
    job.model[1].register_buffer("seen", torch.ones(2))


def replace_a_dict(job: Job) -> None:
    job.model[0]._parameters = dict(job.model[0]._parameters)


CHANGES = {
    change.__name__: change
    for change in (
        put_others, put_another_shape, reshape_in_place, convert_in_place, drop_one, empty,
        fill_what_was_empty, replace_a_dict,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_what_changed_before_the_boundary_voids_one_snapshot_and_is_kept_by_the_next(
    job: Job, name: str
) -> None:
    CHANGES[name](job)
    job.boundary()
    job.capture.fence()
    job.check(job.step)
    void = job.step
    assert len(job.notes) == 1 and f"snapshot void: step {void}" in job.notes[0]
    for _ in range(4):
        job.boundary()
        job.capture.fence()
    job.check(void)
    assert len(job.notes) == 1


def test_an_optimizer_that_was_believed_wrongly_is_looked_at_from_then_on(job: Job) -> None:
    for _ in range(5):
        put_others(job)
        job.boundary()
        job.turn()
    job.check(STAGED + 1)
    assert len(job.notes) == 1 and "optimizer" in job.notes[0]


def test_state_that_a_step_makes_anew_is_found_out(job: Job) -> None:
    job.model[0].requires_grad_(False)
    job.turn()
    del job.optimizer.state[job.model[0].weight]
    job.tree.collect()  # believed without it
    job.model[0].requires_grad_(True)
    job.turn()  # the optimizer makes it here
    job.boundary()
    job.turn()
    job.check(job.step)
    job.boundary()
    job.turn()
    job.check(job.step - 1)


def test_what_changes_behind_the_copy_leaves_it_sound(job: Job) -> None:
    job.boundary()
    job.capture.hold()
    assert job.capture.has_copied
    with torch.no_grad():
        job.model[0].weight.add_(1)
    put_others(job)
    job.capture.fence()
    job.check()
    assert job.notes == []


def test_what_changes_while_it_is_looked_at_is_not_believed() -> None:
    def look() -> bool:
        raise RuntimeError("dictionary changed size during iteration")

    trust = Trust({"doubted"})
    assert trust.holds("one", look) and trust.holds("other", lambda: True)
    assert not trust.holds("doubted", lambda: False)
    assert trust.believed == ("one", "other") and trust.broken() == ["one"]


def test_no_layout_is_built_where_nothing_changed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **keywords: Any) -> Layout:
        raise AssertionError("the layout is kept")

    monkeypatch.setattr(Layout, "build", build)
    state = job.tree.collect(trusting=True)
    assert state.trust is not None
    assert state.trust.believed == ("the build of the modules", "optimizer")
    assert state.trust.broken() == []
