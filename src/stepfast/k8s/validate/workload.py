"""The pods that a set of documents makes, whatever kind of object makes them.

Owns: where each kind keeps its pod template and its Job spec, which role a pod plays, and what a
pod's containers run and ask for. Does not own: what is right.
Invariant: nothing here fails on any document; what is absent is absent or empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise

from stepfast.k8s.instances import INSTANCE_TYPES, InstanceType
from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.quantities import quantity

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
INSTANCE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
COMPONENT = "app.kubernetes.io/component"
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")

_SERVERS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
_WORKER_NAMES = re.compile(r"(node|worker|workers|trainer|agent|launcher)\Z")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|a|k|z)?sh\Z")


class Role(Enum):
    """What a pod is for, in a training job."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One pod template, and what stands around it."""

    document: Document
    operator: str  # "" for core objects; jobset, trainer, training-operator, ray
    job: Node  # a batch/v1 JobSpec; absent where no Job makes the pods
    template: Node  # metadata and spec of the pods
    replica: Node  # the entry of a set that it stands in; absent elsewhere
    role: Role

    @property
    def spec(self) -> Node:
        """The pods' spec."""
        return self.template.at("spec")

    @property
    def labels(self) -> dict[str, str]:
        """The pods' own labels, without those that controllers add."""
        return self.template.at("metadata", "labels").texts

    @property
    def is_training(self) -> bool:
        """A part of a training job."""
        return self.role is not Role.OTHER

    @property
    def is_worker(self) -> bool:
        """It has ranks."""
        return self.role is Role.WORKER

    @property
    def is_coordinator(self) -> bool:
        """It decides, and has no ranks."""
        return self.role is Role.COORDINATOR

    @property
    def containers(self) -> list[Node]:
        """Containers that run as long as the pod, without sidecars among the init containers."""
        return self.spec.at("containers").items

    @property
    def all_containers(self) -> list[Node]:
        """Init containers too."""
        return self.spec.at("initContainers").items + self.containers

    @property
    def replica_name(self) -> str:
        """What the set calls it."""
        return self.replica.at("name").text

    @property
    def annotations(self) -> dict[str, str]:
        """The object's, overruled by the pods' own."""
        return {
            **self.document.root.at("metadata", "annotations").texts,
            **self.template.at("metadata", "annotations").texts,
        }

    def asked(self, resource: str) -> Fraction:
        """How much of a resource the pod asks for: containers together, init ones one by one."""
        running = sum((requested(c, resource) for c in self.containers), Fraction(0))
        first = [requested(c, resource) for c in self.spec.at("initContainers").items]
        return max([running, *first])

    @property
    def has_devices(self) -> bool:
        """It asks for GPUs or EFA devices."""
        return self.asked(GPU) > 0 or self.asked(EFA) > 0

    @property
    def instance_names(self) -> list[Node]:
        """The instance types that the pods may run on, as far as they select any."""
        selector = self.spec.at("nodeSelector")
        named = [selector.at(label) for label in INSTANCE_LABELS if selector.at(label).text]
        for _, values in self.node_requirements(INSTANCE_LABELS):
            named += values
        return named

    @property
    def instances(self) -> list[InstanceType]:
        """The selected types that the table knows."""
        names = [place.text.removeprefix("ml.") for place in self.instance_names]
        return [INSTANCE_TYPES[name] for name in names if name in INSTANCE_TYPES]

    def node_requirements(self, keys: tuple[str, ...]) -> Iterator[tuple[str, list[Node]]]:
        """What required node affinity says with `In` about any of these labels."""
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        for term in self.spec.at("affinity", "nodeAffinity", required, "nodeSelectorTerms").items:
            for match in term.at("matchExpressions").items:
                if match.at("key").text in keys and match.at("operator").text == "In":
                    yield match.at("key").text, match.at("values").items


def requested(container: Node, resource: str) -> Fraction:
    """A container's request; where none is given, its limit, as the API server fills it in."""
    resources = container.at("resources")
    found = quantity(resources.at("requests", resource).value)
    if found is None:
        found = quantity(resources.at("limits", resource).value)
    return found or Fraction(0)


def commands(container: Node) -> list[Node]:
    """What a container runs, word by word, and in what its hooks run."""
    hooks = container.at("lifecycle")
    places = [container.at("command"), container.at("args")]
    places += [hooks.at(hook, "exec", "command") for hook in ("postStart", "preStop")]
    return [word for place in places for word in place.items if word.text]


def flag_values(container: Node, flag: str) -> list[Node]:
    """What a container's command gives for a flag, as `--flag value` or as `--flag=value`."""
    words, found = commands(container), []
    for index, word in enumerate(words):
        if word.text == flag:
            found += words[index + 1 : index + 2]
        elif word.text.startswith(f"{flag}="):
            found.append(Node(word.document, word.path, word.text.removeprefix(f"{flag}=")))
    return found


def environment(container: Node) -> list[Node]:
    """The entries of `env`."""
    return container.at("env").items


def environment_value(container: Node, name: str) -> Node | None:
    """The value's place, by the last entry of that name."""
    found = [entry for entry in environment(container) if entry.at("name").text == name]
    return found[-1].at("value") if found else None


def runs_by_shell(container: Node) -> bool:
    """`sh -c` or the like stands between the kubelet and the program."""
    words = container.at("command").items + container.at("args").items
    return bool(words) and _SHELL.match(words[0].text) is not None


def find_workloads(document: Document) -> list[Workload]:
    """Every pod template of a document."""
    root = document.root
    spec = root.at("spec")
    nothing = Node(document, (), None)
    found: list[tuple[str, Node, Node, Node]] = []  # operator, job, template, replica
    kind = document.kind
    if kind == "Job":
        found = [("", spec, spec.at("template"), nothing)]
    elif kind == "CronJob":
        job = spec.at("jobTemplate", "spec")
        found = [("", job, job.at("template"), nothing)]
    elif kind == "JobSet":
        found = _of_set(spec, "jobset")
    elif kind in RUNTIMES:
        found = _of_set(spec.at("template", "spec"), "trainer")
    elif kind == "PyTorchJob":
        replicas = [place for _, place in spec.at("pytorchReplicaSpecs").fields]
        found = [("training-operator", nothing, r.at("template"), r) for r in replicas]
    elif kind in ("RayJob", "RayCluster"):
        cluster = spec.at("rayClusterSpec") if kind == "RayJob" else spec
        groups = [cluster.at("headGroupSpec"), *cluster.at("workerGroupSpecs").items]
        found = [("ray", nothing, g.at("template"), g) for g in groups if g.exists]
    elif kind in _SERVERS:
        found = [("", nothing, spec.at("template"), nothing)]
    elif kind == "Pod":
        found = [("", nothing, root, nothing)]
    return [
        Workload(
            document=document,
            operator=operator,
            job=job,
            template=template,
            replica=replica,
            role=_role(document, job, template, replica),
        )
        for operator, job, template, replica in found
    ]


def _of_set(spec: Node, operator: str) -> list[tuple[str, Node, Node, Node]]:
    return [
        (operator, r.at("template", "spec"), r.at("template", "spec", "template"), r)
        for r in spec.at("replicatedJobs").items
    ]


def _role(document: Document, job: Node, template: Node, replica: Node) -> Role:
    if document.kind in (*_SERVERS, "CronJob", "Pod"):
        return Role.OTHER
    component = template.at("metadata", "labels", COMPONENT).text
    name = replica.at("name").text
    words = [w.text for c in template.at("spec", "containers").items for w in commands(c)]
    runs = next((after for word, after in pairwise(words) if _is_us(word)), "")
    if component == "coordinator" or name.startswith("coord") or runs == "coordinator":
        return Role.COORDINATOR
    if component in ("agent", "worker") or _WORKER_NAMES.match(name) or runs == "agent":
        return Role.WORKER
    if document.kind == "PyTorchJob":
        return Role.WORKER
    completions = job.at("completions").number
    if document.kind != "RayJob" and completions is not None and completions > 1:
        return Role.WORKER
    devices = [
        requested(c, resource)
        for c in template.at("spec", "containers").items
        for resource in (GPU, EFA)
    ]
    return Role.WORKER if any(devices) else Role.OTHER


def _is_us(word: str) -> bool:
    return word == "stepfast" or word.endswith("/stepfast")
