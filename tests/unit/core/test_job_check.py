"""A check ends when every rank has made its first turn; whatever else happens ends it too."""

from __future__ import annotations

from stepfast.core.faults import FaultKind
from stepfast.core.job_state import Drain, Phase
from stepfast.core.messages import FinishJob, RankChecked, TrackedObject
from stepfast.core.terms import Generation, Rank
from stepfast.errors import EXIT_FINISHED, EXIT_USER_ERROR
from stepfast.events import Dropped, JobEnded
from unit.core.rigs import USER_ERROR, JobRig


def checked(rig: JobRig, number: int, generation: int | None = None) -> RankChecked:
    return RankChecked(
        generation=Generation(rig.state.generation if generation is None else generation),
        rank=Rank(number),
        seconds=0.1,
        objects=(TrackedObject(name="model", type="Linear", tensors=2, size_bytes=80),),
        loaders=(),
        slot_bytes=4096,
        layout="digest",
        once=("build",),
        keep_obstacle=None,
        device="cpu",
        backend="gloo",
        torch_version="2.13.0",
        torch_obstacle=None,
    )


def rig_of(*, check: bool = True) -> JobRig:
    rig = JobRig(check=check, recovery="off")
    for n in range(rig.state.nodes):
        rig.hello(n)
    rig.all_report()
    for r in rig.reports:
        rig.resumed(r)
    return rig


def test_it_ends_when_all_have_said_it():
    rig = rig_of()
    for number in range(3):
        rig.from_node(number // 2, checked(rig, number))
    assert rig.state.end is None
    rig.from_node(1, checked(rig, 3))
    assert rig.state.phase is Phase.ENDING
    (ended,) = rig.all_of(JobEnded)
    assert (ended.status, ended.exit_code) == ("checked", EXIT_FINISHED)
    assert rig.state.end.drain is Drain.NONE, "there is nothing to be made durable"
    told = rig.now_of(FinishJob)
    assert [(t.finished, t.exit_code) for t in told] == [(False, EXIT_FINISHED)] * 2
    assert sorted(rig.state.checked) == [0, 1, 2, 3]


def test_told_twice_is_the_same_as_once():
    rig = rig_of()
    for _ in range(4):
        rig.from_node(0, checked(rig, 0))
    assert rig.state.end is None


def test_another_generation_counts_for_nothing():
    rig = rig_of()
    rig.from_node(0, checked(rig, 0, generation=7))
    assert not rig.state.checked
    assert [d.what for d in rig.now_of(Dropped)] == ["RankChecked"]


def test_a_function_that_returns_without_a_turn_cannot_be_checked():
    rig = rig_of()
    rig.returned(2, step=0)
    assert (rig.state.end.status, rig.state.end.exit_code) == ("failed", EXIT_USER_ERROR)
    assert "run.steps" in rig.state.end.reason


def test_the_users_exception_ends_it_with_78():
    rig = rig_of()
    rig.fault(FaultKind.EXCEPTION, 1, error=USER_ERROR, step=0)
    rig.tick(1.0)
    assert (rig.state.end.status, rig.state.end.exit_code) == ("failed", EXIT_USER_ERROR)


def test_a_job_that_is_no_check_goes_on():
    rig = rig_of(check=False)
    for number in range(4):
        rig.from_node(number // 2, checked(rig, number))
    assert rig.state.end is None
