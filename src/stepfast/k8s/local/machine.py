"""The life of a manifest's pods: `step(run, given, now) -> (run, orders)`.

Owns: when pods are made, started, probed, ended and replaced; when the whole is over. Does not own:
the judgements (`rules`), processes, mounts, clocks (`cluster`). Pure.
Invariants: never two pods of one index; a pod that leaves is killed when its grace is over; what
has ended is reported once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stepfast.k8s.local import probing
from stepfast.k8s.local.life import (
    ContainerEnded,
    ContainerState,
    ContainerStatus,
    EndRun,
    Given,
    Index,
    MakePod,
    Order,
    Pod,
    PodDeleted,
    ProbeAnswered,
    RemovePod,
    Run,
    SignalContainer,
    StartContainer,
    StopAsked,
    Tick,
)
from stepfast.k8s.local.model import Job, Workload
from stepfast.k8s.local.rules import (
    CALM_S,
    container_delay_s,
    judge_job,
    judge_pod,
    pod_delay_s,
    restarts,
)
from stepfast.k8s.local.turn import Turn

EXIT_FAILED = 1
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def first_run(workload: Workload, *, base_delay_s: float) -> Run:
    """Before anything was made."""
    indexes = {(job.name, i): Index() for job in workload.jobs for i in range(job.completions)}
    return Run(workload=workload, base_delay_s=base_delay_s, indexes=indexes)


def step(run: Run, given: Given, now: float) -> tuple[Run, tuple[Order, ...]]:
    """One step. `now` is monotonic seconds."""
    turn = Turn(run, now)
    match given:
        case ContainerEnded():
            _container_ended(turn, given)
        case ProbeAnswered():
            probing.answered(turn, given)
        case PodDeleted():
            _pod_deleted(turn, given)
        case StopAsked(exit_code):
            if turn.run.ending is not None:
                _kill_everything(turn)
            else:
                _end(turn, exit_code, "stopped")
        case Tick():
            pass
    _advance(turn)
    return turn.run, tuple(turn.orders)


# --- inputs --------------------------------------------------------------------------------------


def _container_ended(turn: Turn, given: ContainerEnded) -> None:
    pod = turn.run.pods.get(given.pod)
    if pod is None:
        return
    state = pod.containers[given.container]
    if state.status is not ContainerStatus.RUNNING or state.restarts != given.restarts:
        return
    job = turn.run.workload.job(pod.job)
    container = job.pod.container(given.container)
    ended = f"{given.container} of {pod.hostname} ended with {given.exit_code}"
    why = None if pod.is_leaving else restarts(job.pod, container, given.exit_code)
    if why is None:
        done = replace(state, status=ContainerStatus.ENDED, exit_code=given.exit_code, kill_at=None)
        turn.set_container(pod.name, given.container, done)
        turn.say(ended)
        return
    ran_s = turn.now - state.began_at
    quick = 0 if ran_s > CALM_S else state.quick_restarts
    delay_s = container_delay_s(quick, turn.run.base_delay_s)
    turn.set_container(
        pod.name,
        given.container,
        ContainerState(
            restarts=state.restarts + 1, quick_restarts=quick + 1, start_at=turn.now + delay_s
        ),
    )
    counts = turn.run.container_restarts
    turn.update(container_restarts={**counts, pod.job: counts.get(pod.job, 0) + 1})
    turn.say(f"{ended}: started again by {why}, {_when(delay_s)}")
    total = turn.run.container_restarts[pod.job]
    # Where pods restart containers themselves, the job counts those restarts.
    if why == "restartPolicy OnFailure" and job.index_limit is None and total > job.backoff_limit:
        _fail_job(turn, job, "BackoffLimitExceeded", f"{total} restarts of containers")


def _pod_deleted(turn: Turn, given: PodDeleted) -> None:
    pod = turn.run.pods.get(given.pod)
    if pod is None:
        return
    how = "lost" if given.is_lost else "evicted" if given.is_disrupted else "deleted"
    turn.say(f"pod {pod.name} is {how}")
    turn.set_pod(replace(pod, is_disrupted=given.is_disrupted or given.is_lost))
    _let_go(turn, pod.name, grace_s=0.0 if given.is_lost else None)


# --- pods ----------------------------------------------------------------------------------------


def _let_go(turn: Turn, name: str, *, grace_s: float | None = None) -> None:
    """End a pod's containers: in order within its grace; `grace_s` 0: at once."""
    pod = turn.run.pods[name]
    if pod.is_leaving and grace_s is None:
        return
    grace_s = turn.run.workload.job(pod.job).pod.grace_s if grace_s is None else grace_s
    turn.set_pod(replace(pod, is_leaving=True))
    for container, state in pod.containers.items():
        if state.status is ContainerStatus.WAITING:
            turn.set_container(name, container, replace(state, status=ContainerStatus.ENDED))
        elif state.status is ContainerStatus.RUNNING:
            turn.set_container(name, container, replace(state, kill_at=turn.now + grace_s))
            if grace_s > 0:
                turn.emit(SignalContainer(name, container, is_kill=False))


def _kill_everything(turn: Turn) -> None:
    for name in list(turn.run.pods):
        _let_go(turn, name, grace_s=0.0)


def _advance(turn: Turn) -> None:
    if turn.run.is_over:
        return
    for name in list(turn.run.pods):
        _advance_pod(turn, name)
    if turn.run.ending is None and not turn.run.is_restarting:
        _judge_success(turn)
    if turn.run.ending is not None or turn.run.is_restarting:
        for name in list(turn.run.pods):
            _let_go(turn, name)
        if not turn.run.pods:
            _all_gone(turn)
        return
    for job in turn.run.workload.jobs:
        _make_pods(turn, job)


def _advance_pod(turn: Turn, name: str) -> None:
    pod = turn.run.pods[name]
    for container, state in pod.containers.items():
        if state.status is ContainerStatus.WAITING and turn.now >= state.start_at:
            _start(turn, pod, container, state)
        elif state.kill_at is not None and turn.now >= state.kill_at:
            turn.set_container(name, container, replace(state, kill_at=None))
            turn.emit(SignalContainer(name, container, is_kill=True))
        elif state.status is ContainerStatus.RUNNING and state.kill_at is None:
            probing.ask_due(turn, pod, container)
    pod = turn.run.pods[name]
    if all(state.status is ContainerStatus.ENDED for state in pod.containers.values()):
        _settle(turn, pod)


def _start(turn: Turn, pod: Pod, name: str, state: ContainerState) -> None:
    container = turn.run.workload.job(pod.job).pod.container(name)
    running = replace(state, status=ContainerStatus.RUNNING, began_at=turn.now)
    turn.set_container(pod.name, name, probing.begun(container, running, turn.now))
    turn.emit(StartContainer(pod, name, state.restarts))


def _settle(turn: Turn, pod: Pod) -> None:
    """The pod has ended: what that is for its index, and for its job."""
    turn.remove_pod(pod.name)
    turn.emit(RemovePod(pod))
    codes = {n: c.exit_code for n, c in pod.containers.items() if c.exit_code is not None}
    index = turn.run.indexes[pod.job, pod.index]
    job = turn.run.workload.job(pod.job)
    if len(codes) == len(pod.containers) and not any(codes.values()):
        turn.set_index(pod, replace(index, is_done=True))
        return
    if turn.run.ending is not None or turn.run.is_restarting or pod.job in turn.run.failed_jobs:
        return
    full_name = f"{turn.run.workload.namespace}/{pod.name}"
    verdict = judge_pod(job, full_name, codes, is_disrupted=pod.is_disrupted)
    if verdict.action == "FailJob":
        _fail_job(turn, job, "PodFailurePolicy", verdict.reason)
        return
    is_ignored = verdict.action == "Ignore"
    index = replace(
        index, failures=index.failures + (not is_ignored), ignored=index.ignored + is_ignored
    )
    limit = job.index_limit
    is_failed = verdict.action == "FailIndex" or (limit is not None and index.failures > limit)
    delay_s = pod_delay_s(index.failures + index.ignored, turn.run.base_delay_s)
    index = replace(index, create_at=turn.now + delay_s, is_failed=is_failed)
    turn.set_index(pod, index)
    if is_failed:
        turn.say(f"index {pod.index} of {job.name} has failed: {verdict.reason}")
    else:
        what = "replaced"
        turn.say(f"pod {pod.name} is {what} {_when(delay_s)} ({verdict.action}: {verdict.reason})")
    _judge_indexes(turn, job)


def _judge_indexes(turn: Turn, job: Job) -> None:
    mine = [index for (name, _), index in turn.run.indexes.items() if name == job.name]
    failed = sum(index.is_failed for index in mine)
    if job.failed_indexes_max is not None and failed > job.failed_indexes_max:
        _fail_job(turn, job, "MaxFailedIndexesExceeded", f"{failed} indexes have failed")
    elif failed and all(index.is_failed or index.is_done for index in mine):
        _fail_job(turn, job, "FailedIndexes", f"{failed} indexes have failed")
    elif job.index_limit is None:
        failures = sum(index.failures for index in mine)
        if failures > job.backoff_limit:
            _fail_job(turn, job, "BackoffLimitExceeded", f"{failures} pods have failed")


def _make_pods(turn: Turn, job: Job) -> None:
    if job.name in turn.run.failed_jobs:
        return
    active = {pod.index for pod in turn.run.pods.values() if pod.job == job.name}
    for number in range(job.completions):
        index = turn.run.indexes[job.name, number]
        is_wanted = not (index.is_done or index.is_failed or number in active)
        if is_wanted and turn.now >= index.create_at and len(active) < job.parallelism:
            active.add(number)
            _make_pod(turn, job, number)


def _make_pod(turn: Turn, job: Job, index: int) -> None:
    number = turn.run.pods_made + 1
    hostname = f"{job.name}-{index}"
    pod = Pod(
        name=f"{hostname}-{_suffix(number)}",
        hostname=hostname,
        job=job.name,
        index=index,
        number=number,
        attempt=turn.run.attempt,
        containers={container.name: ContainerState() for container in job.pod.containers},
    )
    turn.update(pods_made=number)
    turn.set_pod(pod)
    turn.emit(MakePod(pod))
    for container, state in pod.containers.items():
        _start(turn, pod, container, state)


def _suffix(number: int) -> str:
    letters = ""
    for _ in range(5):
        number, rest = divmod(number, len(_LETTERS))
        letters = _LETTERS[rest] + letters
    return letters


# --- the whole -----------------------------------------------------------------------------------


def _fail_job(turn: Turn, job: Job, reason: str, message: str) -> None:
    run = turn.run
    if run.ending is not None or run.is_restarting or job.name in run.failed_jobs:
        return
    turn.update(failed_jobs=run.failed_jobs | {job.name})
    turn.say(f"job {job.name} has failed: {reason}: {message}")
    if not run.workload.is_set:
        _end(turn, EXIT_FAILED, f"job {job.name} has failed: {reason}: {message}")
        return
    verdict = judge_job(run.workload, job, reason, message)
    counted = run.counted_attempts + verdict.is_counted
    if verdict.action == "FailJobSet":
        _end(turn, EXIT_FAILED, f"the JobSet has failed: {message} ({verdict.reason})")
    elif run.workload.restarts_max is not None and counted > run.workload.restarts_max:
        limit = run.workload.restarts_max
        _end(turn, EXIT_FAILED, f"the JobSet has failed: {message} (maxRestarts {limit} are over)")
    else:
        turn.update(is_restarting=True, counted_attempts=counted)
        turn.say(f"all jobs are restarted ({verdict.reason})")


def _judge_success(turn: Turn) -> None:
    workload = turn.run.workload
    wanted = [
        j for j in workload.jobs if not workload.success_of or j.replicated in workload.success_of
    ]
    done = [job.name for job in wanted if _is_complete(turn.run.indexes, job)]
    if len(done) == len(wanted) or (workload.is_any_enough and done):
        _end(turn, 0, "finished")


def _is_complete(indexes: Mapping[tuple[str, int], Index], job: Job) -> bool:
    return all(indexes[job.name, number].is_done for number in range(job.completions))


def _end(turn: Turn, exit_code: int, reason: str) -> None:
    if turn.run.ending is None:
        turn.update(ending=(exit_code, reason))


def _all_gone(turn: Turn) -> None:
    run = turn.run
    if run.ending is not None:
        turn.update(is_over=True)
        turn.emit(EndRun(*run.ending))
        return
    fresh = first_run(run.workload, base_delay_s=run.base_delay_s)
    turn.run = replace(
        fresh,
        pods_made=run.pods_made,
        attempt=run.attempt + 1,
        counted_attempts=run.counted_attempts,
    )
    for job in run.workload.jobs:
        _make_pods(turn, job)


def _when(delay_s: float) -> str:
    return "at once" if delay_s == 0 else f"in {delay_s:g} s"
