"""What our eksctl files may say: a strict model of the fields that they use, and rules over it.

The names, types and choices are those of eksctl's own JSON schema (August 2026). What eksctl has
and our files do not use is not here: it is refused until somebody looks it up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from stepfast.k8s.instances import INSTANCE_TYPES
from stepfast.k8s.validate.documents import read_documents

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1)]
_CORE_ADDONS = frozenset({"vpc-cni", "coredns", "kube-proxy", "eks-pod-identity-agent"})
_LOG_DAYS = frozenset({1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1827, 3653})
_GPU_TAINT = "nvidia.com/gpu"
_STARTUP_TAINT = "fsx.csi.aws.com/agent-not-ready"
_GPU_LABEL = ("nvidia.com/gpu.present", "true")


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A part of the file."""


class Metadata(_Part):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,99}$")]
    region: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
    version: Annotated[str, msgspec.Meta(pattern=r"^1\.\d\d$")]
    tags: dict[str, str] = {}


class Nat(_Part):
    gateway: Literal["HighlyAvailable", "Single", "Disable"]


class Endpoints(_Part):
    private_access: bool
    public_access: bool


class Vpc(_Part):
    nat: Nat
    cluster_endpoints: Endpoints
    public_access_cidrs: Texts = msgspec.field(name="publicAccessCIDRs")


class AccessConfig(_Part):
    authentication_mode: Literal["API", "API_AND_CONFIG_MAP", "CONFIG_MAP"]


class PodIdentity(_Part):
    namespace: Text
    service_account_name: Text
    permission_policy_arns: Texts = msgspec.field(name="permissionPolicyARNs")
    role_name: str = ""


class AddonIdentity(_Part):
    service_account_name: Text  # no namespace: it is the add-on's
    permission_policy_arns: Texts = msgspec.field(name="permissionPolicyARNs")


class Iam(_Part):
    pod_identity_associations: list[PodIdentity] = []


class Addon(_Part):
    name: Text
    version: str = ""
    configuration_values: str = ""  # JSON, whose fields are the add-on's own
    pod_identity_associations: list[AddonIdentity] = []


class Taint(_Part):
    key: Text
    value: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class ReservationTarget(_Part):
    # Exactly so: `capacityReservationId` is dropped by eksctl, and any capacity is asked for.
    capacity_reservation_id: Annotated[str, msgspec.Meta(pattern=r"^cr-[0-9a-f]{17}$")] = (
        msgspec.field(name="capacityReservationID")
    )


class Reservation(_Part):
    capacity_reservation_target: ReservationTarget


class Market(_Part):
    market_type: Literal["capacity-block"]


class Repair(_Part):
    enabled: Literal[True]
    max_parallel_nodes_repaired_count: Annotated[int, msgspec.Meta(ge=1)]
    max_unhealthy_node_threshold_percentage: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


class Update(_Part):
    max_unavailable: Annotated[int, msgspec.Meta(ge=1)]


class NodeGroup(_Part):
    name: Text
    instance_type: Text
    ami_family: Literal["AmazonLinux2023"]
    availability_zones: Texts
    desired_capacity: Count
    min_size: Count
    max_size: Count
    private_networking: Literal[True]
    disable_pod_imds: Literal[True] = msgspec.field(name="disablePodIMDS")
    volume_size: Annotated[int, msgspec.Meta(ge=80)]
    volume_encrypted: Literal[True]
    node_repair_config: Repair
    labels: dict[str, str] = {}
    taints: list[Taint] = []
    efa_enabled: bool = False
    capacity_reservation: Reservation | None = None
    instance_market_options: Market | None = None
    update_config: Update | None = None
    override_bootstrap_command: str = ""


class ClusterLogging(_Part):
    enable_types: list[Literal["api", "audit", "authenticator", "controllerManager", "scheduler"]]
    log_retention_in_days: int


class CloudWatch(_Part):
    cluster_logging: ClusterLogging


class ClusterConfig(_Part):
    api_version: Literal["eksctl.io/v1alpha5"]
    kind: Literal["ClusterConfig"]
    metadata: Metadata
    managed_node_groups: Annotated[list[NodeGroup], msgspec.Meta(min_length=1)]
    availability_zones: list[Text] = []
    vpc: Vpc | None = None
    access_config: AccessConfig | None = None
    iam: Iam = Iam()
    addons: list[Addon] = []
    cloud_watch: CloudWatch | None = None


class LocalStorage(_Part):
    strategy: Literal["RAID0", "RAID10", "Mount"]


class InstanceOptions(_Part):
    local_storage: LocalStorage


class CrashLoop(_Part):
    max_container_restart_period: Annotated[str, msgspec.Meta(pattern=r"^\d+s$")]


class KubeletConfig(_Part):
    single_process_oom_kill: bool = msgspec.field(name="singleProcessOOMKill")
    crash_loop_back_off: CrashLoop


class Kubelet(_Part):
    config: KubeletConfig


class NodeConfigSpec(_Part):
    instance: InstanceOptions
    kubelet: Kubelet


class NodeConfig(_Part):
    api_version: Literal["node.eks.aws/v1alpha1"]
    kind: Literal["NodeConfig"]
    spec: NodeConfigSpec


def one_document(content: bytes) -> Any:
    """The only YAML document in `content`. Raises ValueError where it is none, or repeats a key."""
    documents, problems = read_documents("file", content)
    if problems:
        raise ValueError("; ".join(problem.reason for problem in problems))
    (document,) = documents
    return document.value


def read_cluster(content: bytes) -> ClusterConfig:
    """The file. Raises ValueError (msgspec's, with the place) for what is not in the model."""
    return msgspec.convert(one_document(content), ClusterConfig)


def complaints(config: ClusterConfig) -> Iterator[str]:
    """What the types cannot say."""
    for addon in config.addons:
        if addon.name not in _CORE_ADDONS and not re.fullmatch(r"v\d+\.\d+\.\d+", addon.version):
            yield f"add-on {addon.name} has no version"
        if addon.name == "vpc-cni" and not _keeps_network_policies(addon):
            yield "NetworkPolicies are taken and not kept: enableNetworkPolicy is missing"
    needs_agent = config.iam.pod_identity_associations or any(
        addon.pod_identity_associations for addon in config.addons
    )
    if needs_agent and "eks-pod-identity-agent" not in [addon.name for addon in config.addons]:
        yield "associations without the add-on eks-pod-identity-agent"
    if config.vpc and "0.0.0.0/0" in config.vpc.public_access_cidrs:
        yield "everybody may reach the API"
    if config.cloud_watch:
        days = config.cloud_watch.cluster_logging.log_retention_in_days
        if days not in _LOG_DAYS:
            yield f"CloudWatch keeps no logs for {days} days"
    if config.availability_zones and len(set(config.availability_zones)) < 2:
        yield "a control plane needs two zones"
    for group in config.managed_node_groups:
        for what in _group(config, group):
            yield f"group {group.name}: {what}"


def _keeps_network_policies(addon: Addon) -> bool:
    try:
        values = json.loads(addon.configuration_values or "{}")
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("enableNetworkPolicy") == "true"


def _group(config: ClusterConfig, group: NodeGroup) -> Iterator[str]:
    if not group.min_size <= group.desired_capacity <= group.max_size:
        yield "minSize, desiredCapacity and maxSize are out of order"
    if len(group.availability_zones) != 1:
        yield "more than one zone: EFA and the file system stay in theirs"
    for zone in group.availability_zones:
        if not zone.startswith(config.metadata.region):
            yield f"zone {zone} is not in {config.metadata.region}"
        if config.availability_zones and zone not in config.availability_zones:
            yield f"zone {zone} is not one of the cluster's"
    if group.instance_market_options and not group.capacity_reservation:
        yield "a capacity block without its reservation"
    if group.instance_market_options and group.desired_capacity:
        yield "a capacity block that has not begun gives no node: begin with 0"
    has_gpu = re.match(r"(p|g)\d", group.instance_type) is not None
    if has_gpu:
        yield from _gpu_group(group)
    elif group.taints or group.efa_enabled:
        yield "a CPU group with taints or EFA"


def _gpu_group(group: NodeGroup) -> Iterator[str]:
    if group.instance_type not in INSTANCE_TYPES:
        yield f"{group.instance_type} is not in the table of instance types"
    elif INSTANCE_TYPES[group.instance_type].efas and not group.efa_enabled:
        yield "its EFA devices are not attached"
    taints = {taint.key: taint.effect for taint in group.taints}
    if taints.get(_GPU_TAINT) != "NoSchedule":
        yield f"without the taint {_GPU_TAINT} any pod may take its CPUs"
    if taints.get(_STARTUP_TAINT) != "NoExecute":
        yield f"without the taint {_STARTUP_TAINT} a pod may come before its file system"
    if _GPU_LABEL not in group.labels.items():
        yield f"without the label {_GPU_LABEL[0]} the device plugin stays away"
    try:
        node = msgspec.convert(one_document(group.override_bootstrap_command.encode()), NodeConfig)
    except ValueError as error:
        yield f"its NodeConfig cannot be read: {error}"
        return
    if not node.spec.kubelet.config.single_process_oom_kill:
        yield "a loader that runs out of memory takes the agent and all ranks along"
