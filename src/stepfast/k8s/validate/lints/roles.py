"""Coordinator and nodes: who may end the job, who runs where, how each starts and stops.

Owns: rules `coordinator-role`, `termination` and `probes`. Does not own: accounts (`security`).
A manifest declares how long its flush takes: annotation stepfast.dev/flush-seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.quantities import plain, quantity
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import (
    GPU,
    RUNTIMES,
    Role,
    Workload,
    commands,
    requested,
    runs_by_shell,
)

FLUSH_SECONDS = "stepfast.dev/flush-seconds"
FLUSH_MARGIN_S = 15
GRACE_MAX_S = 110  # a node that shuts down, or is taken back, leaves 120 s
COORDINATOR_CPUS_MAX = 8
COORDINATOR_BYTES_MAX = 16 * 2**30
LIVENESS_MIN_S = 60
_RENDEZVOUS = re.compile(r"--rdzv[-_]endpoint|--master[-_]addr")
_PROGRESS = re.compile(r"train|step|progress|loss|checkpoint|iteration", re.I)


def coordinator_role(scene: Scene) -> Iterator[Hit]:
    """The job ends with its workers; the coordinator is small, apart, and comes back."""
    for workload in scene.workers:
        for container in workload.containers:
            for word in commands(container):
                if _RENDEZVOUS.search(word.text):
                    reason = "the rendezvous lives in a worker: losing that one ends them all"
                    yield Hit(word, reason, "let a coordinator of its own role decide")
                    break
    for workload in scene.coordinators:
        yield from _small(workload)
        yield from _off_gpu_nodes(workload)
        yield from _comes_back(scene, workload)
    for document in scene.of_kind("JobSet", *RUNTIMES):
        parts = scene.parts(document)
        if any(w.role is Role.COORDINATOR for w in parts):
            yield from _success(document, parts)


def _small(workload: Workload) -> Iterator[Hit]:
    for container in workload.containers:
        for name, most in (("cpu", COORDINATOR_CPUS_MAX), ("memory", COORDINATOR_BYTES_MAX)):
            asked = requested(container, name)
            if asked > most:
                place = container.at("resources", "requests", name)
                reason = f"{plain(asked)} of {name} for a process that decides a few times an hour"
                yield Hit(place, reason, "ask for 1 CPU and 1Gi or the like")


def _off_gpu_nodes(workload: Workload) -> Iterator[Hit]:
    if workload.instances:
        place = workload.instance_names[0]
        yield Hit(place, "the coordinator sits on a node of GPUs", "select CPU nodes")
    for toleration in workload.spec.at("tolerations").items:
        if toleration.at("key").text == GPU:
            reason = "it may be put on a GPU node, and go down with it"
            yield Hit(toleration, reason, "remove the toleration")


def _comes_back(scene: Scene, workload: Workload) -> Iterator[Hit]:
    limit = workload.job.at("backoffLimitPerIndex")
    if limit.exists and limit.number is not None and limit.number < 10:
        reason = f"a coordinator lost {limit.number + 1} times ends the run"
        yield Hit(limit, reason, "set 1000: it keeps its state in a journal")
    whole = workload.job.at("backoffLimit")
    counts_all = not limit.exists and scene.target.restarts_in_place(workload.operator)
    if counts_all and whole.number is not None and whole.number < 10:
        reason = f"a coordinator lost {whole.number + 1} times ends the run"
        yield Hit(whole, reason, "set backoffLimitPerIndex: 1000")


def _success(document: Document, parts: list[Workload]) -> Iterator[Hit]:
    above = ("spec", "template", "spec") if document.kind in RUNTIMES else ("spec",)
    policy = document.root.at(*above, "successPolicy")
    workers = sorted({w.replica_name for w in parts if w.is_worker})
    fix = f"set operator: All, targetReplicatedJobs: [{', '.join(workers)}]"
    targets = {item.text for item in policy.at("targetReplicatedJobs").items}
    if not targets:
        yield Hit(policy, "the job would wait for its coordinator to end", fix)
        return
    for part in parts:
        if part.is_coordinator and part.replica_name in targets:
            place = policy.at("targetReplicatedJobs")
            yield Hit(place, "the coordinator's end would count as the job's", fix)
    if not set(workers) <= targets:
        yield Hit(policy.at("targetReplicatedJobs"), "not all workers have to finish", fix)
    if policy.at("operator").text != "All":
        yield Hit(policy.at("operator"), "the first Job that finishes ends the others", fix)


def termination(scene: Scene) -> Iterator[Hit]:
    """SIGTERM reaches the program itself, and leaves it time for what it has to write."""
    for workload in scene.training:
        spec = workload.spec
        if spec.at("shareProcessNamespace").value is True:
            reason = "the pause process becomes PID 1, and orphans are not the agent's any more"
            yield Hit(spec.at("shareProcessNamespace"), reason, "remove it")
        for container in workload.containers:
            if runs_by_shell(container):
                place = container.at("command" if container.at("command").exists else "args")
                reason = "a shell is PID 1: it passes no signal on and reaps for nobody"
                yield Hit(place, reason, "write the program and its arguments as a list")
        if workload.is_worker:
            yield from _grace(workload)


def _grace(workload: Workload) -> Iterator[Hit]:
    grace = workload.spec.at("terminationGracePeriodSeconds")
    flush = quantity(workload.annotations.get(FLUSH_SECONDS, "")) or Fraction(30)
    needed = flush + FLUSH_MARGIN_S
    if grace.number is None:
        reason = "the default of 30 s is short for a step and its checkpoint"
        yield Hit(grace, reason, f"set {plain(max(needed, Fraction(100)))}")
    elif grace.number < needed:
        reason = f"{grace.number} s are less than a flush of {plain(flush)} s and a margin of 15 s"
        yield Hit(grace, reason, f"set {plain(needed)} or more")
    elif grace.number > GRACE_MAX_S:
        reason = f"a node that shuts down, or is taken back, gives 120 s, not {grace.number}"
        yield Hit(grace, reason, f"set at most {GRACE_MAX_S}")


def probes(scene: Scene) -> Iterator[Hit]:
    """Probes ask the agent whether it lives; a slow step is no reason to kill a pod."""
    for workload in scene.training:
        for container in workload.all_containers:
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                probe = container.at(kind)
                if probe.exists:
                    yield from _probe(container, probe, kind)
            yield from _liveness(container)


def _probe(container: Node, probe: Node, kind: str) -> Iterator[Hit]:
    if probe.at("exec").exists:
        reason = "a command starts in the container each time, and fails when memory is short"
        yield Hit(probe.at("exec"), reason, "ask the agent's own port by httpGet")
        return
    path = probe.at("httpGet", "path")
    if kind != "startupProbe" and _PROGRESS.search(path.text):
        reason = f"{path.text} depends on the training's progress"
        yield Hit(path, reason, "ask whether the agent answers: /livez or /healthz")
    named = {port.at("name").text for port in container.at("ports").items}
    for port in (probe.at("httpGet", "port"), probe.at("tcpSocket", "port")):
        if port.exists and port.text not in named - {""}:
            reason = f"{port.value} is no named port of this container"
            yield Hit(port, reason, "name the port in ports, and use the name here")


def _liveness(container: Node) -> Iterator[Hit]:
    probe = container.at("livenessProbe")
    if not probe.exists:
        return
    period = probe.at("periodSeconds").number or 10
    threshold = probe.at("failureThreshold").number or 3
    if period * threshold < LIVENESS_MIN_S:
        reason = f"{period * threshold} s without an answer kill all ranks of the node"
        fix = f"make periodSeconds x failureThreshold {LIVENESS_MIN_S} or more"
        yield Hit(probe, reason, fix)
    if not container.at("startupProbe").exists:
        reason = "liveness counts from the start, while imports and images are still loading"
        yield Hit(container.at("startupProbe"), reason, "add a startupProbe on the same port")
