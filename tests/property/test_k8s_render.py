"""Whatever a job file says: it is refused in one line, or its manifests hold every rule."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfast.errors import ConfigError
from stepfast.k8s.instances import INSTANCE_TYPES
from stepfast.k8s.job_file import JobFile
from stepfast.k8s.job_reader import parse_job_file
from stepfast.k8s.manifest import manifest
from stepfast.k8s.profiles import KINDS, profile_of
from stepfast.k8s.render import as_yaml
from stepfast.k8s.target import Target, parse_version
from stepfast.k8s.validate.schemas import Schemas
from stepfast.k8s.validate.validate import validate

SCHEMAS = Schemas()
IMAGE = "registry.example/train@sha256:" + "2" * 64

texts = st.text(max_size=12)
names = st.sampled_from(["a", "run-7", "x" * 40])
nodes = st.fixed_dictionaries(
    {"count": st.integers(1, 200), "ranks": st.integers(1, 8)},
    optional={"ephemeral_gib": st.integers(1, 500)},
).flatmap(
    lambda made: st.one_of(
        st.sampled_from(sorted(INSTANCE_TYPES)).map(lambda name: {**made, "instance": name}),
        st.builds(
            lambda cpus, memory: {**made, "resources": {"cpus": cpus, "memory_gib": memory}},
            st.integers(1, 64),
            st.integers(1, 256),
        ),
    )
)
jobs = st.fixed_dictionaries(
    {
        "name": names,
        "image": st.just(IMAGE),
        "script": st.just("/app/train.py"),
        "nodes": nodes,
        "model": st.fixed_dictionaries(
            {"state_gib_per_rank": st.floats(0.001, 8)},
            optional={"working_gib_per_rank": st.floats(0, 8), "shm_gib": st.integers(1, 8)},
        ),
        "storage": st.sampled_from([{"claim": "fsx"}, {"s3": "s3://bucket/a/b"}]),
        "placement": st.fixed_dictionaries(
            {"priority_class": st.just("training")},
            optional={
                "zone": st.just("us-west-2b"),
                "topology_key": st.just("topology.k8s.aws/network-node-layer-3"),
                "node_selector": st.just({"pool": "a"}),
            },
        ),
    },
    optional={
        "args": st.lists(texts, max_size=3),
        "env": st.dictionaries(st.sampled_from(["NOTE", "OMP_NUM_THREADS", "RANK"]), texts),
        "secrets": st.dictionaries(st.sampled_from(["HF_TOKEN", "NOTE"]), st.just("hub/token")),
        "queue": st.just("research"),
        "grace_s": st.integers(0, 130),
        "settings": st.dictionaries(
            st.sampled_from(["hang_floor_s", "keep_checkpoints", "nodes"]), st.integers(0, 9)
        ),
        "slo": st.just({"recovery_s": 60.0, "steps_lost": 1}),
        "monitoring": st.just({"namespace": "monitoring"}),
    },
)
versions = st.fixed_dictionaries(
    {
        "kubernetes": st.sampled_from(["1.31", "1.33", "1.34", "1.35", "1.37"]),
        "jobset": st.sampled_from(["0.8", "0.9", "0.10", "0.12"]),
        "trainer": st.sampled_from(["2.0", "2.1", "2.3"]),
    }
)


def as_toml(value: Any) -> str:
    """Inline, which any table may be."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{as_toml(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    return repr(value)


def read_or_refused(text: str) -> JobFile | str:
    try:
        return parse_job_file(text)
    except ConfigError as error:
        return str(error)


@settings(max_examples=40)
@given(jobs, st.sampled_from(KINDS), versions)
def test_what_is_accepted_holds_every_rule(
    job: dict[str, Any], kind: str, given_versions: dict[str, str]
):
    read = read_or_refused("\n".join(f"{key} = {as_toml(value)}" for key, value in job.items()))
    if isinstance(read, str):
        assert len(read.splitlines()) == 1
        return
    objects = manifest(read, profile_of(kind, **given_versions))
    written = as_yaml(objects)
    assert list(yaml.safe_load_all(written)) == objects
    target = Target(**{name: parse_version(v, name) for name, v in given_versions.items()})
    report = validate({"job.yaml": written.encode()}, target, schemas=SCHEMAS)
    assert not report.findings, report.text()


@settings(max_examples=100)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_refused_in_one_line(text: str):
    read = read_or_refused(text)
    assert isinstance(read, str), "no text so short is a whole job"
    assert len(read.splitlines()) == 1
