"""How Kubernetes judges the end of containers, pods and jobs.

Owns: restart policies and rules, delays, podFailurePolicy, backoff limits, JobSet's failurePolicy.
Does not own: the order of things (`machine`). Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stepfast.k8s.local.model import Container, Job, PodTemplate, SetRule, Workload

CONTAINER_DELAY_MAX_S = 300.0
POD_DELAY_MAX_S = 600.0
CALM_S = 600.0  # a container that ran so long is restarted at once again


def restarts(pod: PodTemplate, container: Container, code: int) -> str | None:
    """Why a container that ended with this code starts again in its pod; None: it does not."""
    for number, rule in enumerate(container.restarts_on):
        if rule.match(code):
            return f"restart rule {number}"
    policy = container.restart_policy or pod.restart_policy
    if policy == "Always" or (policy == "OnFailure" and code != 0):
        return f"restartPolicy {policy}"
    return None


def container_delay_s(restarts_before: int, base_s: float) -> float:
    """The first restart is at once, each further one twice as late."""
    if restarts_before == 0:
        return 0.0
    return min(base_s * 2.0 ** min(restarts_before - 1, 16), CONTAINER_DELAY_MAX_S)


def pod_delay_s(failures: int, base_s: float) -> float:
    """Before an index that failed so often, ignored failures included, gets another pod."""
    if failures == 0:
        return 0.0
    return min(base_s * 2.0 ** min(failures - 1, 16), POD_DELAY_MAX_S)


@dataclass(frozen=True, slots=True)
class PodVerdict:
    """What a pod's failure is for its job: Count, Ignore, FailIndex or FailJob."""

    action: str
    reason: str


def judge_pod(job: Job, pod: str, codes: Mapping[str, int], *, is_disrupted: bool) -> PodVerdict:
    """By the first rule that fits; `codes` are those with which its containers ended."""
    for number, rule in enumerate(job.rules):
        if rule.exits is None:
            if is_disrupted:
                return PodVerdict(rule.action, f"{rule.action} rule at index {number}: disrupted")
            continue
        for name, code in sorted(codes.items()):
            is_meant = not rule.container or rule.container == name
            if code != 0 and is_meant and rule.exits.match(code):
                reason = (
                    f"Container {name} for pod {pod} failed with exit code {code} matching"
                    f" {rule.action} rule at index {number}"
                )
                return PodVerdict(rule.action, reason)
    ends = ", ".join(f"{name} with {code}" for name, code in sorted(codes.items()) if code != 0)
    return PodVerdict("Count", f"failed: {ends or 'deleted'}")


@dataclass(frozen=True, slots=True)
class SetVerdict:
    """FailJobSet or RestartJobSet; whether the restart is counted."""

    action: str
    is_counted: bool
    reason: str


def judge_job(workload: Workload, job: Job, reason: str, message: str) -> SetVerdict:
    """What the failure of a job is for the JobSet: the first rule that fits, else a restart."""
    if workload.restarts_max is None:
        return SetVerdict("FailJobSet", False, "there is no failurePolicy")
    for number, rule in enumerate(workload.rules):
        if _fits(rule, job, reason, message):
            action = "FailJobSet" if rule.action == "FailJobSet" else "RestartJobSet"
            is_counted = not rule.action.endswith("AndIgnoreMaxRestarts")
            return SetVerdict(action, is_counted, f"{rule.action} by failurePolicy rule {number}")
    return SetVerdict("RestartJobSet", True, "no rule of the failurePolicy fits")


def _fits(rule: SetRule, job: Job, reason: str, message: str) -> bool:
    if rule.targets and job.replicated not in rule.targets:
        return False
    if rule.reasons and reason not in rule.reasons:
        return False
    return not rule.patterns or any(re.search(pattern, message) for pattern in rule.patterns)
