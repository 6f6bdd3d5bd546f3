"""What a person reads while a job runs."""

from stepfast.events import CheckpointCommitted, DecisionMade, EventLine, FaultSeen, JobEnded, Note
from stepfast.observe.console import Lines, Progress, line_of
from stepfast.observe.summary import summarize


def committed(step, size_bytes=900):
    return CheckpointCommitted(
        step=step, generation=1, name="name", size_bytes=size_bytes, seconds=0.1
    )


def test_a_rate_is_shown_when_there_is_one():
    progress = Progress()
    progress.at_step(1, now=10.0)
    assert progress.line(1) == "step 1 generation 1"
    progress.at_step(5, now=12.0)
    assert progress.line(1) == "step 5 2.0 steps/s generation 1"


def test_small_checkpoints_have_a_size():
    assert line_of(committed(5)) == "checkpoint of step 5 committed: 900 B"
    assert line_of(committed(5, 3 << 20)) == "checkpoint of step 5 committed: 3.0 MiB"


def test_a_stopped_job_stands_at_what_it_made_durable_on_the_way_out():
    """Ranks go on while the word of the stop is on its way to them."""
    end = JobEnded(status="stopped", exit_code=130, reason="SIGINT", steps=109, final_digest=None)
    assert line_of(end) == "job stopped: SIGINT"
    lines = [EventLine(v=1, at=0.0, t=0.0, event=e) for e in (committed(100), end, committed(110))]
    assert summarize(lines[:2])["steps"] == 109
    assert summarize(lines)["steps"] == 110


def test_no_rate_is_shown_before_the_first_step_of_a_job_that_resumes():
    progress = Progress()
    for now in (10.0, 13.0, 16.0):
        progress.at_step(48, now)
        assert progress.line(2) == "step 48 generation 2"
    progress.at_step(50, 18.0)
    assert progress.line(2) == "step 50 1.0 steps/s generation 2"
    progress.at_step(50, 21.0)
    assert progress.line(2) == "step 50 0.0 steps/s generation 2", "it stands still"


def fault(rank: int, words: str) -> FaultSeen:
    return FaultSeen(
        kind="exception", rank=rank, node=0, generation=1, step=0, reason=f"rank {rank}: {words}",
        collateral=False, detect_s=0.0,
    )  # fmt: skip


def test_a_long_reason_is_said_once_and_a_short_one_each_time():
    lines, words = Lines(), f"StateError: what is tracked does not fit: {'model.x, ' * 40}"
    first = lines.line_of(fault(0, words))
    assert words.strip() in first
    again = (
        fault(1, words),
        Note(topic="raised while leaving", rank=1, text=words),
        DecisionMade(generation=1, action="end the job", reason=f"{words.strip()} (train.py:2)"),
    )
    for event in again:
        line = lines.line_of(event)
        assert "StateError: what is tracked" in line and "... (as above)" in line
        assert len(line) < 200, line
    assert lines.line_of(fault(1, words)).startswith("fault at step 0: exception: rank 1: StateE")
    for rank in (0, 1):
        assert lines.line_of(fault(rank, "ValueError: no")).endswith(f"rank {rank}: ValueError: no")
