"""Probes of running containers: when to look, and what follows.

Works on a `Turn` of the pods' machine. Owns: thresholds. Does not own: the looking (`looking`).
Invariant: until a startup probe has succeeded nothing else is asked; only startup and liveness end
a container.
"""

from __future__ import annotations

from dataclasses import replace

from stepfast.k8s.local.life import (
    AskProbe,
    ContainerState,
    ContainerStatus,
    Pod,
    ProbeAnswered,
    ProbeState,
    SignalContainer,
)
from stepfast.k8s.local.model import Container, Probe
from stepfast.k8s.local.turn import Turn

STARTUP, LIVENESS, READINESS = "startup", "liveness", "readiness"


def begun(container: Container, state: ContainerState, now: float) -> ContainerState:
    """A container that starts now, with its probes ahead."""
    probes = {n: ProbeState(next_at=now + p.delay_s) for n, p in container.probes.items()}
    return replace(
        state,
        probes=probes,
        is_started=STARTUP not in probes,
        is_ready=READINESS not in probes,
    )


def ask_due(turn: Turn, pod: Pod, name: str) -> None:
    """Order the looks that are due."""
    state = turn.run.pods[pod.name].containers[name]
    for probe, asked in state.probes.items():
        is_wanted = (probe == STARTUP) is not state.is_started
        if is_wanted and not asked.is_asked and turn.now >= asked.next_at:
            _set(turn, pod.name, name, probe, replace(asked, is_asked=True))
            turn.emit(AskProbe(pod, name, state.restarts, probe))


def answered(turn: Turn, given: ProbeAnswered) -> None:
    """Count the answer; at a threshold the container is ready, or not, or must end."""
    pod = turn.run.pods.get(given.pod)
    state = None if pod is None else pod.containers[given.container]
    if pod is None or state is None or state.restarts != given.restarts:
        return
    if state.status is not ContainerStatus.RUNNING or given.probe not in state.probes:
        return
    job = turn.run.workload.job(pod.job)
    probe = job.pod.container(given.container).probes[given.probe]
    before = state.probes[given.probe]
    counted = replace(
        before,
        is_asked=False,
        next_at=turn.now + probe.period_s,
        failures=0 if given.is_ok else before.failures + 1,
        successes=before.successes + 1 if given.is_ok else 0,
    )
    _set(turn, pod.name, given.container, given.probe, counted)
    if counted.successes >= probe.successes_min:
        _passed(turn, pod, given)
    elif counted.failures >= probe.failures_max:
        _failed(turn, pod, given, probe, job.pod.grace_s)


def _passed(turn: Turn, pod: Pod, given: ProbeAnswered) -> None:
    state = turn.run.pods[pod.name].containers[given.container]
    if given.probe == STARTUP:
        turn.set_container(pod.name, given.container, replace(state, is_started=True))
    elif given.probe == READINESS and not state.is_ready:
        turn.set_container(pod.name, given.container, replace(state, is_ready=True))
        turn.say(f"{given.container} of {pod.hostname} is ready")


def _failed(turn: Turn, pod: Pod, given: ProbeAnswered, probe: Probe, grace_s: float) -> None:
    state = turn.run.pods[pod.name].containers[given.container]
    what = f"{given.container} of {pod.hostname}"
    if given.probe == READINESS:
        if state.is_ready:
            turn.set_container(pod.name, given.container, replace(state, is_ready=False))
            turn.say(f"{what} is not ready: {given.words}")
        return
    if state.kill_at is not None:
        return
    times = f"{probe.failures_max} times"
    turn.say(f"{what} is ended: its {given.probe} probe failed {times}: {given.words}")
    turn.set_container(pod.name, given.container, replace(state, kill_at=turn.now + grace_s))
    turn.emit(SignalContainer(pod.name, given.container, is_kill=False))


def _set(turn: Turn, pod: str, container: str, probe: str, state: ProbeState) -> None:
    before = turn.run.pods[pod].containers[container]
    after = replace(before, probes={**before.probes, probe: state})
    turn.set_container(pod, container, after)
