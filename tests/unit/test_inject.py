"""The grammar of `--fault`, and that a fault fires once."""

import pytest

from stepfast.chaos.inject import InjectedFaultError, Injector, parse_fault
from stepfast.core.faults import FaultKind
from stepfast.errors import ConfigError


def test_a_fault_is_read():
    spec = parse_fault("slow@rank=3,step=7,at=backward,for=1.5")
    assert (spec.kind, spec.rank, spec.step, spec.at, spec.for_s) == ("slow", 3, 7, "backward", 1.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode@rank=0,step=1", "unknown kind"),
        ("kill", "rank= is missing"),
        ("kill@rank=0", "step= is missing"),
        ("kill@rank=x,step=1", "numbers"),
        ("kill@rank=0,step=1,at=lunch", "unknown point"),
        ("kill@rank=0,step=1,who=me", "cannot read"),
        ("kill@rank=0,rank=1,step=1", "cannot read"),
        ("slow@rank=0,step=1", "needs for="),
        ("kill@rank=-1,step=1", "from 0"),
    ],
)
def test_a_wrong_fault_says_what_is_wrong(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_fault(text)


def test_the_words_are_those_of_detection():
    seen = {kind.value for kind in FaultKind}
    assert {"exception", "kill", "exit", "segv", "hang", "stop", "gil"} <= seen


def injector(tmp_path, *texts, rank=0, notes=None):
    heard = notes if notes is not None else []
    return Injector(texts, rank=rank, marks=tmp_path, note=lambda *note: heard.append(note))


def test_a_fault_fires_at_its_place_and_only_there(tmp_path):
    armed = injector(tmp_path, "exception@rank=0,step=3,at=optimizer")
    armed.reach("optimizer", 2)
    armed.reach("forward", 3)
    with pytest.raises(InjectedFaultError, match="optimizer of step 3"):
        armed.reach("optimizer", 3)
    assert not armed.is_armed


def test_a_fault_fires_once_whoever_runs_the_step_again(tmp_path):
    texts = ("exception@rank=0,step=3",)
    with pytest.raises(InjectedFaultError):
        injector(tmp_path, *texts).reach("forward", 3)
    second_process = injector(tmp_path, *texts)
    assert not second_process.is_armed
    second_process.reach("forward", 3)


def test_other_ranks_are_left_alone(tmp_path):
    assert not injector(tmp_path, "kill@rank=1,step=3", rank=0).is_armed


def test_what_fires_is_noted_with_its_time_before_it_strikes(tmp_path):
    notes = []
    with pytest.raises(InjectedFaultError):
        injector(tmp_path, "exception@rank=0,step=3", notes=notes).reach("forward", 3)
    ((topic, text),) = notes
    assert topic == "fault injected"
    assert "exception at forward of step 3 t=" in text


def test_the_recovery_point_waits_for_the_recovery_of_a_fault_at_its_step_or_behind(tmp_path):
    """Which resumes from the step before where a rank had not completed it."""
    for resumed in (4, 5):
        with pytest.raises(InjectedFaultError):
            injector(tmp_path / str(resumed), "exception@rank=0,step=5,at=recovery").reach(
                "recovery", resumed
            )
    armed = injector(tmp_path, "exception@rank=0,step=5,at=recovery")
    armed.reach("recovery", 3)
    with pytest.raises(InjectedFaultError):
        armed.reach("recovery", 6)
