"""What an API server refuses beyond its schema, for Jobs and their pods.

Owns: rule `job-admission`, from the API reference of batch/v1 and core/v1. Does not own: what is
allowed and unwise.
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.k8s.validate.documents import Node
from stepfast.k8s.validate.quantities import quantity
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import Workload

POLICY_RULES_MAX = 20
EXIT_CODES_MAX = 255
RESTART_RULES_MAX = 20
FAILURE_ACTIONS = {"FailJob", "FailIndex", "Ignore", "Count"}


def job_admission(scene: Scene) -> Iterator[Hit]:
    """batch/v1 accepts the Job, and core/v1 its pods."""
    for workload in scene.workloads:
        yield from _pod(workload)
        if workload.job.exists:
            yield from _job(workload)
            yield from _failure_policy(workload)


def _job(workload: Workload) -> Iterator[Hit]:
    job = workload.job
    policy = workload.spec.at("restartPolicy")
    is_indexed = job.at("completionMode").text == "Indexed" or (
        bool(workload.operator) and not job.at("completionMode").exists
    )
    is_never = policy.text == "Never"
    if policy.text not in ("Never", "OnFailure") and (policy.exists or not workload.operator):
        reason = f"a Job's pods cannot have the restartPolicy {policy.text or 'Always (default)'}"
        yield Hit(policy, reason, "set Never or OnFailure")
    per_index = job.at("backoffLimitPerIndex")
    if per_index.exists and not (is_indexed and is_never):
        reason = "it needs completionMode Indexed and restartPolicy Never"
        yield Hit(per_index, reason, "set both, or remove it")
    failed = job.at("maxFailedIndexes")
    if failed.exists and not per_index.exists:
        yield Hit(failed, "it needs backoffLimitPerIndex", "set it, or remove this")
    completions = job.at("completions").number
    if failed.number is not None and completions is not None and failed.number > completions:
        yield Hit(failed, "more than there are indexes", f"set at most {completions}")
    if is_indexed and not workload.operator and completions is None:
        yield Hit(job.at("completions"), "an Indexed Job needs completions", "set the nodes")
    replacement = job.at("podReplacementPolicy")
    if job.at("podFailurePolicy").exists:
        if not is_never:
            reason = "it needs the pods' restartPolicy Never"
            yield Hit(job.at("podFailurePolicy"), reason, "set Never, or remove it")
        if replacement.exists and replacement.text != "Failed":
            yield Hit(replacement, "with a podFailurePolicy it has to be Failed", "set Failed")


def _failure_policy(workload: Workload) -> Iterator[Hit]:
    rules = workload.job.at("podFailurePolicy", "rules")
    if len(rules.items) > POLICY_RULES_MAX:
        yield Hit(rules, f"more than {POLICY_RULES_MAX} rules", "join some")
    for rule in rules.items:
        action = rule.at("action")
        if action.text not in FAILURE_ACTIONS:
            reason = f"no action is called {action.value}"
            yield Hit(action, reason, f"use one of {', '.join(sorted(FAILURE_ACTIONS))}")
        if action.text == "FailIndex" and not workload.job.at("backoffLimitPerIndex").exists:
            yield Hit(action, "it needs backoffLimitPerIndex", "set it, or use FailJob")
        has_codes, has_conditions = (
            rule.at("onExitCodes").exists,
            bool(rule.at("onPodConditions").items),
        )
        if has_codes == has_conditions:
            reason = "a rule has either onExitCodes or onPodConditions"
            yield Hit(rule, reason, "write one of them")
        if has_codes:
            yield from _codes(rule.at("onExitCodes"))


def _codes(requirement: Node) -> Iterator[Hit]:
    operator, values = requirement.at("operator"), requirement.at("values")
    if operator.text not in ("In", "NotIn"):
        yield Hit(operator, f"{operator.value} is no operator", "use In or NotIn")
    numbers = [item.number for item in values.items if item.number is not None]
    if not 1 <= len(values.items) <= EXIT_CODES_MAX:
        yield Hit(values, f"between 1 and {EXIT_CODES_MAX} exit codes are needed", "name them")
    if operator.text == "In" and 0 in numbers:
        yield Hit(values, "0 is no failure, so In cannot name it", "remove the 0")
    if len(set(numbers)) < len(numbers):
        yield Hit(values, "an exit code stands twice", "keep one")


def _pod(workload: Workload) -> Iterator[Hit]:
    spec = workload.spec
    volumes = [volume.at("name").text for volume in spec.at("volumes").items]
    for volume in spec.at("volumes").items:
        if volumes.count(volume.at("name").text) > 1:
            yield Hit(volume.at("name"), "two volumes of this name", "give each its own")
    names = [c.at("name").text for c in workload.all_containers]
    for container in workload.all_containers:
        name = container.at("name")
        if name.exists and names.count(name.text) > 1:
            yield Hit(name, "two containers of this name", "give each its own")
        if workload.document.kind not in ("StatefulSet", "TrainingRuntime"):
            yield from _mounts(workload, container, volumes)
        yield from _resources(container.at("resources"))
        yield from _restart_rules(container)


def _mounts(workload: Workload, container: Node, volumes: list[str]) -> Iterator[Hit]:
    claims = workload.document.root.at("spec", "volumeClaimPolicies").exists
    paths: set[str] = set()
    for mount in container.at("volumeMounts").items:
        if mount.at("name").text not in volumes and not claims:
            reason = f"no volume is called {mount.at('name').value}"
            yield Hit(mount.at("name"), reason, "add the volume, or use another's name")
        path = mount.at("mountPath")
        if path.text and path.text in paths:
            yield Hit(path, "two volumes are mounted here", "use another path")
        paths.add(path.text)


def _resources(resources: Node) -> Iterator[Hit]:
    for part in ("requests", "limits"):
        for name, place in resources.at(part).fields:
            amount = quantity(place.value)
            if place.exists and amount is None:
                yield Hit(place, f"{place.value!r} is no quantity", "write 8, 500m, 64Gi")
            elif amount is not None and amount < 0:
                yield Hit(place, "less than nothing", "write what is needed")
            limit = quantity(resources.at("limits", name).value)
            if part == "requests" and None not in (amount, limit):
                assert amount is not None and limit is not None
                if amount > limit:
                    yield Hit(place, f"more {name} than its limit", f"ask for {limit} or less")


def _restart_rules(container: Node) -> Iterator[Hit]:
    rules = container.at("restartPolicyRules")
    if not rules.exists:
        return
    if not container.at("restartPolicy").exists:
        yield Hit(rules, "the container has to have a restartPolicy too", "set it")
    if len(rules.items) > RESTART_RULES_MAX:
        yield Hit(rules, f"more than {RESTART_RULES_MAX} rules", "join some")
    for rule in rules.items:
        action = rule.at("action")
        if action.text not in ("Restart", "RestartAllContainers"):
            yield Hit(action, f"no action is called {action.value}", "use Restart")
        codes = rule.at("exitCodes")
        if codes.at("operator").text not in ("In", "NotIn"):
            yield Hit(codes.at("operator"), "no such operator", "use In or NotIn")
        if len(codes.at("values").items) > EXIT_CODES_MAX:
            yield Hit(codes.at("values"), f"more than {EXIT_CODES_MAX} codes", "use NotIn")
