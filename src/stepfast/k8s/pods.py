"""The two kinds of pods: the coordinator's, and a node's.

Owns: their containers, command lines, volumes and security. Does not own: what makes pods
(`manifest`). Invariants: no shell anywhere; a pod meets the `restricted` standard; requests equal
limits; a container restarts in its pod unless its exit code says that this would not help.
"""

from __future__ import annotations

from typing import Any

from stepfast.errors import EXIT_FINISHED, EXIT_NODE_UNFIT, EXIT_USER_ERROR
from stepfast.k8s.job_file import JobFile
from stepfast.k8s.profiles import Profile

PORT = 7070
COORDINATOR, AGENT = "coordinator", "agent"  # components, as labels name them
COORDINATOR_JOB, NODE_JOB = "coord", "node"
NODE_CONTAINER = "node"  # Kubeflow Trainer looks for this name
_GRACE_COORDINATOR_S = 30
_GPU, _EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
_TOKEN_DIRECTORY, _JOB_DIRECTORY, _MEMORY_DIRECTORY = "/etc/stepfast/token", "/job", "/snapshots"
_CHECKPOINT_DIRECTORY = "/checkpoints"
_TMP = "/tmp"  # noqa: S108 - a volume of the pod's own
_TOKEN_FILE = f"{_TOKEN_DIRECTORY}/token"

Object = dict[str, Any]


def labels_of(job: JobFile, component: str) -> dict[str, str]:
    """By which selectors find this job's pods of one kind."""
    return {
        "app.kubernetes.io/name": "stepfast",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def coordinator_command(job: JobFile) -> list[str]:
    """`stepfast coordinator ...`; the device is given, for the coordinator's own node has none."""
    settings = [f"--{key.replace('_', '-')}={value}" for key, value in sorted(job.settings.items())]
    return [
        "stepfast",
        "coordinator",
        f"--nodes={job.nodes.count}",
        f"--nproc-per-node={job.ranks}",
        f"--job-id={job.name}",
        f"--job-dir={_JOB_DIRECTORY}",
        f"--memory-dir={_MEMORY_DIRECTORY}",
        f"--checkpoints={_checkpoints(job)}",
        f"--device={'cuda' if job.resources.gpus else 'cpu'}",
        f"--join-limit-s={job.join_limit_s}",
        f"--listen=0.0.0.0:{PORT}",
        f"--token-file={_TOKEN_FILE}",
        *settings,
    ]


def agent_command(job: JobFile, coordinator_host: str) -> list[str]:
    """`stepfast agent ...`; Kubernetes puts in the index and the pod's address."""
    return [
        "stepfast",
        "agent",
        f"--coordinator={coordinator_host}:{PORT}",
        "--node=$(JOB_COMPLETION_INDEX)",
        "--host=$(POD_IP)",
        f"--join-limit-s={job.join_limit_s}",
        f"--token-file={_TOKEN_FILE}",
        job.script,
        *(_literal(arg) for arg in job.args),
    ]


def coordinator_pod(job: JobFile, profile: Profile) -> Object:
    """The template of the coordinator's pod: small, and without a GPU."""
    container: Object = {
        "name": COORDINATOR,
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "command": coordinator_command(job),
        "env": [*_downward(profile), *_plain({"HOME": _TMP, "USER": "stepfast"})],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "startupProbe": _probe(period_s=2, failures=60),
        "readinessProbe": _probe(period_s=5, failures=3),
        "livenessProbe": _probe(period_s=10, failures=6),
        **_restarts(profile, EXIT_FINISHED, EXIT_USER_ERROR),
        "resources": _twice({"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *_mounts(job),
            _job_mount(job),
        ],
    }
    spec = {
        **_pod(job, profile, role=COORDINATOR_JOB, grace_s=_GRACE_COORDINATOR_S),
        **_coordinator_placement(job),
        "containers": [container],
        "volumes": _volumes(job),
    }
    return {"metadata": _metadata(job, COORDINATOR), "spec": spec}


def node_pod(job: JobFile, profile: Profile, coordinator_host: str) -> Object:
    """The template of a node's pod: the agent is its first process, and starts the ranks."""
    container = {
        "name": NODE_CONTAINER,
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "command": agent_command(job, coordinator_host),
        "env": [*_downward(profile), *_plain(_environment(job))],
        **_restarts(profile, EXIT_FINISHED, EXIT_USER_ERROR, EXIT_NODE_UNFIT),
        "resources": _twice(_node_resources(job)),
        "securityContext": _container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *_mounts(job),
            {"name": "job", "mountPath": _JOB_DIRECTORY},
            {"name": "snapshots", "mountPath": _MEMORY_DIRECTORY},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    memory = {
        "snapshots": f"{job.snapshot_mib}Mi",
        "shm": f"{job.model.shm_gib}Gi",
    }
    volumes = [
        {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        for name, size in memory.items()
    ]
    spec = {
        **_pod(job, profile, role=NODE_JOB, grace_s=job.grace_s),
        **_node_placement(job),
        "containers": [container],
        "volumes": [*volumes, *_volumes(job)],
    }
    return {"metadata": _metadata(job, AGENT), "spec": spec}


def _checkpoints(job: JobFile) -> str:
    if job.storage.claim:
        return _CHECKPOINT_DIRECTORY
    return f"{job.storage.s3.rstrip('/')}/{job.name}"


def _literal(text: str) -> str:
    """As a container gets it: Kubernetes expands $(NAME) in commands and values."""
    return text.replace("$(", "$$(")


def _metadata(job: JobFile, component: str) -> Object:
    return {
        "labels": labels_of(job, component),
        "annotations": {"karpenter.sh/do-not-disrupt": "true"},
    }


def _pod(job: JobFile, profile: Profile, *, role: str, grace_s: int) -> Object:
    placement = job.placement
    priority = {"priorityClassName": placement.priority_class} if placement.priority_class else {}
    subdomain = {"subdomain": job.name} if profile.kind == "job" else {}  # else JobSet's
    return {
        "restartPolicy": "Never" if profile.restarts_by_rule else "OnFailure",
        "terminationGracePeriodSeconds": grace_s,
        "serviceAccountName": f"{job.name}-{role}",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **priority,
        **subdomain,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user_id,
            "runAsGroup": job.user_id,
            "fsGroup": job.user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _restarts(profile: Profile, *final_codes: int) -> Object:
    if not profile.restarts_by_rule:
        return {}
    exits = {"operator": "NotIn", "values": list(final_codes)}
    return {
        "restartPolicy": "Never",
        "restartPolicyRules": [{"action": "Restart", "exitCodes": exits}],
    }


def _container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probe(*, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": "/healthz", "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5 if period_s >= 5 else 1,
        "failureThreshold": failures,
    }


def _twice(resources: Object) -> Object:
    return {"requests": dict(resources), "limits": dict(resources)}


def _node_resources(job: JobFile) -> Object:
    asked = job.resources
    found: Object = {
        "cpu": str(asked.cpus),
        "memory": f"{asked.memory_gib}Gi",
        "ephemeral-storage": f"{job.nodes.ephemeral_gib}Gi",
    }
    if asked.gpus:
        found[_GPU] = str(asked.gpus)
    if asked.efa:
        found[_EFA] = str(asked.efa)
    return found


def _downward(profile: Profile) -> list[Object]:
    fields = {
        "POD_IP": "status.podIP",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "NODE_NAME": "spec.nodeName",
        "JOB_COMPLETION_INDEX": (
            "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        ),
    }
    if profile.kind != "job":
        fields["JOBSET_RESTART_ATTEMPT"] = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]


def _environment(job: JobFile) -> dict[str, str]:
    found = {"HOME": _TMP, "USER": "stepfast", "HF_HUB_OFFLINE": "1"}
    if job.resources.gpus:
        found["NCCL_DEBUG"] = "WARN"
    if job.resources.efa:
        found["FI_EFA_USE_HUGE_PAGE"] = "0"  # with huge pages, forks fail when they run out
    if job.engine == "nvrx":
        found["NCCL_NVLS_ENABLE"] = "0"  # its in-process restart asks for it
    return found | job.env


def _plain(variables: dict[str, str]) -> list[Object]:
    return [{"name": name, "value": _literal(text)} for name, text in sorted(variables.items())]


def _mounts(job: JobFile) -> list[Object]:
    """Those of both kinds of pods."""
    found: list[Object] = [
        {"name": "token", "mountPath": _TOKEN_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": _TMP},
    ]
    if job.storage.claim:
        found.append({
            "name": "checkpoints",
            "mountPath": _CHECKPOINT_DIRECTORY,
            "subPath": f"{job.name}/checkpoints",
        })
    return found


def _job_mount(job: JobFile) -> Object:
    """Where the coordinator's journal goes: with shared storage it outlives the pod."""
    if job.storage.claim:
        return {"name": "checkpoints", "mountPath": _JOB_DIRECTORY, "subPath": f"{job.name}/job"}
    return {"name": "job", "mountPath": _JOB_DIRECTORY}


def _volumes(job: JobFile) -> list[Object]:
    found: list[Object] = [
        {"name": "job", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {
            "name": "token",
            "secret": {
                "secretName": f"{job.name}-token",
                "defaultMode": 0o440,
                "items": [{"key": "token", "path": "token"}],
            },
        },
    ]
    if job.storage.claim:
        claim = {"claimName": job.storage.claim}
        found.append({"name": "checkpoints", "persistentVolumeClaim": claim})
    return found


def _coordinator_placement(job: JobFile) -> Object:
    if not job.nodes.instance:
        return {}
    other = {
        "key": "node.kubernetes.io/instance-type",
        "operator": "NotIn",
        "values": [job.nodes.instance],
    }
    terms = {"nodeSelectorTerms": [{"matchExpressions": [other]}]}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    }


def _node_placement(job: JobFile) -> Object:
    """One pod a node, all in one zone: EFA and the network between zones are no match."""
    placement, mine = job.placement, {"matchLabels": labels_of(job, AGENT)}
    selector = dict(placement.node_selector)
    if job.nodes.instance:
        selector["node.kubernetes.io/instance-type"] = job.nodes.instance
    if placement.zone:
        selector["topology.kubernetes.io/zone"] = placement.zone
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": mine}]
    apart_rule = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    affinity: Object = {"podAntiAffinity": apart_rule}
    near: Object = {}
    if not placement.zone:
        together = [{"topologyKey": "topology.kubernetes.io/zone", "labelSelector": mine}]
        near["requiredDuringSchedulingIgnoredDuringExecution"] = together
    if placement.topology_key:
        term = {"topologyKey": placement.topology_key, "labelSelector": mine}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        near["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    if near:
        affinity["podAffinity"] = near
    found: Object = {"affinity": affinity}
    if selector:
        found["nodeSelector"] = dict(sorted(selector.items()))
    if job.resources.gpus:
        found["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return found
