"""Where pods run, and what may take them away.

Owns: rules `placement` and `disruption`. Does not own: what happens then (`restarts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene, pod_labels, selects
from stepfast.k8s.validate.workload import RUNTIMES, Workload

ZONE_LABELS = ("topology.kubernetes.io/zone", "topology.k8s.aws/zone-id")
HOSTNAME = "kubernetes.io/hostname"
CAPACITY_LABELS = ("karpenter.sh/capacity-type", "eks.amazonaws.com/capacityType")
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
QUEUE = "kueue.x-k8s.io/queue-name"
QUEUE_TOPOLOGY = (
    "kueue.x-k8s.io/podset-required-topology",
    "kueue.x-k8s.io/podset-preferred-topology",
)
UNHEALTHY_TAINTS = (
    "stepfast.dev/unhealthy",
    "gpu-healthcheck.aws-samples.io/unhealthy",
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
)
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def placement(scene: Scene) -> Iterator[Hit]:
    """One zone, one pod for each node, no node that is sick or on loan."""
    for workload in scene.training:
        for toleration in workload.spec.at("tolerations").items:
            yield from _toleration(toleration)
        if not scene.target.allows_spot:
            yield from _spot(workload)
    for workload in scene.workers:
        if (workload.job.at("completions").number or 0) == 1:
            continue
        yield from _one_zone(workload)
        yield from _one_per_host(workload)


def _toleration(toleration: Node) -> Iterator[Hit]:
    key = toleration.at("key")
    if not key.text:
        reason = "it tolerates every taint: unhealthy nodes, nodes that end, nodes not ready"
        yield Hit(toleration, reason, "name the key, such as nvidia.com/gpu")
    elif key.text in UNHEALTHY_TAINTS:
        yield Hit(key, "the pod may be put on a node that is known to be bad", "remove it")
    elif toleration.at("operator").text != "Exists" and not toleration.at("value").text:
        reason = f"an empty value for {key.text}: a variable was not set when this was written"
        yield Hit(toleration, reason, "use operator: Exists, or the taint's value")


def _spot(workload: Workload) -> Iterator[Hit]:
    fix = "select on-demand or reserved; or validate with --allow-spot"
    reason = "spot nodes are taken back with two minutes' notice"
    selector = workload.spec.at("nodeSelector")
    places = [selector.at(label) for label in CAPACITY_LABELS]
    for _, values in workload.node_requirements(CAPACITY_LABELS):
        places += values
    for place in places:
        if place.text.lower() == "spot":
            yield Hit(place, reason, fix)


def _one_zone(workload: Workload) -> Iterator[Hit]:
    if not workload.has_devices:
        return
    selector = workload.spec.at("nodeSelector")
    zones = [selector.at(label) for label in ZONE_LABELS if selector.at(label).text]
    for _, values in workload.node_requirements(ZONE_LABELS):
        zones += values
    if len({zone.text for zone in zones}) == 1:
        return
    terms = workload.spec.at("affinity", "podAffinity", _REQUIRED).items
    if any(t.at("topologyKey").text in (*ZONE_LABELS, *_network_layers(t)) for t in terms):
        return
    if any(workload.annotations.get(name) for name in QUEUE_TOPOLOGY):
        return
    reason = "pods of one job may land in several zones, and EFA stays inside one"
    yield Hit(selector, reason, "select topology.kubernetes.io/zone, or require a topology key")


def _network_layers(term: Node) -> list[str]:
    key = term.at("topologyKey").text
    return [key] if key.startswith("topology.k8s.aws/network-node-layer-") else []


def _one_per_host(workload: Workload) -> Iterator[Hit]:
    for instance in workload.instances[:1]:
        if workload.asked("nvidia.com/gpu") == instance.gpus:
            return
    labels = pod_labels(workload)
    for term in workload.spec.at("affinity", "podAntiAffinity", _REQUIRED).items:
        same = selects(term.at("labelSelector"), labels)
        if term.at("topologyKey").text == HOSTNAME and same:
            return
    for spread in workload.spec.at("topologySpreadConstraints").items:
        is_required = spread.at("whenUnsatisfiable").text == "DoNotSchedule"
        by_host = spread.at("topologyKey").text == HOSTNAME
        if is_required and by_host and spread.at("maxSkew").number == 1:
            return
    reason = "two pods may share a node: one fault takes two members, and both their memories"
    fix = "require podAntiAffinity by kubernetes.io/hostname, or ask for all of the node's GPUs"
    yield Hit(workload.spec.at("affinity"), reason, fix)


def disruption(scene: Scene) -> Iterator[Hit]:
    """What asks first is told no; what cannot be refused takes one node at a time."""
    for workload in scene.workers:
        yield from _not_disrupted(workload)
        yield from _budget(scene, workload)
    for budget in scene.of_kind("PodDisruptionBudget"):
        yield from _budget_fields(scene, budget)
    for document in scene.training_documents:
        root = document.root
        if root.at("metadata", "labels", QUEUE).exists and root.at("spec", "suspend").exists:
            reason = "Kueue suspends and resumes it; a fixed value fights with that"
            yield Hit(root.at("spec", "suspend"), reason, "remove it")


def _not_disrupted(workload: Workload) -> Iterator[Hit]:
    metadata = workload.template.at("metadata")
    mark = metadata.at("annotations", DO_NOT_DISRUPT)
    if mark.text != "true":
        reason = "Karpenter may move the pod to save money"
        yield Hit(mark, reason, f'set the annotation {DO_NOT_DISRUPT}: "true" on the pods')
    priority = workload.spec.at("priorityClassName")
    if not priority.text:
        reason = "any pod of a higher class, and the kubelet under pressure, may end it first"
        yield Hit(priority, reason, "name a PriorityClass")


def _budget(scene: Scene, workload: Workload) -> Iterator[Hit]:
    if workload.document.kind in RUNTIMES:
        return  # its pods have another document's name; the cluster alone knows the match
    labels = pod_labels(workload)
    budgets = [
        b
        for b in scene.beside(workload.document, "PodDisruptionBudget")
        if selects(b.root.at("spec", "selector"), labels)
    ]
    completions = workload.job.at("completions").number
    if not budgets and completions != 1:
        reason = "a drain may evict all nodes of the job at once"
        fix = "add a PodDisruptionBudget, minAvailable one less than the nodes"
        yield Hit(workload.template.at("metadata", "labels"), reason, fix)
    for budget in budgets[:1]:
        least = budget.root.at("spec", "minAvailable")
        right = None if completions is None else completions - 1
        if least.number is not None and right is not None and least.number != right:
            reason = f"{completions} nodes, and {least.number} have to stay: not one at a time"
            yield Hit(least, reason, f"set {right}")
    for budget in budgets[1:]:
        reason = "a second budget for the same pods: evictions are refused with an error"
        yield Hit(budget.root.at("metadata", "name"), reason, "keep one")


def _budget_fields(scene: Scene, budget: Document) -> Iterator[Hit]:
    spec = budget.root.at("spec")
    chosen = [
        w
        for w in scene.training
        if w.document.namespace == budget.namespace and selects(spec.at("selector"), pod_labels(w))
    ]
    if not chosen:
        return
    percent: Any = spec.at("minAvailable").value
    if spec.at("maxUnavailable").exists or isinstance(percent, str):
        place = spec.at("maxUnavailable" if spec.at("maxUnavailable").exists else "minAvailable")
        reason = "Jobs have no scale to take a share of: the budget refuses every eviction"
        yield Hit(place, reason, "use minAvailable with a whole number, one less than the nodes")
    policy = spec.at("unhealthyPodEvictionPolicy")
    if policy.text != "AlwaysAllow":
        reason = "a pod that is not ready cannot be evicted, and it is the one to move"
        yield Hit(policy, reason, "set AlwaysAllow")
    for workload in chosen:
        if workload.is_coordinator and any(w.is_worker for w in chosen):
            reason = "the budget counts the coordinator among the nodes"
            yield Hit(spec.at("selector"), reason, "select the workers alone")
