"""A rendered manifest as a job under test: `stepfast k8s local`, and who breaks things in it.

Owns: rendering, starting, commands to the run, the look whether anything is left. Does not own:
what a test breaks.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

from cluster.harness import ROOT, STEPFAST, Job

NAME = "llama-debug"  # as examples/job.toml calls it
COORDINATOR, NODE = "coordinator", "node"


def pod_of(node: int) -> str:
    """The host's name of a node's pod."""
    return f"{NAME}-node-0-{node}"


COORDINATOR_POD = f"{NAME}-coord-0-0"


class PodsJob(Job):
    """examples/job.toml on this machine's pods: the job that others run by `stepfast run`."""

    def __init__(self, directory: Path, *flags: object) -> None:
        """`directory`: a place of its own; the claim for checkpoints and journal lies there."""
        self.claim = directory / "claim"
        self.claim.mkdir()
        manifest = directory / "job.yaml"
        render = [*STEPFAST, "k8s", "render", ROOT / "examples" / "job.toml"]
        manifest.write_bytes(subprocess.run(render, check=True, stdout=subprocess.PIPE).stdout)
        # Not below the test's directory: a socket's path has 107 bytes at most.
        self.control = Path(f"/tmp/stepfast-test-{uuid.uuid4().hex[:12]}")
        arguments = [
            *STEPFAST,
            "k8s",
            "local",
            *("--claim", f"checkpoints={self.claim}"),
            *("--files", f"/opt/stepfast/examples={ROOT / 'examples'}"),
            *("--control", self.control, "--backoff-s", 0.2),
            *flags,
            manifest,
        ]
        super().__init__(directory, arguments)
        self.directory = self.claim / NAME / "job"

    def __enter__(self) -> PodsJob:
        return self

    def tell(self, *words: object) -> str:
        """One command to the run; it must be done."""
        command = " ".join(map(str, words))
        said = subprocess.run(
            [*STEPFAST, "k8s", "local", "--control", self.control, "--tell", command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert said.returncode == 0, (
            f"{command}: {said.stdout}{said.stderr}\n{self.console[-4000:]}"
        )
        return said.stdout

    def all_pids(self) -> set[int]:
        """Every process below the run, whatever namespace it is in."""
        parents = {int(p): _parent_of(int(p)) for p in os.listdir("/proc") if p.isdecimal()}
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


def _parent_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
