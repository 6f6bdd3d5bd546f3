"""What can be seen of a job, and what is left of it.

Owns: rules `observability` and `lifecycle`. Does not own: probes (`roles`).
"""

from __future__ import annotations

from collections.abc import Iterator

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene, pod_labels, selects
from stepfast.k8s.validate.workload import RUNTIMES, Workload, environment

LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
_SEEN_FROM_INSIDE = {  # what an event has to say, and where the pod reads it
    "the pod's name": ("metadata.name",),
    "its namespace": ("metadata.namespace",),
    "its node": ("spec.nodeName",),
    "its UID": ("metadata.uid",),
}
_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
FRAMEWORK = "trainer.kubeflow.org/framework"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_GENERATED = ("resourceVersion", "uid", "creationTimestamp", "managedFields", "generation")


def observability(scene: Scene) -> Iterator[Hit]:
    """Each part has a port of metrics that something reads, and knows where it is."""
    for workload in scene.training:
        main = workload.containers[:1]
        ports = {p.at("name").text: p for c in main for p in c.at("ports").items}
        for container in main:
            if "metrics" not in ports:
                place = container.at("ports")
                yield Hit(place, "no port is called metrics", "name the agent's port so")
            yield from _downward(workload, container)
            yield from _last_words(container)
        yield from _labels(workload)
    yield from _monitors(scene)


def _labels(workload: Workload) -> Iterator[Hit]:
    missing = [name for name in LABELS if name not in workload.labels]
    if missing:
        reason = "the pods cannot be told apart by the recommended labels"
        fix = f"add {', '.join(missing)}"
        yield Hit(workload.template.at("metadata", "labels"), reason, fix)


def _downward(workload: Workload, container: Node) -> Iterator[Hit]:
    paths = [e.at("valueFrom", "fieldRef", "fieldPath").text for e in environment(container)]
    wanted = dict(_SEEN_FROM_INSIDE)
    if workload.operator in ("jobset", "trainer"):
        wanted["the restart attempt"] = (_ATTEMPT,)
    missing = [name for name, fields in wanted.items() if not set(fields) & set(paths)]
    if missing:
        reason = f"from inside, events cannot say {', '.join(missing)}"
        fields = [wanted[name][0] for name in missing]
        yield Hit(container.at("env"), reason, f"add fieldRef {', '.join(fields)}")


def _last_words(container: Node) -> Iterator[Hit]:
    policy = container.at("terminationMessagePolicy")
    if policy.text != "FallbackToLogsOnError":
        reason = "a container that dies leaves no word in its status"
        yield Hit(policy, reason, "set FallbackToLogsOnError")


def _monitors(scene: Scene) -> Iterator[Hit]:
    for monitor in scene.of_kind("PodMonitor"):
        selector = monitor.root.at("spec", "selector")
        chosen = [w for w in scene.workloads if selects(selector, pod_labels(w))]
        if not chosen:
            reason = "no pod of these files has these labels"
            yield Hit(selector, reason, "select labels that the pods carry")
            continue
        named = {
            p.at("name").text for w in chosen for c in w.containers for p in c.at("ports").items
        }
        for endpoint in monitor.root.at("spec", "podMetricsEndpoints").items:
            port = endpoint.at("port")
            if port.exists and port.text not in named:
                yield Hit(port, f"no pod has a port called {port.value}", "use its name")
    services = [s.root.at("metadata", "labels").texts for s in scene.of_kind("Service")]
    for monitor in scene.of_kind("ServiceMonitor"):
        selector = monitor.root.at("spec", "selector")
        if not any(selects(selector, labels) for labels in services):
            reason = "no Service of these files has these labels"
            yield Hit(selector, reason, "select labels that the Service carries")


def lifecycle(scene: Scene) -> Iterator[Hit]:
    """What is applied twice is the same, and what is deleted leaves nothing."""
    for document in scene.documents:
        for name in _GENERATED:
            place = document.root.at("metadata", name)
            if place.exists:
                yield Hit(place, "the cluster writes it; applied again, it conflicts", "remove it")
        if document.root.at("metadata", "generateName").exists:
            place = document.root.at("metadata", "generateName")
            yield Hit(place, "applied twice, it makes two objects", "use name")
        if document.root.at("status").exists:
            yield Hit(document.root.at("status"), "the cluster writes it", "remove it")
    for document in scene.training_documents:
        yield from _ends(document)
        yield from _closed(scene, document)
    for document in scene.of_kind(*RUNTIMES):
        yield from _runtime(document)
    for document in scene.of_kind("TrainJob"):
        yield from _train_job(document)


def _ends(document: Document) -> Iterator[Hit]:
    below = {
        "Job": ("spec", "ttlSecondsAfterFinished"),
        "JobSet": ("spec", "ttlSecondsAfterFinished"),
        "PyTorchJob": ("spec", "runPolicy", "ttlSecondsAfterFinished"),
    }.get(document.kind)
    if below is not None and document.root.at(*below).number is None:
        reason = "a finished job stays until somebody deletes it"
        yield Hit(document.root.at(*below), reason, "set it: 86400 keeps it for a day")


def _closed(scene: Scene, document: Document) -> Iterator[Hit]:
    if document.kind in RUNTIMES:
        return
    policies = scene.beside(document, "NetworkPolicy")
    for workload in scene.parts(document):
        if not workload.is_training:
            continue
        chosen = [
            p
            for p in policies
            if "Ingress" in [t.text for t in p.root.at("spec", "policyTypes").items]
            and _covers(p.root.at("spec", "podSelector"), workload)
        ]
        if not chosen:
            reason = f"any pod of the cluster may call the {workload.role.value}'s ports"
            fix = "add a NetworkPolicy: Ingress from the job's own pods, on its own ports"
            yield Hit(workload.template.at("metadata", "labels"), reason, fix)
        for policy in chosen:
            for rule in policy.root.at("spec", "ingress").items:
                if not rule.at("from").items:
                    reason = "the policy lets everybody in"
                    yield Hit(rule, reason, "name the pods that may call in `from`")


def _covers(selector: Node, workload: Workload) -> bool:
    return selector.value == {} or selects(selector, pod_labels(workload))


def _runtime(document: Document) -> Iterator[Hit]:
    root = document.root
    if not root.at("metadata", "labels", FRAMEWORK).text:
        place = root.at("metadata", "labels", FRAMEWORK)
        yield Hit(place, "the SDK does not list a runtime without it", f"add {FRAMEWORK}: torch")
    torch = root.at("spec", "mlPolicy", "torch")
    for name in ("numProcPerNode", "elasticPolicy"):
        if torch.at(name).exists:
            yield Hit(torch.at(name), "Kubeflow Trainer 2.2 removed it", "remove it")
    expiry = root.at("spec", "template", "spec", "ttlSecondsAfterFinished")
    if expiry.exists:
        reason = "Trainer makes a JobSet that expired anew, and its restarts are counted from 0"
        yield Hit(expiry, reason, "remove it, and delete finished TrainJobs yourself")
    jobs = root.at("spec", "template", "spec", "replicatedJobs")
    marked = [
        job
        for job in jobs.items
        if job.at("template", "metadata", "labels", ANCESTOR).text == "trainer"
    ]
    if not marked:
        reason = "no Job is marked as the trainer's: numNodes and env reach nobody"
        yield Hit(jobs, reason, f"label the template of Job node: {ANCESTOR}: trainer")
    for job in marked:
        if job.at("name").text != "node":
            yield Hit(job.at("name"), "Trainer's addresses say node", "call the Job node")
        containers = job.at("template", "spec", "template", "spec", "containers")
        if "node" not in [c.at("name").text for c in containers.items]:
            reason = "Trainer writes to the container called node alone"
            yield Hit(containers, reason, "call the container node")
        if (job.at("replicas").number or 1) != 1:
            yield Hit(job.at("replicas"), "Trainer counts one Job of nodes", "set replicas: 1")


def _train_job(document: Document) -> Iterator[Hit]:
    spec = document.root.at("spec")
    for name in ("podSpecOverrides", "podTemplateOverrides"):
        if spec.at(name).exists:
            reason = "Kubeflow Trainer 2.2 replaced it by runtimePatches"
            yield Hit(spec.at(name), reason, "write it as runtimePatches")
    for patch in spec.at("runtimePatches").items:
        manager = patch.at("manager")
        if "/" not in manager.text or manager.text.startswith("trainer.kubeflow.org/"):
            reason = "patches of one manager replace each other, and the SDK has its own"
            yield Hit(manager, reason, "use a name of your own, such as stepfast.dev/render")
