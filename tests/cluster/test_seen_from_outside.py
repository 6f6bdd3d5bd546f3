"""A job as Prometheus, a kubelet and whoever reads its log see it, started by parts as in pods."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cluster.harness import STEPFAST, TINY, Command, Job, finish
from cluster.test_endings import coordinator, port_of
from stepfast.events import Recovered, SloBreached

STEPS = 10_000


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
