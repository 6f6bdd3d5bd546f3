"""The two kinds of pods: the coordinator's, and a node's.

Owns: their containers, command lines, volumes and security. Does not own: what makes pods
(`manifest`). Invariants: no shell anywhere; a pod meets the `restricted` standard; requests equal
limits; a container restarts in its pod unless its exit code says that this would not help.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepfast.errors import EXIT_FINISHED, EXIT_NODE_UNFIT, EXIT_USER_ERROR
from stepfast.k8s.environment import NVLS
from stepfast.k8s.instances import INSTANCE_LABEL, ZONE_LABEL
from stepfast.k8s.job_file import JobFile
from stepfast.k8s.profiles import Profile

PORT = 7070  # agents connect to the coordinator here
METRICS_PORT = 7071  # /livez, /healthz and /metrics of each process
METRICS = "metrics"  # the port's name
COORDINATOR, AGENT = "coordinator", "agent"  # components, as labels name them
COORDINATOR_JOB, NODE_JOB = "coord", "node"
NODE_CONTAINER = "node"  # Kubeflow Trainer looks for this name
_GRACE_COORDINATOR_S = 30
_HOSTNAME_LABEL = "kubernetes.io/hostname"
_GPU, _EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
_TOKEN_DIRECTORY, _JOB_DIRECTORY, _MEMORY_DIRECTORY = "/etc/stepfast/token", "/job", "/snapshots"
_CHECKPOINT_DIRECTORY = "/checkpoints"
_TMP = "/tmp"  # noqa: S108 - a volume of the pod's own
_MIB = 1 << 20
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
    given = job.table_settings
    settings = job.settings | {name: given[name] for name in given if name.startswith("slo_")}
    if job.engine != "stepfast":
        settings["engine"] = job.engine
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
        f"--metrics-port={METRICS_PORT}",
        f"--token-file={_TOKEN_FILE}",
        "--replaceable",
        *_flags(settings),
    ]


def agent_command(job: JobFile, coordinator_host: str) -> list[str]:
    """`stepfast agent ...`; Kubernetes puts in the index and the pod's address."""
    given, asked = job.table_settings, job.resources
    health = {name: given[name] for name in given if name.startswith("health_")}
    if asked.gpus:
        health["health_gpus"] = asked.gpus
    if asked.efa:
        health["health_efas"] = asked.efa
    return [
        "stepfast",
        "agent",
        f"--coordinator={coordinator_host}:{PORT}",
        "--node=$(JOB_COMPLETION_INDEX)",
        "--host=$(POD_IP)",
        f"--join-limit-s={job.join_limit_s}",
        f"--metrics-port={METRICS_PORT}",
        f"--token-file={_TOKEN_FILE}",
        *_flags(health),
        _literal(job.script),
        *(_literal(arg) for arg in job.args),
    ]


def coordinator_pod(job: JobFile, profile: Profile) -> Object:
    """The template of the coordinator's pod: small, and without a GPU."""
    container: Object = {
        **_container(COORDINATOR, job, coordinator_command(job)),
        "env": [*_downward(profile), *_plain({"HOME": _TMP, "USER": "stepfast"})],
        "ports": [_port(COORDINATOR, PORT), _port(METRICS, METRICS_PORT)],
        **_probes(startup_s=120),
        **_restarts(profile, EXIT_FINISHED, EXIT_USER_ERROR),
        "resources": _twice({"cpu": "1", "memory": "2Gi", "ephemeral-storage": "2Gi"}),
        "volumeMounts": [*_mounts(job), _job_mount(job)],
    }
    spec = {
        **_pod(job, profile, role=COORDINATOR_JOB, grace_s=_GRACE_COORDINATOR_S),
        **_coordinator_placement(job),
        "containers": [container],
        "volumes": _volumes(job, disk_gib=1),
    }
    return {"metadata": _metadata(job, COORDINATOR), "spec": spec}


def node_pod(job: JobFile, profile: Profile, coordinator_host: str) -> Object:
    """The template of a node's pod: the agent is its first process, and starts the ranks."""
    container: Object = {
        **_container(NODE_CONTAINER, job, agent_command(job, coordinator_host)),
        "env": [*_downward(profile), *_plain(_environment(job)), *_secrets(job)],
        "ports": [_port(METRICS, METRICS_PORT)],
        **_probes(startup_s=600),
        **_restarts(profile, EXIT_FINISHED, EXIT_USER_ERROR, EXIT_NODE_UNFIT),
        "resources": _twice(_node_resources(job)),
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
        "volumes": [*volumes, *_volumes(job, disk_gib=job.nodes.ephemeral_gib)],
    }
    metadata = _metadata(job, AGENT)
    metadata["annotations"] |= {
        "stepfast.dev/snapshot-bytes": str(job.snapshot_mib * _MIB),
        "stepfast.dev/working-set-bytes": str(job.working_mib * _MIB),
        "stepfast.dev/flush-seconds": str(job.storage.flush_s),
    }
    return {"metadata": metadata, "spec": spec}


def _checkpoints(job: JobFile) -> str:
    if job.storage.claim:
        return _CHECKPOINT_DIRECTORY
    return f"{job.storage.s3.rstrip('/')}/{job.name}"


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """A flag for each value; lists are of those that may be repeated."""
    return [
        _literal(f"--{name.replace('_', '-')}={each}")
        for name, value in sorted(settings.items())
        for each in (value if isinstance(value, list) else [value])
    ]


def _literal(text: str) -> str:
    """As a container gets it: Kubernetes expands $(NAME) in commands and values."""
    return text.replace("$(", "$$(")


def _container(name: str, job: JobFile, command: list[str]) -> Object:
    """What containers of both kinds have alike."""
    return {
        "name": name,
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


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


def _port(name: str, number: int) -> Object:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probes(*, startup_s: int) -> Object:
    """They ask the process itself, never how training gets on. An agent may take long to start: it
    looks at its node first.
    """

    def probe(path: str, *, period_s: int, failures: int) -> Object:
        return {
            "httpGet": {"path": path, "port": METRICS},
            "periodSeconds": period_s,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe("/livez", period_s=5, failures=startup_s // 5),
        "readinessProbe": probe("/healthz", period_s=5, failures=3),
        "livenessProbe": probe("/livez", period_s=10, failures=6),
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
        found[NVLS] = "0"  # its in-process restart asks for it
    return found | job.env


def _plain(variables: dict[str, str]) -> list[Object]:
    return [{"name": name, "value": _literal(text)} for name, text in sorted(variables.items())]


def _secrets(job: JobFile) -> list[Object]:
    found: list[Object] = []
    for name, place in sorted(job.secrets.items()):
        secret, _, key = place.partition("/")
        reference = {"name": secret, "key": key}
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _mounts(job: JobFile) -> list[Object]:
    """Those of both kinds of pods."""
    found: list[Object] = [
        {"name": "token", "mountPath": _TOKEN_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": _TMP},
    ]
    if job.storage.claim:
        found.append(
            {
                "name": "checkpoints",
                "mountPath": _CHECKPOINT_DIRECTORY,
                "subPath": f"{job.name}/checkpoints",
            }
        )
    return found


def _job_mount(job: JobFile) -> Object:
    """Where the coordinator's journal goes: with shared storage it outlives the pod."""
    if job.storage.claim:
        return {"name": "checkpoints", "mountPath": _JOB_DIRECTORY, "subPath": f"{job.name}/job"}
    return {"name": "job", "mountPath": _JOB_DIRECTORY}


def _volumes(job: JobFile, *, disk_gib: int) -> list[Object]:
    found: list[Object] = [
        {"name": "job", "emptyDir": {"sizeLimit": f"{disk_gib}Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": f"{disk_gib}Gi"}},
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
    """Rather not on a node of the job, and never on one with its GPUs: they would go together."""
    mine = {"matchLabels": labels_of(job, AGENT)}
    term = {"topologyKey": _HOSTNAME_LABEL, "labelSelector": mine}
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    affinity: Object = {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    }
    if job.nodes.instance:
        other = {"key": INSTANCE_LABEL, "operator": "NotIn", "values": [job.nodes.instance]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [other]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return {"affinity": affinity}


def _node_placement(job: JobFile) -> Object:
    """One pod a node, all in one zone: EFA and the network between zones are no match."""
    placement, mine = job.placement, {"matchLabels": labels_of(job, AGENT)}
    selector = dict(placement.node_selector)
    if job.nodes.instance:
        selector[INSTANCE_LABEL] = job.nodes.instance
    if placement.zone:
        selector[ZONE_LABEL] = placement.zone
    apart = [{"topologyKey": _HOSTNAME_LABEL, "labelSelector": mine}]
    apart_rule = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    affinity: Object = {"podAntiAffinity": apart_rule}
    near: Object = {}
    if not placement.zone:
        together = [{"topologyKey": ZONE_LABEL, "labelSelector": mine}]
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
