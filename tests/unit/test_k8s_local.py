"""The pods' machine: what is made, started, ended and replaced, and when the whole is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from stepfast.errors import ConfigError
from stepfast.k8s.local import environment, machine
from stepfast.k8s.local.life import (
    AskProbe,
    ContainerEnded,
    EndRun,
    MakePod,
    Order,
    PodDeleted,
    ProbeAnswered,
    RemovePod,
    Say,
    SignalContainer,
    StartContainer,
    StopAsked,
    Tick,
)
from stepfast.k8s.local.reading import read_workload

T = TypeVar("T")

BASE_S = 10.0
GRACE_S = 100.0
JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: run, namespace: training}
spec:
  successPolicy: {operator: All, targetReplicatedJobs: [node]}
  failurePolicy:
    maxRestarts: 1
    rules:
    - {action: FailJobSet, onJobFailureReasons: [PodFailurePolicy],
       onJobFailureMessagePatterns: ["exit code 78 "]}
  replicatedJobs:
  - name: coord
    replicas: 1
    template: {spec: {completionMode: Indexed, completions: 1, parallelism: 1,
      backoffLimitPerIndex: 3, template: {spec: {restartPolicy: Never, containers: [
        {name: coordinator, command: [stepfast, coordinator]}]}}}}
  - name: node
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: 2
        parallelism: 2
        backoffLimitPerIndex: 1
        maxFailedIndexes: 0
        podFailurePolicy:
          rules:
          - {action: FailJob, onExitCodes: {containerName: node, operator: In, values: [78]}}
          - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
        template:
          metadata: {labels: {role: agent}}
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 100
            containers:
            - name: node
              command: [stepfast, agent, "--node=$(JOB_COMPLETION_INDEX)", "--host=$(POD_IP)"]
              args: ["--listen=0.0.0.0:7070", "$$(NO)", "$(UNKNOWN)"]
              env:
              - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
              - {name: ROLE, valueFrom: {fieldRef: {fieldPath: "metadata.labels['role']"}}}
              - {name: TOKEN, valueFrom: {secretKeyRef: {name: run-token, key: token}}}
              ports: [{name: http, containerPort: 7071}]
              startupProbe: {tcpSocket: {port: 7071}, periodSeconds: 1, failureThreshold: 5}
              livenessProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 10,
                              failureThreshold: 2}
              restartPolicy: Never
              restartPolicyRules:
              - {action: Restart, exitCodes: {operator: NotIn, values: [0, 78, 85]}}
"""
NODES = ("run-node-0-0", "run-node-0-1")
COORDINATOR = "run-coord-0-0"


class Bench:
    """The machine, a clock set by hand, and every order so far."""

    def __init__(self, manifest: str = JOBSET) -> None:
        self.workload = read_workload("job.yaml", manifest.encode())
        self.run = machine.first_run(self.workload, base_delay_s=BASE_S)
        self.now = 0.0
        self.orders: list[Order] = []
        self.last: tuple[Order, ...] = ()

    def feed(self, given: Any, after_s: float = 0.0) -> tuple[Order, ...]:
        self.now += after_s
        self.run, self.last = machine.step(self.run, given, self.now)
        self.orders += self.last
        return self.last

    def start(self) -> Bench:
        self.feed(Tick())
        return self

    def pod(self, hostname: str) -> Any:
        (found,) = [p for p in self.run.pods.values() if p.hostname == hostname]
        return found

    def end(self, hostname: str, code: int, container: str = "") -> tuple[Order, ...]:
        pod = self.pod(hostname)
        container = container or next(iter(pod.containers))
        restarts = pod.containers[container].restarts
        return self.feed(ContainerEnded(pod.name, container, restarts, code))

    def answer(self, hostname: str, probe: str, *, is_ok: bool) -> tuple[Order, ...]:
        pod = self.pod(hostname)
        restarts = pod.containers["node"].restarts
        return self.feed(ProbeAnswered(pod.name, "node", restarts, probe, is_ok, "words"))


def of(kind: type[T], orders: Iterable[Order]) -> list[T]:
    return [order for order in orders if isinstance(order, kind)]


def test_every_index_gets_a_pod_and_every_container_starts() -> None:
    bench = Bench().start()
    assert [o.pod.hostname for o in of(MakePod, bench.orders)] == [COORDINATOR, *NODES]
    assert len(of(StartContainer, bench.orders)) == 3
    assert not bench.feed(Tick(), 1.0)[3:], "once"


@pytest.mark.parametrize("code", [1, 137, 143])
def test_a_container_restarts_in_its_pod_by_its_rule(code: int) -> None:
    bench = Bench().start()
    name = bench.pod(NODES[0]).name
    (again,) = of(StartContainer, bench.end(NODES[0], code))
    assert (again.pod.name, again.restarts) == (name, 1)
    assert not of(RemovePod, bench.orders)


def test_restarts_come_later_and_later_until_a_container_has_run_for_long() -> None:
    bench = Bench().start()
    waits = []
    for ran_s in (1.0, 1.0, 1.0, 700.0):
        bench.now += ran_s
        bench.end(NODES[0], 1)
        began = bench.now
        while not [o for o in of(StartContainer, bench.last) if o.pod.hostname == NODES[0]]:
            bench.feed(Tick(), 1.0)
        waits.append(bench.now - began)
    assert waits == pytest.approx([0.0, BASE_S, 2 * BASE_S, 0.0], abs=1.0)


def test_an_end_that_was_told_twice_or_late_is_nothing() -> None:
    bench = Bench().start()
    pod = bench.pod(NODES[0])
    bench.feed(ContainerEnded(pod.name, "node", 0, 1))
    bench.feed(Tick())
    before = bench.run
    bench.feed(ContainerEnded(pod.name, "node", 0, 78))
    bench.feed(ContainerEnded("a-pod-of-before", "node", 0, 1))
    assert bench.run == before


def test_the_users_error_fails_the_set_and_everything_ends() -> None:
    bench = Bench().start()
    bench.end(NODES[0], 78)
    told = {o.pod for o in of(SignalContainer, bench.orders) if not o.is_kill}
    assert told == {bench.pod(COORDINATOR).name, bench.pod(NODES[1]).name}
    bench.end(COORDINATOR, 143)
    (end,) = of(EndRun, bench.end(NODES[1], 1))
    assert end.exit_code == 1 and "exit code 78" in end.reason


def test_an_unfit_nodes_pod_is_counted_and_replaced_later() -> None:
    bench = Bench().start()
    bench.end(NODES[0], 85)
    assert len(of(RemovePod, bench.orders)) == 1
    assert not of(MakePod, bench.feed(Tick(), BASE_S - 1))
    (made,) = of(MakePod, bench.feed(Tick(), 2.0))
    assert made.pod.hostname == NODES[0] and made.pod.number == 4


def test_an_index_that_fails_too_often_restarts_the_set_and_then_fails_it() -> None:
    bench = Bench().start()
    for _ in range(2):
        for _ in range(2):
            bench.end(NODES[0], 85)
            bench.feed(Tick(), 100.0)
        bench.end(COORDINATOR, 143)
        bench.end(NODES[1], 143)
    attempts = {o.pod.attempt for o in of(MakePod, bench.orders)}
    assert attempts == {0, 1}
    (end,) = of(EndRun, bench.orders)
    assert "maxRestarts 1 are over" in end.reason


@pytest.mark.parametrize("is_disrupted", [True, False])
def test_a_deleted_pod_ends_within_its_grace_and_its_index_gets_another(is_disrupted: bool) -> None:
    bench = Bench().start()
    name = bench.pod(NODES[1]).name
    bench.feed(PodDeleted(name, is_disrupted=is_disrupted))
    assert of(SignalContainer, bench.last) == [SignalContainer(name, "node", is_kill=False)]
    assert not of(SignalContainer, bench.feed(Tick(), GRACE_S - 1))
    assert of(SignalContainer, bench.feed(Tick(), 2.0)) == [
        SignalContainer(name, "node", is_kill=True)
    ]
    bench.end(NODES[1], 137)
    index = bench.run.indexes["run-node-0", 1]
    assert (index.failures, index.ignored) == ((0, 1) if is_disrupted else (1, 0))
    (made,) = of(MakePod, bench.feed(Tick(), BASE_S + 1))
    assert made.pod.name != name
    names = [o.pod.hostname for o in of(MakePod, bench.orders)]
    assert names.count(NODES[1]) == 2, "never two of them at once"


def test_a_lost_pod_is_not_asked() -> None:
    bench = Bench().start()
    name = bench.pod(NODES[1]).name
    bench.feed(PodDeleted(name, is_lost=True))
    bench.feed(Tick())
    assert of(SignalContainer, bench.orders) == [SignalContainer(name, "node", is_kill=True)]


def test_the_set_is_done_when_its_nodes_are_and_the_coordinator_is_ended() -> None:
    bench = Bench().start()
    bench.end(NODES[0], 0)
    assert not of(SignalContainer, bench.orders)
    bench.end(NODES[1], 0)
    assert [o.pod for o in of(SignalContainer, bench.last)] == [bench.pod(COORDINATOR).name]
    (end,) = of(EndRun, bench.end(COORDINATOR, 143))
    assert end.exit_code == 0
    assert not bench.run.pods


def test_a_liveness_probe_ends_the_container_and_only_once_it_has_started() -> None:
    bench = Bench().start()
    assert {o.probe for o in of(AskProbe, bench.feed(Tick(), 1.0))} == {"startup"}
    bench.answer(NODES[0], "startup", is_ok=True)
    assert {o.probe for o in of(AskProbe, bench.last)} == {"liveness"}
    bench.answer(NODES[0], "liveness", is_ok=False)
    assert not of(SignalContainer, bench.last)
    bench.feed(Tick(), 10.0)
    bench.answer(NODES[0], "liveness", is_ok=False)
    assert of(SignalContainer, bench.last) == [
        SignalContainer(bench.pod(NODES[0]).name, "node", is_kill=False)
    ]
    assert any("liveness probe failed 2 times: words" in o.text for o in of(Say, bench.last))
    assert of(StartContainer, bench.end(NODES[0], 143))


def test_a_stop_ends_all_in_order_and_a_second_one_at_once() -> None:
    bench = Bench().start()
    bench.feed(StopAsked(130))
    assert [o.is_kill for o in of(SignalContainer, bench.orders)] == [False] * 3
    bench.feed(StopAsked(130))
    bench.feed(Tick())
    assert [o.is_kill for o in of(SignalContainer, bench.orders)] == [False] * 3 + [True] * 3
    for hostname in (COORDINATOR, *NODES):
        bench.end(hostname, 137)
    (end,) = of(EndRun, bench.orders)
    assert end.exit_code == 130


def test_without_rules_the_pod_restarts_its_container_and_the_job_counts() -> None:
    manifest = """
apiVersion: batch/v1
kind: Job
metadata: {name: run}
spec: {completionMode: Indexed, completions: 1, parallelism: 1, backoffLimit: 1, template: {spec: {
  restartPolicy: OnFailure, subdomain: run, containers: [{name: node, command: [train]}]}}}
"""
    bench = Bench(manifest).start()
    bench.end("run-0", 78)
    bench.feed(Tick())
    bench.end("run-0", 1)
    assert any("BackoffLimitExceeded" in o.text for o in of(Say, bench.orders))


def test_environment_and_command_are_what_kubelet_makes_of_them() -> None:
    bench = Bench().start()
    pod = bench.pod(NODES[1])
    container = bench.workload.job(pod.job).pod.container("node")
    known = environment.variables(
        bench.workload, pod, container, "127.1.2.3", lambda name, key: f"{name}/{key}"
    )
    assert known["TOKEN"] == "run-token/token"
    assert (known["ROLE"], known["POD_IP"], known["JOB_COMPLETION_INDEX"]) == (
        "agent",
        "127.1.2.3",
        "1",
    )
    assert environment.command(container, known, "127.1.2.3") == [
        *("stepfast", "agent", "--node=1", "--host=127.1.2.3"),
        *("--listen=127.1.2.3:7070", "$(NO)", "$(UNKNOWN)"),
    ]
    assert "run-node-0-1.run.training.svc.cluster.local" in environment.names_of(
        bench.workload, pod
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("restartPolicy: Never, containers", "initContainers: [{name: a}], containers"), "init"),
        (("tcpSocket: {port: 7071}", "grpc: {port: 7071}"), "probes are known here"),
        (("port: http", "port: web"), "no port of the container is called 'web'"),
        (("command: [stepfast, coordinator]", "image: x"), "command"),
        (("completionMode: Indexed, completions: 1", "completions: 1"), "only Indexed"),
        (("kind: JobSet", "kind: TrainJob"), "render with --kind jobset"),
        (("kind: JobSet", "kind: Deployment"), "must have one JobSet"),
    ],
)
def test_what_would_mean_something_else_here_is_refused(change: tuple[str, str], said: str) -> None:
    assert change[0] in JOBSET
    with pytest.raises(ConfigError, match=said):
        Bench(JOBSET.replace(*change))
