"""What a person reads while a job runs."""

from stepfast.events import CheckpointCommitted, EventLine, JobEnded
from stepfast.observe.console import Progress, line_of
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
