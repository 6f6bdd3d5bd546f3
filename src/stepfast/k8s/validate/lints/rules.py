"""All rules: 25 in the order of the checklist, then what API servers refuse beyond schemas.

Owns: their names and promises. Does not own: what they look at.
Invariant: a name never changes its meaning; users write it into their pipelines.
"""

from __future__ import annotations

from stepfast.k8s.validate.lints.admission import jobset_admission, trainer_admission
from stepfast.k8s.validate.lints.content import images, storage
from stepfast.k8s.validate.lints.job_admission import job_admission
from stepfast.k8s.validate.lints.lifecycle import lifecycle, observability
from stepfast.k8s.validate.lints.memory import memory_volumes, quality_of_service
from stepfast.k8s.validate.lints.names import addressing, names, node_index
from stepfast.k8s.validate.lints.placement import disruption, placement
from stepfast.k8s.validate.lints.restarts import (
    exit_codes,
    infra_faults,
    one_pod_per_index,
    restart_in_place,
)
from stepfast.k8s.validate.lints.roles import coordinator_role, probes, termination
from stepfast.k8s.validate.lints.schema_rule import is_object
from stepfast.k8s.validate.lints.security import access, pod_security
from stepfast.k8s.validate.lints.shape import devices, hugepages, shape
from stepfast.k8s.validate.lints.variables import variables
from stepfast.k8s.validate.scene import Lint, Rule

SCHEMA = "schema"

_CHECKS: tuple[tuple[str, Lint, str], ...] = (
    (SCHEMA, is_object, "valid by the schemas of these versions; no unknown or double field"),
    ("names", names, "every derived name fits into DNS and stands once"),
    ("node-index", node_index, "a pod knows its index from Kubernetes, and waits without sleeps"),
    ("addressing", addressing, "every pod has a DNS name that outlives it"),
    ("shape", shape, "an Indexed Job, all at once, a whole node for each pod"),
    ("devices", devices, "GPUs and EFA devices as the instance type has them"),
    ("quality-of-service", quality_of_service, "Guaranteed, and within what a node can give"),
    ("memory-volumes", memory_volumes, "what is kept in memory is bounded, counted, big enough"),
    ("pod-security", pod_security, "the level `restricted` admits the pod"),
    ("hugepages", hugepages, "huge pages where EFA uses them, and nowhere else"),
    ("environment", variables, "no variable that the platform or the operator sets better"),
    ("restart-in-place", restart_in_place, "a container that dies starts again in its pod"),
    ("exit-codes", exit_codes, "what ends the job and what moves a pod are told apart"),
    ("infra-faults", infra_faults, "no number of lost nodes ends the run"),
    ("one-pod-per-index", one_pod_per_index, "never two pods of one index"),
    ("coordinator-role", coordinator_role, "the coordinator is small, apart, and comes back"),
    ("termination", termination, "SIGTERM reaches the program, with time for its flush"),
    ("probes", probes, "probes ask the agent, never the training's progress"),
    ("placement", placement, "one zone, one pod for each node, no node that is known bad"),
    ("disruption", disruption, "evictions take one node at a time, or none"),
    ("images", images, "by digest, and nothing is fetched on the way to a recovery"),
    ("access", access, "an account for each role, no token, no secret in a file"),
    ("storage", storage, "what has to last is on a volume that lasts, one run apart from others"),
    ("observability", observability, "metrics, labels, and a pod that knows where it is"),
    ("lifecycle", lifecycle, "applied twice is the same, deleted leaves nothing"),
    ("job-admission", job_admission, "batch/v1 and core/v1 accept the Job and its pods"),
    ("jobset-admission", jobset_admission, "the JobSet's webhook accepts it"),
    ("trainer-admission", trainer_admission, "Kubeflow Trainer's webhooks accept it"),
)
CHECKLIST = 25  # so many rules are the checklist's; the others are of admission
RULES = tuple(
    Rule(number=number, name=name, promise=promise, check=check)
    for number, (name, check, promise) in enumerate(_CHECKS, start=1)
)
