"""deploy/eks, which was never applied: what eksctl, IAM and Kubernetes say about its fields."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from architecture.eks_model import complaints, one_document, read_cluster
from architecture.source_tree import ROOT, files, relative
from stepfast.cli.main import main
from stepfast.k8s.target import Target
from stepfast.k8s.validate.schemas import Schemas
from stepfast.k8s.validate.validate import validate

FOLDER = ROOT / "deploy" / "eks"
VERSIONS = tomllib.loads((FOLDER / "versions.toml").read_text(encoding="utf-8"))
CLUSTER = FOLDER / "cluster.yaml"
RESERVED = FOLDER / "nodes-p5-reserved.yaml"
BLOCK = FOLDER / "nodes-p5-capacity-block.yaml"
GPU_GROUPS = (RESERVED, BLOCK)
KUBERNETES = sorted((FOLDER / "kubernetes").glob("*.yaml"))
JOBS = sorted((FOLDER / "jobs").glob("*.toml"))
CHARTS = sorted((FOLDER / "helm").glob("*.yaml"))
TARGET = Target(kubernetes=tuple(int(n) for n in VERSIONS["kubernetes"].split(".")))
POLICIES = ("s3-checkpoints.json", "fsx-csi.json")
# One deletes and one keeps: either file may hold the claim, and they are never applied together.
EITHER_OR = {"storage-fsx.yaml", "storage-fsx-existing.yaml"}


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    return Schemas()


def found_in(config: bytes) -> list[str]:
    return list(complaints(read_cluster(config)))


@pytest.mark.parametrize("path", [CLUSTER, *GPU_GROUPS], ids=lambda path: path.name)
def test_eksctl_knows_every_field_and_no_rule_is_broken(path: Path):
    assert found_in(path.read_bytes()) == []


def test_the_groups_are_for_the_cluster():
    cluster = read_cluster(CLUSTER.read_bytes()).metadata
    for path in GPU_GROUPS:
        group = read_cluster(path.read_bytes()).metadata
        assert (group.name, group.region, group.version) == (
            cluster.name,
            cluster.region,
            cluster.version,
        )


def test_the_two_ways_to_get_capacity_differ_in_nothing_else():
    reserved, block = (read_cluster(path.read_bytes()).managed_node_groups for path in GPU_GROUPS)
    (one,), (other,) = reserved, block
    same = msgspec.structs.replace(
        other,
        name=one.name,
        desired_capacity=one.desired_capacity,
        instance_market_options=None,
    )
    assert same == one


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (RESERVED, "capacityReservationID", "capacityReservationId", "capacityReservationId"),
        (RESERVED, "efaEnabled: true", "efaEnabled: false", "EFA devices are not attached"),
        (RESERVED, "efaEnabled: true", "efa: true", "unknown field `efa`"),
        (RESERVED, "p5.48xlarge", "p5.47xlarge", "not in the table"),
        (RESERVED, "[us-west-2b]", "[us-west-2b, us-west-2a]", "more than one zone"),
        (RESERVED, "[us-west-2b]", "[us-east-1b]", "is not in us-west-2"),
        (RESERVED, "maxSize: 2", "maxSize: 1", "out of order"),
        (RESERVED, "nvidia.com/gpu.present", "gpu", "the device plugin stays away"),
        (RESERVED, "effect: NoExecute", "effect: NoSchedule", "before its file system"),
        (RESERVED, "effect: NoExecute", "effect: Never", "Invalid enum value"),
        (
            RESERVED,
            "value: present, effect: NoSchedule",
            "value: present, effect: NoExecute",
            "any",
        ),
        (RESERVED, "singleProcessOOMKill: true", "singleProcessOOMKill: false", "loader"),
        (RESERVED, "strategy: RAID0", "strategy: RAID1", "NodeConfig cannot be read"),
        (RESERVED, "volumeEncrypted: true", "volumeEncrypted: false", "volumeEncrypted"),
        (
            RESERVED,
            "disablePodIMDS: true",
            "disablePodIMDS: true\n    disablePodIMDS: true",
            "twice",
        ),
        (BLOCK, "desiredCapacity: 0", "desiredCapacity: 2", "begin with 0"),
        (BLOCK, "marketType: capacity-block", "marketType: spot", "Invalid enum value"),
        (CLUSTER, "version: v1.9.0", "version: latest", "has no version"),
        (CLUSTER, "    version: v1.7.0\n", "", "has no version"),
        (CLUSTER, '"enableNetworkPolicy": "true"', "", "taken and not kept"),
        (CLUSTER, '"enableNetworkPolicy": "true"', '"enableNetworkPolicy', "taken and not kept"),
        (CLUSTER, "203.0.113.0/24", "0.0.0.0/0", "everybody"),
        (CLUSTER, "  - name: eks-pod-identity-agent\n", "", "without the add-on"),
        (CLUSTER, "InDays: 7", "InDays: 8", "keeps no logs for 8 days"),
        (CLUSTER, "[us-west-2a, us-west-2b]", "[us-west-2b]", "two zones"),
        (CLUSTER, "[us-west-2a, us-west-2b]", "[us-west-2a, us-west-2c]", "not one of the"),
        (CLUSTER, "m7i.2xlarge", "p5.48xlarge", "any pod may take its CPUs"),
    ],
)
def test_a_change_that_would_not_work_is_found(path: Path, old: str, new: str, said: str):
    text = path.read_text(encoding="utf-8")
    assert old in text
    changed = text.replace(old, new).encode()
    try:
        found = found_in(changed)
    except ValueError as error:
        found = [str(error)]
    assert any(said in what for what in found), found


def test_a_block_without_its_reservation_is_found():
    text = BLOCK.read_text(encoding="utf-8")
    cut = re.sub(r"    capacityReservation:\n(      .*\n)+", "", text)
    assert any("without its reservation" in what for what in found_in(cut.encode()))


def test_versions_stand_in_one_place():
    cluster = read_cluster(CLUSTER.read_bytes())
    given = {addon.name: addon.version for addon in cluster.addons if addon.version}
    assert given == VERSIONS["addons"]
    assert cluster.metadata.version == VERSIONS["kubernetes"]
    assert {path.stem for path in CHARTS} == set(VERSIONS["charts"])


def test_the_guide_installs_these_versions():
    page = (ROOT / "docs" / "eks.md").read_text(encoding="utf-8")
    released = dict(re.findall(r"kubernetes-sigs/(\w+)/releases/download/([^/]+)/", page))
    assert released == VERSIONS["operators"]
    charts = dict(re.findall(r"helm upgrade --install (\S+) \S+ --version (\S+)", page))
    assert charts == VERSIONS["charts"]
    named = set(re.findall(r"(?:--kubernetes(?:-version)?|Kubernetes) (1\.\d+)", page))
    assert named == {VERSIONS["kubernetes"]}


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_the_validator_finds_nothing(path: Path, schemas: Schemas):
    report = validate({path.name: path.read_bytes()}, TARGET, schemas=schemas)
    # The one pod that has to be root says so, and docs/eks.md that the validator is right.
    allowed = {"pod-security"} if path.name == "storage-owner.yaml" else set()
    assert {finding.rule for finding in report.findings} == allowed
    kinds = {unchecked.what.split(" ")[0] for unchecked in report.unchecked}
    assert not kinds or path.name == "queue.yaml", kinds  # Kueue's have no schema here


def test_all_of_them_go_together_but_for_the_two_file_systems(schemas: Schemas):
    for left_out in EITHER_OR:
        contents = {p.name: p.read_bytes() for p in KUBERNETES if p.name != left_out}
        report = validate(contents, TARGET, schemas=schemas)
        assert {finding.rule for finding in report.findings} == {"pod-security"}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
@pytest.mark.parametrize("kind", ["jobset", "job", "trainjob"])
def test_a_job_file_is_rendered_without_a_finding(
    path: Path, kind: str, schemas: Schemas, capsys: pytest.CaptureFixture[str]
):
    version = VERSIONS["kubernetes"]
    assert main(["k8s", "render", "--kind", kind, "--kubernetes", version, str(path)]) == 0
    contents = {path.name: capsys.readouterr().out.encode()}
    contents["namespace.yaml"] = (FOLDER / "kubernetes" / "namespace.yaml").read_bytes()
    report = validate(contents, TARGET, schemas=schemas)
    assert report.findings == ()
    assert report.unchecked == ()


def test_the_agents_account_is_the_one_that_may_write():
    cluster = read_cluster(CLUSTER.read_bytes())
    first = tomllib.loads((FOLDER / "jobs" / "first.toml").read_text(encoding="utf-8"))
    given = {
        (each.namespace, each.service_account_name)
        for each in cluster.iam.pod_identity_associations
    }
    assert given == {(first["namespace"], f"{first['name']}-node")}


@pytest.mark.parametrize("path", CHARTS, ids=lambda path: path.name)
def test_a_device_plugin_runs_where_the_devices_are(path: Path):
    values = one_document(path.read_bytes())
    (group,) = read_cluster(RESERVED.read_bytes()).managed_node_groups
    keys = {toleration["key"] for toleration in values["tolerations"]}
    assert keys == {"nvidia.com/gpu"}, "the startup taint is gone when a plugin comes"
    assert values.get("nodeSelector", {}).items() <= group.labels.items()


# ----------------------------------------------------------------------------- permissions


def statements(name: str) -> list[dict[str, Any]]:
    policy = json.loads((FOLDER / "iam" / name).read_text(encoding="utf-8"))
    assert set(policy) == {"Version", "Statement"}
    assert policy["Version"] == "2012-10-17"
    return policy["Statement"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_grants_named_actions_on_named_resources(name: str):
    for statement in statements(name):
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert statement["Effect"] == "Allow"
        assert re.fullmatch(r"[A-Za-z0-9]+", statement["Sid"])
        for action in statement["Action"]:
            assert re.fullmatch(r"[a-z0-9]+:[A-Z][A-Za-z]+", action), action
        for resource in statement["Resource"]:
            if statement["Action"] == ["fsx:DescribeFileSystems"]:
                assert resource == "*"  # the one action here that knows no resource
            else:
                assert re.fullmatch(r"arn:aws:[a-z0-9]+:[^*]*:[^*]+(/\*)?", resource), resource


def test_policies_in_the_cluster_file_have_their_documents():
    cluster = read_cluster(CLUSTER.read_bytes())
    associations = [
        *cluster.iam.pod_identity_associations,
        *(each for addon in cluster.addons for each in addon.pod_identity_associations),
    ]
    names = {arn.rpartition("/")[2] for each in associations for arn in each.permission_policy_arns}
    page = (ROOT / "docs" / "eks.md").read_text(encoding="utf-8")
    made = dict(
        re.findall(r"--policy-name (\S+) \\?\s*--policy-document file://deploy/eks/iam/(\S+)", page)
    )
    assert set(made) == names
    assert set(made.values()) == set(POLICIES)


def test_the_bucket_removes_what_killed_writers_leave():
    rules = json.loads((FOLDER / "iam" / "s3-lifecycle.json").read_text(encoding="utf-8"))["Rules"]
    (rule,) = rules
    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    objects = statements("s3-checkpoints.json")[1]["Resource"]
    assert [resource.rpartition(":::")[2] for resource in objects] == [
        f"example-checkpoints/{rule['Filter']['Prefix']}*"
    ]


def test_every_file_says_that_it_was_never_applied():
    silent = [
        relative(path)
        for path in files(".yaml", ".toml", under=FOLDER)
        if not re.search(
            r"[Nn]ever (applied|run)|was ever applied", path.read_text(encoding="utf-8")[:900]
        )
    ]
    assert silent == []
