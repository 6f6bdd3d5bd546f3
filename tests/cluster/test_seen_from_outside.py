"""A job as Prometheus, a kubelet and whoever reads its log see it, started by parts as in pods."""

from __future__ import annotations

import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cluster.harness import STEPFAST, TINY, Command, Job, finish
from cluster.test_endings import coordinator, port_of
from stepfast.events import NodeChecked, NodeJoined, Recovered, SloBreached
from unit.test_health_efa import adapter

STEPS = 10_000
NVML_STAND_IN = Path(__file__).parents[1] / "fakes" / "nvml"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (ConnectionError, urllib.error.URLError):
        return 0, ""


def samples(port: int, name: str) -> dict[frozenset[tuple[str, str]], float]:
    status, text = get(port, "/metrics")
    assert status == 200
    families = text_string_to_metric_families(text)
    found = [s for f in families for s in f.samples if s.name == name]
    return {frozenset(s.labels.items()): s.value for s in found}


def value(port: int, name: str, **labels: str) -> float:
    return samples(port, name).get(frozenset(labels.items()), 0.0)


def one_agent(tmp_path: Path, port: int, *flags: object, **options: object) -> Command:
    where = ("--coordinator", f"127.0.0.1:{port}", "--node", 0)
    script = (TINY, "--steps", STEPS, "--pace-ms", 20)
    arguments = [*STEPFAST, "agent", *where, *flags, *script]
    return Command(tmp_path / "agent", arguments, **options)


def until_steps_are_counted(job: Job, port: int, name: str) -> None:
    job.until(lambda: value(port, name) > 20, name)


def test_what_is_exported_is_what_the_events_say(tmp_path: Path):
    """One recovery, which misses an objective that nothing could meet."""
    mine, theirs = free_port(), free_port()
    (tmp_path / "stepfast.toml").write_text("[slo]\nrecovery_s = 0.000001\nsteps_lost = 1\n")
    settings = ("--config", tmp_path / "stepfast.toml", "--nproc-per-node", 2)
    flags = (*settings, "--metrics-port", mine, "--fault", "kill@rank=1,step=30")
    with coordinator(tmp_path, *flags) as job:
        port = port_of(job)
        assert get(mine, "/livez") == (200, "ok\n")
        with one_agent(tmp_path, port, "--metrics-port", theirs) as agent:
            job.until(lambda: job.of_type(Recovered), "a recovery")
            for at, prefix in ((mine, "stepfast"), (theirs, "stepfast_node")):
                until_steps_are_counted(job, at, f"{prefix}_step_seconds_count")
                seconds = value(at, f"{prefix}_step_seconds_sum")
                assert seconds / value(at, f"{prefix}_step_seconds_count") > 0.02, "its pace"
                assert value(at, f"{prefix}_generation") == 2
                assert value(at, f"{prefix}_ranks", state="active") == 2
                assert get(at, "/healthz") == (200, "ok\n")
            assert value(theirs, "stepfast_node_coordinator_connected") == 1
            assert abs(value(mine, "stepfast_step") - job.step()) < 100
            (event,) = job.of_type(Recovered)
            labels = {"kind": "kill", "phase": "total"}
            total = value(mine, "stepfast_recovery_seconds_sum", **labels)
            assert total == event.total_s
            assert value(mine, "stepfast_steps_lost_total") == event.steps_lost
            (breach,) = job.of_type(SloBreached)
            assert (breach.objective, breach.value) == ("recovery_s", event.total_s)
            assert value(mine, "stepfast_slo_breaches_total", objective="recovery_s") == 1
            assert value(mine, "stepfast_slo_breaches_total", objective="steps_lost") == 0
            assert "objective missed: recovery_s" in job.console
            same = (get(port, "/metrics")[1], get(mine, "/metrics")[1])
            assert len({text.split("stepfast_checkpoint_age")[0] for text in same}) == 1
            job.process.terminate()
            finish(job, expected=143)
            agent.wait(20)
            agent.assert_nothing_left()
    assert job.summary()["recoveries"][0]["seconds"]["total"] == round(total, 6)


# --- the gate ------------------------------------------------------------------------------------

UNFIT, USER_ERROR = 85, 78
CHECK = """#!/bin/sh
cat "$(dirname "$0")/verdict" 2>/dev/null
test ! -e "$(dirname "$0")/broken"
"""


def health_check(tmp_path: Path) -> Path:
    """Says what lies in a file `verdict`; fails while there is a file `broken`."""
    command = tmp_path / "check"
    command.write_text(CHECK)
    command.chmod(0o755)
    return command


def a_machine_whose_gpu_wants_a_reset(root: Path) -> dict[str, str]:
    """And whose one EFA adapter does not answer; the environment in which it is found so."""
    (root / "dev").mkdir(parents=True)
    (root / "dev" / "nvidiactl").touch()
    adapter(root / "sys", "rdmap0s0", no_completion_cmds=3)
    (root / "nvml.json").write_text('{"gpus": [{}, {"recovery": 1}]}')
    paths = (str(NVML_STAND_IN), os.environ.get("PYTHONPATH", ""))
    return {"NVML_STAND_IN": str(root / "nvml.json"), "PYTHONPATH": os.pathsep.join(paths)}


def checked(job: Job) -> list[NodeChecked]:
    return job.of_type(NodeChecked)


def test_a_node_that_is_unfit_leaves_with_85_and_its_evidence_is_an_event(tmp_path: Path):
    """So does one that was not wholly looked at, if it shall; the job waits for a better one."""
    command, token = health_check(tmp_path), tmp_path / "token"
    token.write_text("the right one\n")
    token.chmod(0o600)
    shown = ("--token-file", token)
    with coordinator(tmp_path, "--nproc-per-node", 1, *shown, "--metrics-port", 0) as job:
        port = port_of(job)
        health = ("--health-check", command, *shown)
        (tmp_path / "broken").touch()
        (tmp_path / "verdict").write_text(
            '{"check": "nccl", "verdict": "unhealthy", "evidence": "9 GB/s"}'
        )
        with one_agent(tmp_path / "first", port, *health) as agent:
            assert agent.wait(30) == UNFIT
            assert "this node is unfit: health check: nccl: 9 GB/s" in agent.last_lines[-1]
            agent.assert_nothing_left()
        (event,) = job.until(lambda: checked(job), "the evidence")
        assert (event.node, event.occasion, event.admitted) == (0, "join", False)
        assert [(f.check, f.evidence) for f in event.findings] == [("health check: nccl", "9 GB/s")]
        assert "node 0 is unfit and stays out: health check: nccl: 9 GB/s" in job.console
        assert not job.of_type(NodeJoined)
        (tmp_path / "broken").unlink()
        (tmp_path / "verdict").write_text('{"verdict": "unknown", "evidence": "no GPU to look at"}')
        with one_agent(tmp_path / "second", port, *health, "--health-unknown", "refuse") as agent:
            assert agent.wait(30) == UNFIT
            assert "set health_unknown to admit" in agent.last_lines[-1]
        nvml = a_machine_whose_gpu_wants_a_reset(tmp_path / "machine")
        root = ("--machine-root", tmp_path / "machine", *shown)
        with one_agent(tmp_path / "gpu", port, *root, environment=nvml) as agent:
            assert agent.wait(30) == UNFIT
            agent.assert_nothing_left()
        last = checked(job)[-1]
        assert [f.check for f in last.findings if f.verdict == "unhealthy"] == [
            "efa counters",
            "gpu recovery action",
        ]
        assert "the driver asks for: GPU reset" in job.console
        assert value(port, "stepfast_unfit_total") == 3
        theirs = free_port()
        with one_agent(tmp_path / "third", port, *health, "--metrics-port", theirs) as agent:
            job.until_running()
            last = checked(job)[-1]
            assert (last.verdict, last.admitted) == ("unknown", True)
            labels = {"check": "health check"}
            assert value(theirs, "stepfast_node_health", verdict="unknown", **labels) == 1
            assert value(theirs, "stepfast_node_health", verdict="healthy", **labels) == 0
            assert "node 0 was not wholly looked at: health check: no GPU" in job.console
            job.process.terminate()
            finish(job, expected=143)
            agent.wait(20)
            agent.assert_nothing_left()
    assert "the right one" not in job.console + (job.directory / "events.jsonl").read_text()


def test_a_node_that_became_unfit_does_not_come_back(tmp_path: Path):
    """Its coordinator is killed and comes back: its ranks end with it, and the job is told."""
    command = health_check(tmp_path)
    listen = ("--listen", f"127.0.0.1:{free_port()}", "--nproc-per-node", 1)
    with coordinator(tmp_path, *listen) as job:
        port = port_of(job)
        with one_agent(tmp_path, port, "--health-check", command) as agent:
            job.until_running()
            assert [c.verdict for c in checked(job)] == ["healthy"]
            (tmp_path / "broken").touch()
            job.process.kill()
            job.process.wait()
            with coordinator(tmp_path, *listen, "--restarted") as back:
                assert agent.wait(40) == UNFIT
                agent.assert_nothing_left()
                back.until(lambda: len(checked(back)) == 2, "the evidence")
                assert (checked(back)[-1].occasion, checked(back)[-1].admitted) == ("rejoin", False)
                back.process.kill()
            job_id = (job.directory / "job-id").read_text().strip()
            (slots,) = Path("/dev/shm").glob(f"stepfast-*-{job_id}")
    assert list(slots.rglob("rank-0")), "what the ranks held stays for whoever takes their place"
    shutil.rmtree(slots)


def test_a_health_check_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path: Path):
    with one_agent(tmp_path, 1, "--health-check", "no-such-command-here") as agent:
        assert agent.wait(30) == USER_ERROR
        assert "there is no command 'no-such-command-here'" in agent.last_lines[-1]
