"""What Kubernetes does when a container or a pod ends, by its exit code.

Owns: rules `restart-in-place`, `exit-codes`, `infra-faults` and `one-pod-per-index`. Does not own:
the contract of exit codes (`errors`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.errors import EXIT_FINISHED, EXIT_NODE_UNFIT, EXIT_USER_ERROR
from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import RUNTIMES, Workload

RETRIED = (134, 137, 139, 143)  # abort, killed (out of memory too), segfault, asked to end
BACKOFF_LIMIT_MIN = 1_000_000  # with OnFailure every restart of a container counts
DISRUPTED = "DisruptionTarget"
GATED_ACTIONS = {
    "RestartJob": "RestartJob",
    "RestartJobAndIgnoreMaxRestarts": "RestartJob",
}


def final_codes(workload: Workload) -> tuple[int, ...]:
    """The codes after which a container must not start again in its place."""
    codes = (EXIT_FINISHED, EXIT_USER_ERROR)
    return (*codes, EXIT_NODE_UNFIT) if workload.is_worker else codes


def matches(requirement: Node, code: int) -> bool:
    """Whether `{operator, values}` matches an exit code."""
    values = [item.number for item in requirement.at("values").items]
    match requirement.at("operator").text:
        case "In":
            return code in values
        case "NotIn":
            return code not in values
    return False


def restarts(workload: Workload, container: Node, code: int) -> bool:
    """Whether the kubelet starts a container again after this exit code."""
    for rule in container.at("restartPolicyRules").items:
        if rule.at("action").text == "Restart" and matches(rule.at("exitCodes"), code):
            return True
    policy = container.at("restartPolicy").text or workload.spec.at("restartPolicy").text
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def restart_in_place(scene: Scene) -> Iterator[Hit]:
    """A container that dies starts again in its pod, where its snapshots are."""
    for workload in scene.training:
        if workload.operator == "training-operator":
            yield from _legacy(workload)
        elif workload.job.exists:
            if scene.target.restarts_in_place(workload.operator):
                yield from _by_rules(workload)
            else:
                yield from _by_policy(workload)


def _by_rules(workload: Workload) -> Iterator[Hit]:
    policy = workload.spec.at("restartPolicy")
    if policy.text != "Never":
        reason = "with the pod's restartPolicy Never, exit codes can decide what happens"
        yield Hit(policy, reason, "set Never, and restartPolicyRules on the container")
    for container in workload.containers:
        lost = [code for code in RETRIED if not restarts(workload, container, code)]
        if lost:
            place = container.at("restartPolicyRules")
            words = ", ".join(map(str, lost))
            reason = f"after exit code {words} the pod, and with it its snapshots, is gone"
            values = list(final_codes(workload))
            fix = f"set restartPolicy: Never and a rule: Restart, NotIn {values}"
            yield Hit(place, reason, fix)
        elif container.at("restartPolicyRules").exists and not container.at("restartPolicy").text:
            reason = "restartPolicyRules need the container's own restartPolicy beside them"
            yield Hit(container.at("restartPolicy"), reason, "set restartPolicy: Never")
        kept = [code for code in final_codes(workload) if restarts(workload, container, code)]
        if kept and not lost:
            words = ", ".join(map(str, kept))
            reason = f"exit code {words} is final, and would start the container again"
            yield Hit(container.at("restartPolicyRules"), reason, "leave it out of the rules")


def _by_policy(workload: Workload) -> Iterator[Hit]:
    yield from _on_failure(
        workload.spec, "this cluster or operator has no restart rules: only OnFailure keeps the pod"
    )
    reason = "this cluster or operator drops the field, or refuses it"
    fix = "remove it, or name the versions that carry it"
    yield from _without_rules(workload.all_containers, reason, fix)
    failure_policy = workload.job.at("podFailurePolicy")
    if failure_policy.exists:
        yield Hit(failure_policy, "it needs restartPolicy Never", "remove it with OnFailure")
    yield from _large(workload.job.at("backoffLimit"))


def _on_failure(owner: Node, reason: str) -> Iterator[Hit]:
    policy = owner.at("restartPolicy")
    if policy.text != "OnFailure":
        yield Hit(policy, reason, "set restartPolicy: OnFailure")


def _without_rules(containers: list[Node], reason: str, fix: str) -> Iterator[Hit]:
    for container in containers:
        rules = container.at("restartPolicyRules")
        if rules.exists:
            yield Hit(rules, reason, fix)


def _large(limit: Node) -> Iterator[Hit]:
    if (limit.number or 0) < BACKOFF_LIMIT_MIN:
        reason = "every restart of a container counts, so a long run reaches the limit"
        yield Hit(limit, reason, "set backoffLimit: 2147483647")


def _legacy(workload: Workload) -> Iterator[Hit]:
    reason = "only OnFailure starts the container again in the pod that has the snapshots"
    yield from _on_failure(workload.replica, reason)
    dropped = "PyTorchJob's CRD drops the field silently"
    yield from _without_rules(workload.containers, dropped, "remove it")
    yield from _large(workload.document.root.at("spec", "runPolicy", "backoffLimit"))


def exit_codes(scene: Scene) -> Iterator[Hit]:
    """What ends the job, what moves a pod and what is nobody's fault are told apart."""
    for workload in scene.training:
        if not workload.job.exists or not scene.target.restarts_in_place(workload.operator):
            continue
        rules = workload.job.at("podFailurePolicy", "rules")
        yield from _codes_decide(workload, rules)
        yield from _conditions_decide(rules)
        for rule in rules.items:
            yield from _rule_can_apply(workload, rule)


def _action_after(workload: Workload, code: int) -> str:
    for rule in workload.job.at("podFailurePolicy", "rules").items:
        if matches(rule.at("onExitCodes"), code):
            return rule.at("action").text
    return ""


def _codes_decide(workload: Workload, rules: Node) -> Iterator[Hit]:
    if not workload.is_worker:
        return
    after = _action_after(workload, EXIT_USER_ERROR)
    if after != "FailJob":
        reason = f"exit code {EXIT_USER_ERROR} (it will fail again) does not end the job"
        yield Hit(rules, reason, f"add a rule: FailJob, onExitCodes In [{EXIT_USER_ERROR}]")
    after = _action_after(workload, EXIT_NODE_UNFIT)
    if after not in ("Count", ""):
        reason = f"exit code {EXIT_NODE_UNFIT} (this node is unfit) leads to {after}"
        yield Hit(rules, reason, f"add before it: Count, onExitCodes In [{EXIT_NODE_UNFIT}]")
    elif not after:
        reason = f"exit code {EXIT_NODE_UNFIT} (this node is unfit) is not named"
        yield Hit(rules, reason, f"add a rule: Count, onExitCodes In [{EXIT_NODE_UNFIT}]")


def _conditions_decide(rules: Node) -> Iterator[Hit]:
    for rule in rules.items:
        for condition in rule.at("onPodConditions").items:
            if condition.at("type").text == DISRUPTED:
                if rule.at("action").text != "Ignore":
                    reason = "a drained node would count as a failure of the job"
                    yield Hit(rule.at("action"), reason, f"Ignore {DISRUPTED}")
                return
    reason = "evicted, preempted and drained pods count as failures"
    yield Hit(rules, reason, f"add a rule: Ignore, onPodConditions {DISRUPTED}")


def _rule_can_apply(workload: Workload, rule: Node) -> Iterator[Hit]:
    requirement = rule.at("onExitCodes")
    if not requirement.exists:
        return
    names = {c.at("name").text for c in workload.all_containers}
    named = requirement.at("containerName")
    if named.exists and named.text not in names:
        reason = f"no container is called {named.value}"
        yield Hit(named, reason, f"use one of {', '.join(sorted(names))}")
    codes = [item.number for item in requirement.at("values").items]
    if requirement.at("operator").text == "In":
        for container in workload.containers:
            if named.exists and container.at("name").text != named.text:
                continue
            for code in codes:
                if code is not None and code != 0 and restarts(workload, container, code):
                    reason = f"after {code} the container restarts, so the pod never fails by it"
                    fix = "keep exit codes of the two kinds of rules apart"
                    yield Hit(requirement.at("values"), reason, fix)


def infra_faults(scene: Scene) -> Iterator[Hit]:
    """However many nodes are lost: the run goes on, and each loss waits for itself alone."""
    for workload in scene.training:
        if workload.job.exists:
            yield from _backoff(scene, workload)
    for document in scene.of_kind("JobSet", *RUNTIMES):
        yield from _failure_policy(scene, document)


def _backoff(scene: Scene, workload: Workload) -> Iterator[Hit]:
    per_index = workload.job.at("backoffLimitPerIndex")
    if not scene.target.restarts_in_place(workload.operator):
        if per_index.exists:
            yield Hit(per_index, "it needs restartPolicy Never", "remove it with OnFailure")
        return
    if not per_index.number:
        reason = "the delay before a new pod doubles with every loss of the whole run, to 10 min"
        yield Hit(per_index, reason, "set backoffLimitPerIndex, and each index waits for itself")
    failed = workload.job.at("maxFailedIndexes")
    if failed.number != 0:
        reason = "an index that is given up leaves the others waiting for it"
        yield Hit(failed, reason, "set maxFailedIndexes: 0")
    limit = workload.job.at("backoffLimit")
    if limit.number is not None and limit.number < BACKOFF_LIMIT_MIN:
        reason = f"the job ends with its failure number {limit.number + 1}, whatever caused them"
        yield Hit(limit, reason, "leave it out beside backoffLimitPerIndex")


def _failure_policy(scene: Scene, document: Document) -> Iterator[Hit]:
    above = ("spec", "template", "spec") if document.kind in RUNTIMES else ("spec",)
    policy = document.root.at(*above, "failurePolicy")
    if not policy.exists:
        reason = "without a failurePolicy the first Job that fails ends the JobSet"
        yield Hit(policy, reason, "add one, maxRestarts 1 or more, and a rule for exit code 78")
        return
    if (policy.at("maxRestarts").number or 0) < 1:
        yield Hit(policy.at("maxRestarts"), "the set is never restarted", "set 1 or more")
    strategy = policy.at("restartStrategy")
    if strategy.text == "InPlaceRestart" and "InPlaceRestart" not in scene.target.gates:
        reason = "InPlaceRestart is behind an alpha gate of the JobSet controller"
        yield Hit(strategy, reason, "use BlockingRecreate, or say --gate InPlaceRestart")
    yield from _set_rules(scene, policy)


def _set_rules(scene: Scene, policy: Node) -> Iterator[Hit]:
    rules = policy.at("rules").items
    for rule in rules:
        action = rule.at("action")
        gate = GATED_ACTIONS.get(action.text)
        if gate is not None and gate not in scene.target.gates:
            reason = f"{action.text} is behind an alpha gate of the JobSet controller"
            yield Hit(action, reason, f"use RestartJobSet, or say --gate {gate}")
    in_place = scene.target.restarts_in_place("jobset")
    fatal = [index for index, rule in enumerate(rules) if _is_fatal(rule)]
    if not fatal and in_place:
        reason = f"exit code {EXIT_USER_ERROR} would restart the whole set until maxRestarts"
        fix = (
            "add as the first rule: FailJobSet, onJobFailureReasons [PodFailurePolicy],"
            f' onJobFailureMessagePatterns ["exit code {EXIT_USER_ERROR} "]'
        )
        yield Hit(policy.at("rules"), reason, fix)
    elif fatal and fatal[0] > 0:
        place = policy.at("rules", fatal[0])
        yield Hit(place, "rules before it may match first", "make it the first rule")
    for rule in rules:
        only = rule.at("onJobFailureReasons").items + rule.at("onJobFailureMessagePatterns").items
        if rule.at("action").text == "FailJobSet" and not only:
            reason = "any failure of a Job ends the run"
            yield Hit(rule, reason, "say which: reasons and message patterns")


def _is_fatal(rule: Node) -> bool:
    if rule.at("action").text != "FailJobSet":
        return False
    patterns = [item.text for item in rule.at("onJobFailureMessagePatterns").items]
    told = re.compile(rf"\b{EXIT_USER_ERROR}\b")
    return any(told.search(pattern) for pattern in patterns)


def one_pod_per_index(scene: Scene) -> Iterator[Hit]:
    """A node's successor starts when its predecessor is surely gone."""
    for workload in scene.training:
        place = workload.job.at("podReplacementPolicy")
        if workload.job.exists and place.text != "Failed":
            reason = "two pods of one index may run at once while the first one ends"
            yield Hit(place, reason, "set podReplacementPolicy: Failed")
