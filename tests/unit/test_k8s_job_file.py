"""Job files: what is refused, and by which line; what follows from what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from architecture.source_tree import ROOT
from stepfast.cli.main import main
from stepfast.cli.parser import parse
from stepfast.config import SETTINGS
from stepfast.errors import EXIT_USER_ERROR, ConfigError
from stepfast.k8s.instances import INSTANCE_TYPES
from stepfast.k8s.job_file import (
    Health,
    JobFile,
    Model,
    Monitoring,
    Nodes,
    Placement,
    Slo,
    Storage,
)
from stepfast.k8s.job_reader import DECIDED_SETTINGS, parse_job_file
from stepfast.k8s.manifest import manifest
from stepfast.k8s.profiles import (
    DEFAULT_JOBSET,
    DEFAULT_KUBERNETES,
    DEFAULT_TRAINER,
    KINDS,
    profile_of,
)
from stepfast.k8s.render import as_yaml
from stepfast.k8s.target import Target
from stepfast.k8s.validate.validate import validate

EXAMPLE = (ROOT / "examples" / "job.toml").read_text(encoding="utf-8")
GPU = (ROOT / "tests" / "golden" / "k8s" / "gpu.toml").read_text(encoding="utf-8")
DIGEST = "@sha256:" + "0" * 64

REFUSED = [  # in the example's text: what is written, what instead, words of the one line
    ('name = "llama-debug"', 'name = "Llama"', "name 'Llama' must begin with a letter"),
    ('name = "llama-debug"', f'name = "{"a" * 41}"', "at most 40"),
    ('name = "llama-debug"', "", "`name`"),
    ('name = "llama-debug"', "name = 3", "Expected `str`, got `int` - at `name`"),
    ('name = "llama-debug"', "name =", "not valid TOML"),
    ("[slo]", "[slo", "not valid TOML"),
    ("[slo]", "[slow]", "unknown field `slow`"),
    ("recovery_s = 30", "recover_s = 30", "unknown field `recover_s` - at `slo`"),
    ("recovery_s = 30", "recovery_s = 0", "slo_recovery_s must be above 0"),
    ("recovery_s = 30", "recovery_s = nan", "slo_recovery_s must be above 0"),
    ("steps_lost = 1", "steps_lost = -1", "slo_steps_lost must be at least 0"),
    ('namespace = "training"', 'namespace = "a b"', "is no name of a namespace"),
    (DIGEST, ":latest", "must be named by its digest"),
    ('script = "/opt', 'script = "opt', "must be an absolute path"),
    ('"debug"', '"de\\u0000bug"', "cannot have a character 0"),
    ('args = ["--size"', 'engine = "nvrx"\nargs = ["--size"', "engine nvrx: nodes run stepfast's"),
    ('args = ["--size"', 'engine = "x"\nargs = ["--size"', "engine must be stepfast or nvrx"),
    ('args = ["--size"', 'queue = "a b"\nargs = ["--size"', "is no name of a queue"),
    ('args = ["--size"', 'user_id = 0\nargs = ["--size"', "pods do not run as root"),
    ('args = ["--size"', 'grace_s = 300\nargs = ["--size"', "grace_s must be at most 110"),
    ('args = ["--size"', 'grace_s = 60\nargs = ["--size"', "flush_s must be 1 to 45, not 60"),
    ('args = ["--size"', 'join_limit_s = 0\nargs = ["--size"', "join_limit_s must be at least 1"),
    ("count = 2", "count = 0", "nodes.count must be 1 to 4096"),
    ("count = 2", "count = 4096", "8192 ranks are more than"),
    ("count = 2", "count = 2\nspares = 1", "nodes.spares 1: the coordinator keeps no spares"),
    ("count = 2", 'count = 2\ninstance = "p5.48xlarge"', "one of instance and resources"),
    ("ranks = 2", "", "nodes.ranks must be given"),
    ("ranks = 2", "ranks = -1", "nodes.ranks must be 0 to"),
    ("cpus = 2", "cpus = 0", "nodes.resources.cpus must be 1 to"),
    ("cpus = 2", "efa = 1, cpus = 2", "efa needs gpus"),
    ("cpus = 2", "gpus = 1, cpus = 2", "nodes.ranks 2 are more than the node's 1 GPUs"),
    ("memory_gib = 8", "memory_gib = 4", "has 4 GiB of memory, and needs 6.4: snapshots 0.4"),
    ("state_gib_per_rank = 0.05", "state_gib_per_rank = inf", "state_gib_per_rank must be above 0"),
    ("shm_gib = 1", "shm_gib = 0", "model.shm_gib must be at least 1"),
    ('claim = "checkpoints"', "", "storage needs one of claim and s3"),
    ('claim = "checkpoints"', 'claim = "c"\ns3 = "s3://b/p"', "one of claim and s3"),
    ('claim = "checkpoints"', 's3 = "https://b/p"', "must be s3://BUCKET/PREFIX"),
    ('claim = "checkpoints"', 'claim = "c"\nrole_arn = "me"', "must begin with arn:"),
    ('priority_class = "training"', "", "create priorityclass training --value=1000"),
    ('priority_class = "training"', 'priority_class = "A"', "is no name of one"),
    ('priority_class = "training"', 'priority_class = "a"\nzone = "a b"', "no value of a label"),
    ("[slo]", "[env]\nPET_NNODES = '2'\n[slo]", "env.PET_NNODES is set by the launcher"),
    ("[slo]", "[env]\nNCCL_PROTO = 'simple'\n[slo]", "env.NCCL_PROTO: it was for plugins up to"),
    ("[slo]", "[env]\nNCCL_DEBUG = 'INFO'\n[slo]", "env.NCCL_DEBUG: INFO writes lines"),
    ("[slo]", "[env]\nNCCL_NVLS_ENABLE = '0'\n[slo]", "only engine nvrx asks for it"),
    ("[slo]", "[env]\nHF_TOKEN = 'x'\n[slo]", 'make it secrets.HF_TOKEN = "SECRET/KEY"'),
    ("[slo]", "[env]\n'A B' = 'x'\n[slo]", "env.A B is no name of a variable"),
    ("[slo]", "[secrets]\nHF_TOKEN = 'hf'\n[slo]", "secrets.HF_TOKEN 'hf' must be SECRET/KEY"),
    ("[slo]", "[health]\nunknown = 'x'\n[slo]", "health_unknown must be one of admit, refuse"),
    ("[slo]", "[monitoring]\nnamespace = '-'\n[slo]", "monitoring.namespace '-'"),
    ("checkpoint_interval_steps = 10", "nodes = 3", "settings.nodes follows from the rest"),
    ("checkpoint_interval_steps = 10", "slo_steps_lost = 3", "is steps_lost in [slo]"),
    ("checkpoint_interval_steps = 10", "sped = 3", "settings.sped is no setting"),
    ("checkpoint_interval_steps = 10", "on_damage = 'x'", "on_damage must be one of fall-back"),
    ("checkpoint_interval_steps = 10", "keep_checkpoints = 'x'", "must be a whole number"),
]
FLAGS = [
    (["--kubernetes", "1.20"], "--kubernetes 1.20: known are 1.31 to 1.37"),
    (["--kubernetes", "new"], "--kubernetes new is no version such as 1.35"),
    (["--jobset", "0.7"], "--jobset 0.7: 0.8 is the oldest"),
    (["--trainer", "1.9"], "--trainer 1.9: 2.0 is the oldest"),
    (["--kind", "ray"], "invalid choice: 'ray'"),
]


def example(**changes: Any) -> JobFile:
    return msgspec.structs.replace(parse_job_file(EXAMPLE), **changes)


def pods(job: JobFile, kind: str = "jobset", version: str = "1.35") -> list[dict[str, Any]]:
    """Coordinator's and node's pod spec."""
    jobset = manifest(job, profile_of(kind, version))[-1]
    return [
        part["template"]["spec"]["template"]["spec"] for part in jobset["spec"]["replicatedJobs"]
    ]


def environment_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in pod["containers"][0]["env"]}


@pytest.mark.parametrize(("written", "instead", "words"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(written: str, instead: str, words: str):
    assert EXAMPLE.count(written) == 1
    with pytest.raises(ConfigError) as refused:
        parse_job_file(EXAMPLE.replace(written, instead))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("instance", "words"),
    [
        ("p5.48xlrge", "did you mean p5.48xlarge?"),
        ("x1.big", "give nodes.resources instead"),
        ("p6e-gb200.36xlarge", "need resource claims (DRA)"),
    ],
)
def test_an_instance_type_that_is_not_known_is_refused(instance: str, words: str):
    with pytest.raises(ConfigError) as refused:
        parse_job_file(GPU.replace("p5.48xlarge", instance))
    assert words in str(refused.value)


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_a_flag_that_makes_no_sense_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["k8s", "render", *flags, str(ROOT / "examples" / "job.toml")]) == EXIT_USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    latin, wrong = tmp_path / "latin.toml", tmp_path / "wrong.toml"
    latin.write_bytes(b"name = '\xe9'")
    wrong.write_text(EXAMPLE.replace("count = 2", "count = 0"))
    for path in (tmp_path / "none.toml", tmp_path, latin, wrong):
        assert main(["k8s", "render", str(path)]) == EXIT_USER_ERROR
        err = capsys.readouterr().err
        assert str(path) in err
        assert err.count("\n") == 1


def test_every_setting_is_decided_or_a_flag_of_the_coordinator():
    for name in SETTINGS:
        if name not in DECIDED_SETTINGS and not name.startswith("health_"):
            parse(["coordinator", f"--{name.replace('_', '-')}=1"])


def test_snapshots_have_room_for_every_slot_of_every_rank():
    node = pods(example())[1]
    sizes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in node["volumes"] if "emptyDir" in v}
    assert sizes["snapshots"] == f"{(53 + 1) * 4 * 2}Mi"  # 0.05 GiB and 2 %, four slots, two ranks


def test_a_whole_node_of_each_type_holds_the_pod():
    for name, row in INSTANCE_TYPES.items():
        asked = parse_job_file(
            GPU.replace("p5.48xlarge", name).replace("8.0", "0.5").replace("= 64", "= 2")
        ).resources
        assert (asked.gpus, asked.efa) == (row.gpus, row.efas)
        assert asked.cpus * 1000 <= row.cpu_milli
        assert asked.memory_gib * 1024 <= row.memory_mib


def test_what_looks_like_a_variable_reaches_the_script_as_it_is():
    node = pods(example(args=["$(HOME)", "$$", "a=$(X)"], env={"NOTE": "$(HOME)"}))[1]
    assert node["containers"][0]["command"][-3:] == ["$$(HOME)", "$$", "a=$$(X)"]
    assert environment_of(node)["NOTE"] == "$$(HOME)"


def test_a_secret_is_named_and_never_written():
    variable = environment_of(pods(example(secrets={"HF_TOKEN": "hub/read"}))[1])["HF_TOKEN"]
    assert variable == {"secretKeyRef": {"name": "hub", "key": "read"}}


def test_an_object_store_needs_no_volume():
    job = example(storage=Storage(s3="s3://bucket/runs/"))
    coordinator, node = pods(job)
    for pod in (coordinator, node):
        assert not [v for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert "--checkpoints=s3://bucket/runs/llama-debug" in coordinator["containers"][0]["command"]


def test_the_store_is_open_to_agents_alone():
    accounts = manifest(parse_job_file(GPU), profile_of("jobset"))[:2]
    roles = {a["metadata"]["name"]: a["metadata"].get("annotations", {}) for a in accounts}
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/llama-checkpoints"}
    assert roles == {"llama-70b-coord": {}, "llama-70b-node": role}


def test_gpus_are_told_to_the_agent_that_has_to_find_them():
    command = pods(parse_job_file(GPU))[1]["containers"][0]["command"]
    assert {"--health-gpus=8", "--health-efas=32", "--health-unknown=refuse"} <= set(command)
    assert "--health-check=/app/burn-in --seconds 20" in command


def test_nvls_is_off_for_the_engine_that_asks_for_it_alone():
    job = msgspec.structs.replace(parse_job_file(GPU), engine="nvrx")
    assert environment_of(pods(job)[1])["NCCL_NVLS_ENABLE"] == "0"
    files = {"job.yaml": as_yaml(manifest(job, profile_of("jobset"))).encode()}
    assert not validate(files, Target(allows_nvls_off=True)).findings
    assert [f.rule for f in validate(files, Target()).findings] == ["environment"]
    assert "NCCL_NVLS_ENABLE" not in environment_of(pods(parse_job_file(GPU))[1])


def test_one_node_needs_no_other_one_to_stay():
    job = example(nodes=msgspec.structs.replace(parse_job_file(EXAMPLE).nodes, count=1))
    files = {"job.yaml": as_yaml(manifest(job, profile_of("jobset"))).encode()}
    assert not validate(files, Target()).findings


def test_what_a_reader_could_take_for_something_else_stands_in_quotes():
    texts = ["1e3", "0x1F", "0o17", "0b1", ".5", "y", "N", "on", "null", "~", "1_0", "007", "1:30"]
    plain = ["# é", "a\nb", "", "word", "a: b", "- c"]
    written = as_yaml([{"args": [*texts, *plain]}])
    assert yaml.safe_load(written) == {"args": [*texts, *plain]}
    for text in texts:
        assert f"- '{text}'" in written or f'- "{text}"' in written


@pytest.mark.parametrize(
    ("kind", "versions", "by_rule"),
    [
        ("jobset", {"kubernetes": "1.35", "jobset": "0.10"}, True),
        ("jobset", {"kubernetes": "1.35", "jobset": "0.9"}, False),
        ("jobset", {"kubernetes": "1.34", "jobset": "0.12"}, False),
        ("job", {"kubernetes": "v1.36.1", "jobset": "0.9"}, True),
        ("trainjob", {"kubernetes": "1.35", "trainer": "2.1"}, True),
        ("trainjob", {"kubernetes": "1.35", "trainer": "2.0"}, False),
    ],
)
def test_restart_rules_need_the_cluster_and_its_operator(
    kind: str, versions: dict[str, str], by_rule: bool
):
    assert profile_of(kind, **versions).restarts_by_rule is by_rule


def test_the_page_says_every_key():
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    keys = page.partition("### The job file")[2].partition("## Check")[0]
    tables = {"nodes": Nodes, "model": Model, "storage": Storage, "placement": Placement}
    tables |= {"slo": Slo, "health": Health, "monitoring": Monitoring}
    for name in JobFile.__struct_fields__:
        for below in tables[name].__struct_fields__ if name in tables else ():
            assert f"`{name}.{below}`" in keys or f"`.{below}`" in keys
        assert f"`{name}`" in keys or name in tables


def test_the_flags_name_the_kinds_and_versions_that_are_rendered():
    options = parse(["k8s", "render", "job.toml"])
    assert options.kind == KINDS[0]
    for kind in KINDS:
        assert parse(["k8s", "render", "--kind", kind, "job.toml"]).kind == kind
    versions = (options.kubernetes, options.jobset, options.trainer)
    assert versions == (DEFAULT_KUBERNETES, DEFAULT_JOBSET, DEFAULT_TRAINER)
