"""The event log: whole lines, one owner, a history that goes on."""

import shutil

import pytest

from stepfast.cli.serve import _conclude, _Voice
from stepfast.config import JobConfig
from stepfast.coordinator.journal import EVENTS_FILE, Journal, read_events, read_history
from stepfast.core.job_state import JobEnd
from stepfast.core.terms import SnapshotId
from stepfast.errors import ConfigError
from stepfast.events import GenerationOpened, JobEnded, Note, StepLogged
from stepfast.observe.summary import summarize, write_summary
from stepfast.runtime.clock import SystemClock


def opened(generation, step):
    return GenerationOpened(
        generation=generation,
        step=step,
        world_size=1,
        store="127.0.0.1:1",
        pids={0: 10},
        incarnations={0: 1},
        kept=False,
    )


def test_a_job_directory_has_one_owner(tmp_path):
    first = Journal(tmp_path, SystemClock())
    with pytest.raises(ConfigError, match="belongs to a running job"):
        Journal(tmp_path, SystemClock())
    first.close()
    Journal(tmp_path, SystemClock()).close()


@pytest.mark.parametrize("name", ["lock", EVENTS_FILE, "job-id.new"])
def test_nothing_is_written_where_a_link_leads(tmp_path, name):
    elsewhere, job = tmp_path / "elsewhere", tmp_path / "job"
    elsewhere.write_text("not ours")
    job.mkdir()
    (job / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="cannot use the job directory"):
        Journal(job, SystemClock())
    assert elsewhere.read_text() == "not ours"
    (job / name).unlink()
    Journal(job, SystemClock()).close()


def test_the_identity_outlives_a_run(tmp_path):
    first = Journal(tmp_path, SystemClock())
    first.close()
    second = Journal(tmp_path, SystemClock())
    second.close()
    assert first.job_id == second.job_id


def test_a_given_identity_outlives_the_directory(tmp_path):
    for directory in ("a", "b", "a"):
        journal = Journal(tmp_path / directory, SystemClock(), "run-7")
        journal.close()
        assert journal.job_id == "run-7"
    with pytest.raises(ConfigError, match=r"is that of job run-7, not of run-8"):
        Journal(tmp_path / "a", SystemClock(), "run-8")
    Journal(tmp_path / "a", SystemClock()).close()


def test_a_history_goes_on_where_it_stood(tmp_path):
    journal = Journal(tmp_path, SystemClock())
    for event in (opened(1, None), StepLogged(step=9, values={}), opened(2, 8)):
        journal.append(event, durable=True)
    journal.close()
    history = read_history(tmp_path / EVENTS_FILE)
    assert (history.generation, history.steps_max, history.logged_max) == (2, 9, 9)
    assert history.lineage.admits(SnapshotId(1, 8))
    assert not history.lineage.admits(SnapshotId(1, 9))
    assert not history.finished


def test_a_torn_last_line_and_unknown_types_are_passed_over(tmp_path):
    journal = Journal(tmp_path, SystemClock())
    journal.append(Note(topic="a", text="b"), durable=False)
    journal.close()
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'{"v":1,"at":1,"t":1,"event":{"type":"FromTheFuture"}}\n{"v":1,"at":')
    assert len(read_events(tmp_path / EVENTS_FILE)) == 1


def test_a_summary_is_whole_and_says_running_until_the_end(tmp_path):
    journal = Journal(tmp_path, SystemClock())
    journal.append(opened(1, None), durable=False)
    events = tmp_path / EVENTS_FILE
    assert summarize(read_events(events))["status"] == "running"
    journal.append(
        JobEnded(status="finished", exit_code=0, reason="r", steps=5, final_digest="d"),
        durable=True,
    )
    journal.close()
    summary = summarize(read_events(events))
    assert (summary["status"], summary["steps"], summary["pids"]) == (
        "finished",
        5,
        {"0": {"1": 10}},
    )
    write_summary(tmp_path / "summary.json", summary)
    assert (tmp_path / "summary.json").read_text().startswith("{")
    assert not list(tmp_path.glob("*.new"))


def test_a_log_that_was_removed_is_read_all_the_same(tmp_path):
    journal = Journal(tmp_path, SystemClock())
    journal.append(opened(1, None), durable=False)
    (tmp_path / EVENTS_FILE).unlink()
    journal.append(StepLogged(step=9, values={}), durable=True)
    assert [type(line.event) for line in journal.events()] == [GenerationOpened, StepLogged]
    journal.close()


def test_a_job_directory_that_is_gone_at_the_end_is_one_line(tmp_path, capsys):
    directory = tmp_path / "job"
    journal = Journal(directory, SystemClock())
    shutil.rmtree(directory)
    kept = tmp_path / "kept.json"
    config = JobConfig(job_dir=str(directory), summary=str(kept))
    end = JobEnd(status="finished", exit_code=0, reason="finished at step 5", deadline=0.0)
    voice = _Voice(is_marked=False)
    assert _conclude(end, journal, voice, config, is_check=False) == 1
    voice.flush()
    removed, unwritten = capsys.readouterr().out.splitlines()
    assert removed.endswith(f"events.jsonl was removed from {directory} while the job ran")
    assert unwritten.startswith("stepfast: the job has finished, but its summary cannot be")
    assert kept.exists(), "one that cannot be written is in no other's way"
