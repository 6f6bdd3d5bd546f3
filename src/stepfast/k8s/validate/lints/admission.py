"""What an API server refuses beyond its schemas, for JobSets and Kubeflow Trainer.

Owns: rules `jobset-admission` and `trainer-admission`, written from the rules of their webhooks
and CRDs. Does not own: rules of batch/v1 (`job_admission`), and rules about the past.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene
from stepfast.k8s.validate.workload import RUNTIMES

ACTIONS = {
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
}
REASONS = {
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
}
STRATEGIES = {"Recreate", "BlockingRecreate", "InPlaceRestart"}
DEPENDS_ON_MAX = 5
INT32_MAX = 2**31 - 1
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?\Z")
_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9._~!$&'()*+,;=:@%/-]+\Z")
_OWN_CONTAINERS = ("node", "dataset-initializer", "model-initializer")
_RESERVED_ENV = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)


def jobset_admission(scene: Scene) -> Iterator[Hit]:
    """The JobSet's webhook and CRD accept it."""
    for document in scene.of_kind("JobSet"):
        yield from _jobset(document.root.at("spec"))
        yield from _managed_by(document.root.at("spec", "managedBy"))
    for document in scene.of_kind(*RUNTIMES):
        yield from _jobset(document.root.at("spec", "template", "spec"))


def _jobset(spec: Node) -> Iterator[Hit]:
    jobs = spec.at("replicatedJobs")
    names = [job.at("name").text for job in jobs.items]
    if not names:
        yield Hit(jobs, "a JobSet without Jobs", "add one")
    for job in jobs.items:
        name = job.at("name")
        if names.count(name.text) > 1:
            yield Hit(name, f"two Jobs are called {name.text}", "give each its own name")
    yield from _known(spec.at("successPolicy", "targetReplicatedJobs"), names)
    yield from _failure_policy(spec.at("failurePolicy"), names)
    for index, job in enumerate(jobs.items):
        yield from _depends_on(spec, job.at("dependsOn"), names[:index])
    if spec.at("coordinator").exists:
        yield from _coordinator(spec)
    if spec.at("failurePolicy", "restartStrategy").text == "InPlaceRestart":
        yield from _in_place(jobs)
    for policy in spec.at("volumeClaimPolicies").items:
        yield from _claims(policy, jobs)


def _known(targets: Node, names: list[str]) -> Iterator[Hit]:
    for target in targets.items:
        if target.text not in names:
            reason = f"no Job is called {target.value}"
            yield Hit(target, reason, f"use one of {', '.join(names)}")


def _failure_policy(policy: Node, names: list[str]) -> Iterator[Hit]:
    strategy = policy.at("restartStrategy")
    if strategy.exists and strategy.text not in STRATEGIES:
        reason = f"no restart strategy is called {strategy.value}"
        yield Hit(strategy, reason, f"use one of {', '.join(sorted(STRATEGIES))}")
    seen: set[str] = set()
    for rule in policy.at("rules").items:
        name, action = rule.at("name"), rule.at("action")
        if name.exists and not _RULE_NAME.match(name.text):
            fix = "a letter first, then letters, digits, _ , and :, 128 at most"
            yield Hit(name, f"{name.value!r} is no name of a rule", fix)
        if name.text and name.text in seen:
            yield Hit(name, f"two rules are called {name.text}", "give each its own name")
        seen.add(name.text)
        if action.text not in ACTIONS:
            reason = f"no action is called {action.value}"
            yield Hit(action, reason, f"use one of {', '.join(sorted(ACTIONS))}")
        for item in rule.at("onJobFailureReasons").items:
            if item.text not in REASONS:
                reason = f"no Job fails with the reason {item.value}"
                yield Hit(item, reason, f"use one of {', '.join(sorted(REASONS))}")
        for item in rule.at("onJobFailureMessagePatterns").items:
            yield from _pattern(item)
        yield from _known(rule.at("targetReplicatedJobs"), names)


def _pattern(item: Node) -> Iterator[Hit]:
    """RE2's syntax is Python's but for what RE2 leaves out, of which this is the common part."""
    if re.search(r"\(\?(?:[=!]|<[=!])|\\[1-9]", item.text):
        reason = "RE2 has no look-around and no back-reference"
        yield Hit(item, reason, "write the pattern without them")
        return
    try:
        re.compile(item.text)
    except (re.error, RecursionError, OverflowError) as error:
        yield Hit(item, f"no regular expression: {error}", "correct it")


def _depends_on(spec: Node, depends: Node, earlier: list[str]) -> Iterator[Hit]:
    if len(depends.items) > DEPENDS_ON_MAX:
        yield Hit(depends, f"{len(depends.items)} are more than {DEPENDS_ON_MAX}", "name fewer")
    if depends.items and spec.at("startupPolicy", "startupPolicyOrder").text == "InOrder":
        yield Hit(depends, "it excludes startupPolicy InOrder", "remove the startupPolicy")
    for entry in depends.items:
        name, status = entry.at("name"), entry.at("status")
        if name.text not in earlier:
            reason = f"{name.value} is no Job that stands before this one"
            yield Hit(name, reason, "name an earlier Job")
        if status.text not in ("Ready", "Complete"):
            yield Hit(status, f"{status.value} is no status to wait for", "use Ready or Complete")


def _coordinator(spec: Node) -> Iterator[Hit]:
    coordinator = spec.at("coordinator")
    named = coordinator.at("replicatedJob")
    found = [j for j in spec.at("replicatedJobs").items if j.at("name").text == named.text]
    if not found:
        yield Hit(named, f"no Job is called {named.value}", "name one of replicatedJobs")
        return
    job = found[0].at("template", "spec")
    job_index = coordinator.at("jobIndex").number or 0
    pod_index = coordinator.at("podIndex").number or 0
    replicas = found[0].at("replicas").number
    if not 0 <= job_index < (1 if replicas is None else replicas):
        yield Hit(coordinator.at("jobIndex"), "there is no such Job", "count from 0")
    if job.at("completionMode").text not in ("Indexed", "") or not job.at("completions").exists:
        reason = "the coordinator's pod has no index"
        yield Hit(named, reason, "make its Job Indexed, with completions")
    elif not 0 <= pod_index < (job.at("completions").number or 0):
        yield Hit(coordinator.at("podIndex"), "there is no such pod", "count from 0")


def _in_place(jobs: Node) -> Iterator[Hit]:
    for job in jobs.items:
        spec = job.at("template", "spec")
        if spec.at("backoffLimit").number != INT32_MAX:
            reason = "InPlaceRestart asks for the largest limit"
            yield Hit(spec.at("backoffLimit"), reason, f"set {INT32_MAX}")
        if spec.at("podReplacementPolicy").text != "Failed":
            reason = "InPlaceRestart asks for Failed"
            yield Hit(spec.at("podReplacementPolicy"), reason, "set Failed")
        completions, parallelism = spec.at("completions"), spec.at("parallelism")
        if completions.number is None or completions.number != parallelism.number:
            reason = "InPlaceRestart asks for completions = parallelism"
            yield Hit(parallelism, reason, "set both to the number of pods")


def _claims(policy: Node, jobs: Node) -> Iterator[Hit]:
    mounted = {
        mount.at("name").text
        for job in jobs.items
        for container in job.at("template", "spec", "template", "spec", "containers").items
        for mount in container.at("volumeMounts").items
    }
    for template in policy.at("templates").items:
        name = template.at("metadata", "name")
        if name.text not in mounted:
            yield Hit(name, f"no container mounts {name.value}", "add a volumeMount of this name")


def _managed_by(place: Node) -> Iterator[Hit]:
    if place.exists and not (_MANAGER.match(place.text) and len(place.text) <= 63):
        yield Hit(place, f"{place.value!r} is no manager's name", "write domain/name, 63 at most")


def trainer_admission(scene: Scene) -> Iterator[Hit]:
    """Kubeflow Trainer's webhooks and CRDs accept it."""
    for document in scene.of_kind("TrainJob"):
        yield from _train_job(scene, document)
    for document in scene.of_kind(*RUNTIMES):
        policy = document.root.at("spec", "mlPolicy")
        nodes = policy.at("numNodes")
        if nodes.number is not None and nodes.number < 1:
            yield Hit(nodes, "a job of no nodes", "set 1 or more")
        kinds = [name for name, place in policy.fields if name != "numNodes" and place.exists]
        if len(kinds) > 1:
            yield Hit(policy, f"{' and '.join(sorted(kinds))} exclude each other", "keep one")
        groups = document.root.at("spec", "podGroupPolicy")
        if len([1 for _, place in groups.fields if place.exists]) > 1:
            yield Hit(groups, "two schedulers for one group of pods", "keep one")


def _train_job(scene: Scene, document: Document) -> Iterator[Hit]:
    spec = document.root.at("spec")
    yield from _managed_by(spec.at("managedBy"))
    if not re.match(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z", document.name):
        place = document.root.at("metadata", "name")
        yield Hit(place, "its JobSet could not have this name", "use DNS-1035, 63 at most")
    reference = spec.at("runtimeRef")
    kind = reference.at("kind").text or "ClusterTrainingRuntime"
    known = scene.of_kind(kind)
    if kind not in RUNTIMES:
        yield Hit(reference.at("kind"), f"{kind} is no runtime", f"use {' or '.join(RUNTIMES)}")
    elif known and reference.at("name").text not in [d.name for d in known]:
        reason = f"these files have {kind}s, and none is called {reference.at('name').value}"
        yield Hit(reference.at("name"), reason, f"use {', '.join(d.name for d in known)}")
    nodes = spec.at("trainer", "numNodes")
    if nodes.number is not None and nodes.number < 1:
        yield Hit(nodes, "a job of no nodes", "set 1 or more")
    for entry in spec.at("trainer", "env").items:
        if entry.at("name").text in _RESERVED_ENV:
            reason = "Trainer sets it itself, and refuses a job that does"
            yield Hit(entry.at("name"), reason, "remove it")
    yield from _patches(spec.at("runtimePatches"))


def _patches(patches: Node) -> Iterator[Hit]:
    managers = [patch.at("manager").text for patch in patches.items]
    for patch in patches.items:
        manager = patch.at("manager")
        if manager.text and managers.count(manager.text) > 1:
            yield Hit(manager, f"two patches of {manager.text}", "write them as one")
        elif not _MANAGER.match(manager.text):
            yield Hit(manager, f"{manager.value!r} is no manager's name", "write domain/name")
        jobs = patch.at("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
        for job in jobs.items:
            pod = job.at("template", "spec", "template", "spec")
            for container in pod.at("containers").items + pod.at("initContainers").items:
                own = container.at("name").text in _OWN_CONTAINERS
                if own and container.at("env").items:
                    reason = "a patch may not set this container's environment"
                    yield Hit(container.at("env"), reason, "use spec.trainer.env")
