"""`stepfast k8s local` with small containers: what they find inside, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepfast.k8s.local.kernel import why_no_namespaces

LIMIT_S = 30.0
MANIFEST = """
apiVersion: batch/v1
kind: Job
metadata: {{name: run, namespace: training}}
spec:
  completionMode: Indexed
  completions: {pods}
  parallelism: {pods}
  backoffLimitPerIndex: 1
  template:
    spec:
      restartPolicy: Never
      subdomain: run
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        command: [{shell}, -c, "{script}"]
        env:
        - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
        volumeMounts:
        - {{name: snapshots, mountPath: /snapshots}}
        - {{name: token, mountPath: /etc/deep/token, readOnly: true}}
        - {{name: kept, mountPath: /kept, subPath: below}}
        restartPolicy: Never
        restartPolicyRules: [{{action: Restart, exitCodes: {{operator: In, values: [7, 143]}}}}]
      volumes:
      - {{name: snapshots, emptyDir: {{medium: Memory, sizeLimit: 8Mi}}}}
      - {{name: token, secret: {{secretName: s, items: [{{key: token, path: token}}]}}}}
      - {{name: kept, persistentVolumeClaim: {{claimName: kept}}}}
"""
needs_namespaces = pytest.mark.skipif(
    why_no_namespaces() is not None, reason="this user may have no namespaces"
)


class Runner:
    """One run of a manifest; killed where a test leaves it."""

    def __init__(self, directory: Path, script: str, *flags: object, pods: int = 1) -> None:
        self.temporary = directory / "tmp"
        self.kept = directory / "kept"
        for path in (self.temporary, self.kept):
            path.mkdir()
        manifest = directory / "job.yaml"
        manifest.write_text(MANIFEST.format(script=script, shell="sh", pods=pods))
        self.output = directory / "output"
        self._file = self.output.open("wb")
        claim = ("--claim", f"kept={self.kept}", "--backoff-s", "0.1")
        self.process = subprocess.Popen(
            [*(sys.executable, "-m", "stepfast", "k8s", "local"), *claim, *flags, str(manifest)],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(self.temporary)},
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._file.close()

    @property
    def console(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while words not in self.console:
            assert time.monotonic() < deadline and self.process.poll() is None, self.console
            time.sleep(0.01)

    def below(self) -> list[int]:
        """Every process below the run."""
        parents: dict[int, int] = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                status = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(status.rpartition(")")[2].split()[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {self.process.pid})


@pytest.fixture
def runners() -> Iterator[list[Runner]]:
    started: list[Runner] = []
    yield started
    for runner in started:
        runner.close()


@needs_namespaces
def test_a_container_finds_a_machine_of_its_own(tmp_path: Path, runners: list[Runner]) -> None:
    script = (
        "echo first $$$$ host $(hostname) ip $POD_IP;"
        " echo hosts $(grep -c run-0.run.training.svc.cluster.local /etc/hosts);"
        " head -c 9000000 /dev/zero > /snapshots/much || echo full;"
        " echo token $(wc -c < /etc/deep/token/token); touch /etc/deep/token/x || echo sealed;"
        " touch /usr/x || echo image sealed;"
        " echo others $(ls -d /proc/[0-9]* | wc -l);"
        " test -e /snapshots/mark && { echo again; cp /snapshots/mark /kept/; exit 0; };"
        " rm /snapshots/much; echo yes > /snapshots/mark; exit 7"
    )
    runner = Runner(tmp_path, script)
    runners.append(runner)
    assert runner.process.wait(LIMIT_S) == 0, runner.console
    said = runner.console
    for words in (
        *("first 1 host run-0 ip 127.", "hosts 1", "full", "token 32", "] sealed"),
        *("image sealed", "ended with 7: started again by restart rule 0, at once", "again"),
    ):
        assert words in said, (words, said)
    assert (runner.kept / "below" / "mark").read_text() == "yes\n"
    assert not list(runner.temporary.iterdir())
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    for place in ("/snapshots", "/kept", "/etc/deep"):
        assert not Path(place).exists(), "nothing is made on this machine itself"


@pytest.mark.parametrize("flags", [(), ("--no-namespaces",)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_run(
    tmp_path: Path, runners: list[Runner], flags: tuple[str, ...], number: int
) -> None:
    """Containers that ignore every request, with children in sessions of their own."""
    script = "trap '' TERM INT; setsid sleep 600 & echo standing; while :; do sleep 0.05; done"
    runner = Runner(tmp_path, script, *flags)
    runners.append(runner)
    runner.until("] standing")
    below = runner.below()
    assert len(below) >= 3, below
    runner.process.send_signal(number)
    assert runner.process.wait(LIMIT_S) == (130 if number == signal.SIGINT else -9)
    deadline = time.monotonic() + 5.0
    while left := [pid for pid in below if _is_alive(pid)]:
        assert time.monotonic() < deadline, [_words(pid) for pid in left]
        time.sleep(0.01)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    if number == signal.SIGINT:
        assert not list(runner.temporary.iterdir())


def test_without_namespaces_places_and_names_are_put_into_the_command(
    tmp_path: Path, runners: list[Runner]
) -> None:
    script = "echo ip $POD_IP; test -d /snapshots || echo no place"
    runner = Runner(tmp_path, script, "--no-namespaces", pods=2)
    runners.append(runner)
    assert runner.process.wait(LIMIT_S) == 0, runner.console
    assert "containers are process groups" in runner.console
    assert "no place" in runner.console
    assert "[run-1 main] ip 127." in runner.console


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
