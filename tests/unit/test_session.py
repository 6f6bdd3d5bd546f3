"""The user's side on a plain host: what works, and what a wrong script is told."""

import pytest
import torch

from stepfast.errors import ScriptError
from stepfast.train.host import PlainHost
from stepfast.train.session import Run


class Loader:
    """A loader of four numbers an epoch with a position, in torchdata's shape."""

    def __init__(self, length=4):
        self.length = length
        self.position = 0
        self.epochs_begun = []
        self.sampler = self

    def set_epoch(self, epoch):
        self.epochs_begun.append(epoch)

    def __iter__(self):
        for at in range(self.position, self.length):
            self.position = at + 1
            yield at
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.fixture
def run():
    return Run(PlainHost(rank=0, world_size=1, local_rank=0, device_type="cpu"))


def tracked(run, **more):
    return run.track(model=torch.nn.Linear(2, 2), **more)


def test_steps_go_from_the_beginning_to_the_end(run):
    tracked(run)
    assert list(run.steps(3)) == [0, 1, 2]
    assert run.finish() == 3


def test_the_device_and_the_place_are_those_of_the_process(run):
    assert (run.device, run.rank, run.world_size, run.resuming) == (
        torch.device("cpu"),
        0,
        1,
        False,
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda run: run.steps(1), "nothing is tracked"),
        (lambda run: run.track(), "name at least the model"),
        (lambda run: run.track(model=object()), "model"),
        (lambda run: (tracked(run), tracked(run)), "run.track was called twice"),
        (lambda run: (tracked(run), run.steps(1), run.steps(1)), "run.steps was called twice"),
        (
            lambda run: run.once(lambda r: r.once(lambda _: 1)),
            "inside a function given to run.once",
        ),
        (lambda run: run.log(loss=object()), "not a number"),
        (lambda run: run.log(loss=torch.zeros(2)), "2 elements"),
    ],
)
def test_a_wrong_script_is_told_what_to_change(run, wrong, words):
    with pytest.raises(ScriptError, match=words):
        wrong(run)


def test_what_once_built_is_built_once(run):
    calls = []
    build = lambda r: calls.append(r) or "built"  # noqa: E731 - the test's own recorder
    assert run.once(build) == "built"
    assert len(calls) == 1


def test_a_tracked_loader_is_an_iterator_over_its_epochs(run):
    loader = Loader()
    batches = tracked(run, batches=loader).batches
    assert [next(batches) for _ in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert loader.epochs_begun == [0, 1, 2]


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 8])
def test_a_tracked_loader_resumes_at_the_next_batch_in_any_epoch(run, taken):
    batches = tracked(run, batches=Loader()).batches
    for _ in range(taken):
        next(batches)
    state = batches.state_dict()
    expected = [next(batches) for _ in range(6)]
    other = Run(PlainHost(rank=0, world_size=1, local_rank=0, device_type="cpu"))
    resumed = tracked(other, batches=Loader()).batches
    resumed.load_state_dict(state)
    assert [next(resumed) for _ in range(6)] == expected


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5])
def test_micro_batches_of_an_interrupted_step_are_handed_out_again(run, taken):
    """A window of five: the position is that of the step's boundary, wherever in it a fault was."""
    batches = tracked(run, batches=Loader()).batches
    for _ in range(5):
        next(batches)
    boundary = batches.state_dict()
    window = [next(batches) for _ in range(5)]
    batches.load_state_dict(boundary)
    for _ in range(taken):
        next(batches)
    batches.load_state_dict(boundary)  # a survivor, in the midst of the window
    assert [next(batches) for _ in range(5)] == window
    other = Run(PlainHost(rank=0, world_size=1, local_rank=0, device_type="cpu"))
    fresh = tracked(other, batches=Loader()).batches
    fresh.load_state_dict(boundary)
    assert [next(fresh) for _ in range(5)] == window


def test_an_empty_loader_is_named(run):
    batches = tracked(run, empties=Loader(length=0)).empties
    with pytest.raises(ScriptError, match="'empties' yields no batch"):
        next(batches)


def test_a_turns_values_are_delivered_when_it_is_whole(capsys):
    run = Run(PlainHost(rank=0, world_size=1, local_rank=0, device_type="cpu"))
    tracked(run)
    for step in run.steps(2):
        run.log(loss=torch.tensor(1.5), step=step)
        run.log(extra=2)
        if step == 0:
            assert "loss" not in capsys.readouterr().out
    run.finish()
    assert "step 0 loss=1.5 step=0 extra=2" in capsys.readouterr().out


def test_other_ranks_logs_are_not_heard(capsys):
    run = Run(PlainHost(rank=1, world_size=2, local_rank=1, device_type="cpu"))
    tracked(run)
    for _ in run.steps(1):
        run.log(loss=1.0)
    run.finish()
    assert capsys.readouterr().out == ""


def test_a_loop_that_is_left_early_ends_at_its_step(run):
    tracked(run)
    for step in run.steps(10):
        if step == 4:
            break
    assert run.finish() == 4


class LeftHost(PlainHost):
    """A host in whose turns an optimizer may have stepped, and that may resume behind a `break`."""

    def __init__(self, *, steps_in_turn: bool = True, at: int = 0, loop_left: bool = False) -> None:
        super().__init__(rank=0, world_size=1, local_rank=0, device_type="cpu")
        self.steps_in_turn, self.at, self.left = steps_in_turn, at, loop_left
        self.ended: list[int] = []

    @property
    def loop_left(self) -> bool:
        return self.left

    def begin_steps(self):
        return self.at

    def turn_left(self, step):
        return step + 1 if self.steps_in_turn else step

    def steps_ended(self, step):
        self.ended.append(step)


@pytest.mark.parametrize(("steps_in_turn", "reached"), [(True, 5), (False, 4)])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_turn_that_was_left_counts_if_an_optimizer_stepped(steps_in_turn, reached, is_held):
    host = LeftHost(steps_in_turn=steps_in_turn)
    run = Run(host)
    tracked(run)
    loop = run.steps(10)
    for step in loop:
        if step == 4:
            break
    if not is_held:
        del loop
    assert run.finish() == reached
    assert run.finish() == reached, "counted once"
    assert host.ended == ([] if is_held else [4])


def test_who_goes_on_from_a_loop_that_was_left_makes_no_turn():
    run = Run(LeftHost(at=5, loop_left=True))
    tracked(run)
    assert list(run.steps(10)) == []
    assert run.finish() == 5
