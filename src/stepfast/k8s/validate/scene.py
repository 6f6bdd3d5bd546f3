"""All documents of one validation, seen together: services and budgets belong to pods elsewhere.

Owns: the view that lints get, and what a lint hands back. Does not own: the lints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from stepfast.k8s.target import Target
from stepfast.k8s.validate.documents import Document, Node
from stepfast.k8s.validate.workload import Workload, find_workloads


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lint found: the place, why it matters, and what to write instead."""

    place: Node
    reason: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The documents, and what they are for."""

    documents: tuple[Document, ...]
    target: Target

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        """Every pod template of every document."""
        return tuple(w for document in self.documents for w in find_workloads(document))

    @property
    def training(self) -> Iterator[Workload]:
        """The parts of training jobs."""
        return (w for w in self.workloads if w.is_training)

    @property
    def workers(self) -> Iterator[Workload]:
        """Those with ranks."""
        return (w for w in self.workloads if w.is_worker)

    @property
    def coordinators(self) -> Iterator[Workload]:
        """Those that decide."""
        return (w for w in self.workloads if w.is_coordinator)

    @property
    def training_documents(self) -> list[Document]:
        """The objects that training jobs are made of, each once."""
        seen: dict[int, Document] = {id(w.document): w.document for w in self.training}
        return list(seen.values())

    def of_kind(self, *kinds: str) -> list[Document]:
        """The documents of these kinds."""
        return [document for document in self.documents if document.kind in kinds]

    def beside(self, document: Document, *kinds: str) -> list[Document]:
        """The documents of these kinds in the same namespace."""
        return [d for d in self.of_kind(*kinds) if d.namespace == document.namespace]

    def parts(self, document: Document) -> list[Workload]:
        """The workloads of one document."""
        return [w for w in self.workloads if w.document is document]


Lint = Callable[[Scene], Iterator[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One property of the checklist."""

    number: int
    name: str
    promise: str  # what holds where nothing is found
    check: Lint


def pod_labels(workload: Workload) -> dict[str, str]:
    """The labels that the pods will carry, those of the controllers included."""
    name = workload.document.name
    labels = dict(workload.labels)
    match workload.operator:
        case "jobset":
            labels |= {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": workload.replica_name,
            }
        case "trainer":  # the JobSet is called as the TrainJob, which is another document
            labels |= {"jobset.sigs.k8s.io/replicatedjob-name": workload.replica_name}
        case "training-operator":
            role = str(workload.replica.path[-1]) if workload.replica.path else ""
            labels |= {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
            }
        case "":
            if workload.document.kind == "Job":
                labels |= {"batch.kubernetes.io/job-name": name, "job-name": name}
    return labels


def selects(selector: Node, labels: dict[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    for key, value in selector.at("matchLabels").texts.items():
        if labels.get(key) != value:
            return False
    for term in selector.at("matchExpressions").items:
        values = [v.text for v in term.at("values").items]
        here = labels.get(term.at("key").text)
        match term.at("operator").text:
            case "In" if here not in values:
                return False
            case "NotIn" if here in values:
                return False
            case "Exists" if here is None:
                return False
            case "DoesNotExist" if here is not None:
                return False
    return selector.exists
