"""Names: every pod's must fit into DNS, and no two objects may share one.

Owns: rules `names`, `node-index` and `addressing`, and the names that controllers derive.
Does not own: who resolves them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.scene import Hit, Scene, pod_labels
from stepfast.k8s.validate.workload import Workload, commands, environment, flag_values

NAME_MAX = 63
_POD_SUFFIX = "-xxxxx"  # a generated pod name ends in a dash and five characters
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_GUESSES = (
    (re.compile(r"\$\{?HOSTNAME\b"), "the pod's name is parsed for its index"),
    (re.compile(r"\bhostname\s+-|\$\(hostname\b"), "the host's name or address is asked for"),
    (re.compile(r"\bgetent\b"), "an address is looked up once; a replaced pod has another one"),
    (re.compile(r"\bsed\s+-?[a-zA-Z'\"]"), "an identity is cut out of a text"),
    (re.compile(r"\bsleep\s+[\d$.]"), "a sleep stands where something should be waited for"),
)
_ADDRESS = re.compile(r"(?<![\d.])(\d{1,3}(?:\.\d{1,3}){3})(?![\d.])")
_HARMLESS = re.compile(r"(0\.0\.0\.0|127\.\d+\.\d+\.\d+)\Z")
_INDEX_NAME = re.compile(r"(NODE_RANK|NODE_INDEX|POD_INDEX|NODE_ID|GROUP_RANK)\Z")


def pod_hostnames(workload: Workload) -> Iterator[str]:
    """The first and the last pod's host name, as its controller makes it."""
    completions = max(workload.job.at("completions").number or 1, 1)
    name = workload.document.name
    if workload.operator == "jobset":
        replicas = _replicas(workload)
        yield f"{name}-{workload.replica_name}-0-0"
        yield f"{name}-{workload.replica_name}-{replicas - 1}-{completions - 1}"
    elif workload.document.kind == "Job":
        yield f"{name}-0"
        yield f"{name}-{completions - 1}"


def _replicas(workload: Workload) -> int:
    return max(workload.replica.at("replicas").number or 1, 1)


def subdomain_of(workload: Workload) -> str:
    """The headless Service that names the pods."""
    if workload.operator == "jobset":
        network = workload.document.root.at("spec", "network")
        return network.at("subdomain").text or workload.document.name
    return workload.spec.at("subdomain").text


def names(scene: Scene) -> Iterator[Hit]:
    """Derived names fit, and are the only ones of their kind."""
    for document in scene.training_documents:
        place = document.root.at("metadata", "name")
        if not document.name:
            yield Hit(place, "the object has no name", "give it a short one: letters, digits, -")
        elif document.kind in ("Job", "JobSet", "PyTorchJob") and not _DNS_1035.match(
            document.name
        ):
            reason = f"{document.name!r} cannot begin a host name (DNS-1035)"
            yield Hit(place, reason, "use lower-case letters, digits and -, a letter first")
        for workload in scene.parts(document):
            yield from _long_names(workload, place)
    for document in scene.of_kind("TrainJob"):
        place = document.root.at("metadata", "name")
        last = (document.root.at("spec", "trainer", "numNodes").number or 1) - 1
        yield from _too_long(place, f"{document.name}-node-0-{last}{_POD_SUFFIX}")
    for document in scene.of_kind("JobSet"):
        yield from _coordinator_label(document)
    yield from _same_names(scene)


def _long_names(workload: Workload, place: Node) -> Iterator[Hit]:
    for hostname in list(pod_hostnames(workload))[-1:]:
        yield from _too_long(place, hostname + _POD_SUFFIX)
    subdomain = workload.spec.at("subdomain")
    if subdomain.exists and not (_DNS_1035.match(subdomain.text) and len(subdomain.text) <= 63):
        reason = f"{subdomain.value!r} is no name of a Service"
        yield Hit(subdomain, reason, "use the headless Service's name")


def _too_long(place: Node, pod: str) -> Iterator[Hit]:
    if len(pod) > NAME_MAX:
        reason = f"the last pod would be {pod}: {len(pod)} characters, {NAME_MAX} are allowed"
        yield Hit(place, reason, f"shorten the name by {len(pod) - NAME_MAX} characters")


def _coordinator_label(document: Document) -> Iterator[Hit]:
    spec = document.root.at("spec")
    subdomain = spec.at("network", "subdomain")
    if subdomain.exists and not _DNS_1035.match(subdomain.text):
        yield Hit(subdomain, f"{subdomain.value!r} is no name of a Service", "use DNS-1035")
    coordinator = spec.at("coordinator")
    if not coordinator.exists:
        return
    value = (
        f"{document.name}-{coordinator.at('replicatedJob').text}"
        f"-{coordinator.at('jobIndex').number or 0}-{coordinator.at('podIndex').number or 0}"
        f".{subdomain.text or document.name}"
    )
    if len(value) > NAME_MAX:
        reason = f"the coordinator's label would be {value}: {len(value)} characters"
        yield Hit(coordinator, reason, f"shorten the JobSet's name: {NAME_MAX} are allowed")


def _same_names(scene: Scene) -> Iterator[Hit]:
    seen: dict[tuple[str, str, str, str], Document] = {}
    for document in scene.documents:
        group = document.api_version.partition("/")[0] if "/" in document.api_version else ""
        key = (group, document.kind, document.namespace, document.name)
        if document.kind and document.root.at("metadata", "name").text and key in seen:
            reason = f"a second {document.kind} {document.name} in namespace {document.namespace}"
            yield Hit(document.root.at("metadata", "name"), reason, "give each its own name")
        seen.setdefault(key, document)
    for jobset in scene.of_kind("JobSet"):
        subdomain = jobset.root.at("spec", "network", "subdomain").text or jobset.name
        for service in scene.beside(jobset, "Service"):
            if service.name == subdomain:
                reason = f"JobSet {jobset.name} makes a headless Service of this name itself"
                fix = "remove the Service, or give it another name"
                yield Hit(service.root.at("metadata", "name"), reason, fix)


def node_index(scene: Scene) -> Iterator[Hit]:
    """A pod knows its index from Kubernetes, and waits for what it needs."""
    fix = "read JOB_COMPLETION_INDEX; connect to a fixed DNS name and retry"
    for workload in scene.training:
        for container in workload.all_containers:
            for word in [*commands(container), *(e.at("value") for e in environment(container))]:
                for pattern, reason in _GUESSES:
                    if pattern.search(word.text):
                        yield Hit(word, reason, fix)
                        break
            for entry in environment(container):
                source = entry.at("valueFrom", "fieldRef", "fieldPath")
                is_index = _INDEX_NAME.search(entry.at("name").text)
                if is_index and source.text in ("metadata.name", "status.podIP"):
                    reason = f"{source.text} is no index: its last characters are random"
                    fix_field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                    yield Hit(source, reason, f"use {fix_field}")


def addressing(scene: Scene) -> Iterator[Hit]:
    """Every pod has a DNS name that outlives it, and is called by it."""
    for document in scene.of_kind("JobSet"):
        network = document.root.at("spec", "network")
        for name in ("enableDNSHostnames", "publishNotReadyAddresses"):
            if network.at(name).value is False:
                reason = "pods that are not ready yet, or again, have no address"
                yield Hit(network.at(name), reason, "leave it true")
    for workload in scene.workers:
        if workload.operator == "" and workload.document.kind == "Job":
            yield from _own_service(scene, workload)
        elif workload.operator == "jobset":
            place = workload.spec.at("subdomain")
            if place.exists and place.text != subdomain_of(workload):
                reason = "the pods' subdomain is not the JobSet's"
                yield Hit(place, reason, "leave it to the JobSet")
    for workload in scene.training:
        yield from _literal_addresses(workload)
    for workload in scene.workers:
        yield from _called_coordinator(scene, workload)


def _own_service(scene: Scene, workload: Workload) -> Iterator[Hit]:
    subdomain = workload.spec.at("subdomain")
    if not subdomain.text:
        reason = "without a subdomain the pods have no DNS names of their own"
        yield Hit(subdomain, reason, "set it to the name of the job's headless Service")
    labels = pod_labels(workload)
    services = [
        service
        for service in scene.beside(workload.document, "Service")
        if _service_selects(service, labels)
    ]
    if not services:
        reason = "no headless Service in these files selects the job's pods"
        fix = "add one: clusterIP None, publishNotReadyAddresses true"
        yield Hit(subdomain, reason, fix)
    headless = [s for s in services if s.root.at("spec", "clusterIP").text == "None"]
    for service in headless:
        place = service.root.at("spec", "publishNotReadyAddresses")
        if place.value is not True:
            reason = "a pod that is not ready yet cannot be found by the pods that it waits for"
            yield Hit(place, reason, "set publishNotReadyAddresses: true")
        if subdomain.text and subdomain.text != service.name:
            reason = f"the pods' subdomain is not {service.name}, the Service that selects them"
            yield Hit(subdomain, reason, f"set it to {service.name}")


def _service_selects(service: Document, labels: dict[str, str]) -> bool:
    selector = service.root.at("spec", "selector").texts
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def _literal_addresses(workload: Workload) -> Iterator[Hit]:
    for container in workload.all_containers:
        for word in [*commands(container), *(e.at("value") for e in environment(container))]:
            for address in _ADDRESS.findall(word.text):
                if not _HARMLESS.match(address):
                    reason = f"{address} is the address of a pod or node that may be replaced"
                    yield Hit(word, reason, "use a DNS name")


def _called_coordinator(scene: Scene, workload: Workload) -> Iterator[Hit]:
    known = {
        hostname: subdomain_of(c)
        for c in scene.coordinators
        if c.document.namespace == workload.document.namespace
        for hostname in pod_hostnames(c)
    }
    for container in workload.containers:
        for value in flag_values(container, "--coordinator"):
            host = value.text.rpartition(":")[0]
            pod, _, domain = host.partition(".")
            if not domain and not host.startswith("$("):
                reason = f"{host!r} is no full name: it needs the Service's name behind the pod's"
                yield Hit(value, reason, "write POD.SERVICE.NAMESPACE.svc:PORT")
            elif known and pod not in known and not host.startswith("$("):
                reason = f"no coordinator's pod is called {pod}; there are {', '.join(known)}"
                yield Hit(value, reason, "name the coordinator's first pod")
            elif known and pod in known and domain.partition(".")[0] != known[pod]:
                reason = f"{pod} is in the Service {known[pod]}, not {domain.partition('.')[0]}"
                yield Hit(value, reason, f"write {pod}.{known[pod]}")
