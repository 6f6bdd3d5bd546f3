"""A job file as the objects that a cluster takes.

Owns: which objects, and how Jobs treat pods that end. Does not own: the pods (`pods`), the text
(`render`). Pure: the same job and profile give the same objects, in the same order.
Invariants: the fault of a node or a container never ends the job; the exit code of the user's own
error does, where the profile has rules for it; there are never two pods of one index.
"""

from __future__ import annotations

from stepfast.errors import EXIT_NODE_UNFIT, EXIT_USER_ERROR
from stepfast.k8s.job_file import JobFile
from stepfast.k8s.pods import (
    AGENT,
    COORDINATOR,
    COORDINATOR_JOB,
    METRICS,
    METRICS_PORT,
    NODE_CONTAINER,
    NODE_JOB,
    PORT,
    Object,
    coordinator_pod,
    labels_of,
    node_pod,
)
from stepfast.k8s.profiles import Profile

_KEPT_S = 86_400  # a finished job can be looked at for a day
_RESTARTS_MAX = 4  # of the whole JobSet: the last resort, for it loses all memory
_FAILURES_PER_INDEX_MAX = 1000
_BACKOFF_LIMIT = 1_000_000  # restarts of containers count where the pod restarts them itself
_TRAINER_API = "trainer.kubeflow.org"


def manifest(job: JobFile, profile: Profile) -> list[Object]:
    """Every object of the job, in the order in which they are applied."""
    workload = {"jobset": _jobset, "job": _jobs, "trainjob": _trainjob}[profile.kind]
    return [
        _service_account(job, COORDINATOR_JOB, COORDINATOR),
        _service_account(job, NODE_JOB, AGENT),
        *_network_policies(job),
        _disruption_budget(job),
        *_pod_monitor(job),
        *workload(job, profile),
    ]


def coordinator_host(job: JobFile, profile: Profile) -> str:
    """The coordinator's name in DNS, as pods of its namespace find it: it stays when its pod is
    replaced, the address does not.
    """
    index = "0" if profile.kind == "job" else "0-0"
    pod = f"{job.name}-{COORDINATOR_JOB}-{index}"
    return f"{pod}.{job.name}"


# ------------------------------------------------------------------------------- workloads


def _jobset(job: JobFile, profile: Profile) -> list[Object]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _workload_metadata(job, job.name),
            "spec": _jobset_spec(job, profile),
        }
    ]


def _jobset_spec(job: JobFile, profile: Profile) -> Object:
    policy: Object = {"maxRestarts": _RESTARTS_MAX, "restartStrategy": "BlockingRecreate"}
    if profile.restarts_by_rule:
        fatal = {
            "name": "userError",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"exit code {EXIT_USER_ERROR} "],
        }
        policy["rules"] = [fatal]
    roles = [
        (COORDINATOR_JOB, COORDINATOR, _coordinator_job(job, profile)),
        (NODE_JOB, AGENT, _node_job(job, profile)),
    ]
    return {
        "ttlSecondsAfterFinished": _KEPT_S,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [NODE_JOB]},
        "failurePolicy": policy,
        "replicatedJobs": [
            {
                "name": name,
                "replicas": 1,
                "template": {"metadata": {"labels": labels_of(job, component)}, "spec": spec},
            }
            for name, component, spec in roles
        ],
    }


def _jobs(job: JobFile, profile: Profile) -> list[Object]:
    """Without an operator: a Service for the names, a Job for each kind of pod."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _instance(job),
            "ports": [_service_port(COORDINATOR, PORT), _service_port(METRICS, METRICS_PORT)],
        },
    }
    roles = [
        (COORDINATOR_JOB, _coordinator_job(job, profile)),
        (NODE_JOB, _node_job(job, profile)),
    ]
    return [
        service,
        *(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": _workload_metadata(job, f"{job.name}-{name}"),
                "spec": {"ttlSecondsAfterFinished": _KEPT_S, **spec},
            }
            for name, spec in roles
        ),
    ]


def _trainjob(job: JobFile, profile: Profile) -> list[Object]:
    """A runtime of the job's own, and the TrainJob that uses it. No torch policy: agents meet by
    themselves. None of the fields that came or went between Trainer 2.0 and 2.3 is used.
    """
    spec = _jobset_spec(job, profile)
    # Trainer makes a JobSet that expired anew, with all its restarts before it (trainer#3779).
    del spec["ttlSecondsAfterFinished"]
    node = spec["replicatedJobs"][1]["template"]["metadata"]["labels"]
    node[f"{_TRAINER_API}/trainjob-ancestor-step"] = "trainer"
    metadata = _metadata(job, job.name)
    metadata["labels"] = metadata["labels"] | {f"{_TRAINER_API}/framework": "torch"}
    runtime = {
        "apiVersion": f"{_TRAINER_API}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {"mlPolicy": {"numNodes": job.nodes.count}, "template": {"spec": spec}},
    }
    reference = {"apiGroup": _TRAINER_API, "kind": "TrainingRuntime", "name": job.name}
    train = {
        "apiVersion": f"{_TRAINER_API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _workload_metadata(job, job.name),
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": job.nodes.count}},
    }
    return [runtime, train]


def _coordinator_job(job: JobFile, profile: Profile) -> Object:
    return {
        **_job_policy(profile, COORDINATOR, pods=1),
        "template": coordinator_pod(job, profile),
    }


def _node_job(job: JobFile, profile: Profile) -> Object:
    return {
        **_job_policy(profile, NODE_CONTAINER, pods=job.nodes.count),
        "template": node_pod(job, profile, coordinator_host(job, profile)),
    }


def _job_policy(profile: Profile, container: str, *, pods: int) -> Object:
    """With rules a pod that ends is replaced by itself, with a delay of its own; without, the pod
    restarts its container, and Kubernetes takes neither rules nor limits for each index.
    """
    policy: Object = {"completionMode": "Indexed", "completions": pods, "parallelism": pods}
    if not profile.restarts_by_rule:
        return {**policy, "backoffLimit": _BACKOFF_LIMIT, "podReplacementPolicy": "Failed"}

    def on_exit(action: str, code: int) -> Object:
        exits = {"containerName": container, "operator": "In", "values": [code]}
        return {"action": action, "onExitCodes": exits}

    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        on_exit("FailJob", EXIT_USER_ERROR),
        {"action": "Ignore", "onPodConditions": [disrupted]},
    ]
    if container == NODE_CONTAINER:
        rules.append(on_exit("Count", EXIT_NODE_UNFIT))
    return {
        **policy,
        "backoffLimitPerIndex": _FAILURES_PER_INDEX_MAX,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }


# ------------------------------------------------------------------------------- around them


def _instance(job: JobFile) -> dict[str, str]:
    return {"app.kubernetes.io/name": "stepfast", "app.kubernetes.io/instance": job.name}


def _metadata(job: JobFile, name: str) -> Object:
    return {"name": name, "namespace": job.namespace, "labels": _instance(job)}


def _workload_metadata(job: JobFile, name: str) -> Object:
    metadata = _metadata(job, name)
    if job.queue:
        metadata["labels"] = metadata["labels"] | {"kueue.x-k8s.io/queue-name": job.queue}
    return metadata


def _service_account(job: JobFile, role: str, component: str) -> Object:
    metadata = _metadata(job, f"{job.name}-{role}")
    metadata["labels"] = labels_of(job, component)
    if job.storage.role_arn and component == AGENT:  # agents alone touch the store
        metadata["annotations"] = {"eks.amazonaws.com/role-arn": job.storage.role_arn}
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": False,
    }


def _service_port(name: str, port: int) -> Object:
    return {"name": name, "port": port, "protocol": "TCP", "targetPort": port}


def _network_policies(job: JobFile) -> list[Object]:
    """Only the job's own nodes reach its coordinator and each other, only Prometheus the metrics;
    EFA passes beside them.
    """
    agents = [{"podSelector": {"matchLabels": labels_of(job, AGENT)}}]
    ingress: list[tuple[str, str, Object]] = [
        (COORDINATOR_JOB, COORDINATOR, {"from": agents, "ports": [_open(PORT)]}),
        (NODE_JOB, AGENT, {"from": agents}),  # NCCL, Gloo and stores choose their ports
    ]
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _metadata(job, f"{job.name}-{role}"),
            "spec": {
                "podSelector": {"matchLabels": labels_of(job, component)},
                "policyTypes": ["Ingress"],
                "ingress": [rule, *_metrics_ingress(job)],
            },
        }
        for role, component, rule in ingress
    ]


def _open(port: int) -> Object:
    return {"protocol": "TCP", "port": port}


def _metrics_ingress(job: JobFile) -> list[Object]:
    if job.monitoring is None:
        return []
    namespace = {"kubernetes.io/metadata.name": job.monitoring.namespace}
    readers = [{"namespaceSelector": {"matchLabels": namespace}}]
    return [{"from": readers, "ports": [_open(METRICS_PORT)]}]


def _pod_monitor(job: JobFile) -> list[Object]:
    """For Prometheus' operator, where the job says that there is one."""
    if job.monitoring is None:
        return []
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": _metadata(job, job.name),
            "spec": {
                "jobLabel": "app.kubernetes.io/instance",
                "selector": {"matchLabels": _instance(job)},
                "podMetricsEndpoints": [{"port": METRICS, "path": "/metrics"}],
            },
        }
    ]


def _disruption_budget(job: JobFile) -> Object:
    """One node at a time. A number: a Job has no scale, so percentages would refuse everything."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, f"{job.name}-{NODE_JOB}"),
        "spec": {
            "minAvailable": job.nodes.count - 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels_of(job, AGENT)},
        },
    }
