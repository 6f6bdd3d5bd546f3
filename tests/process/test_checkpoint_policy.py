"""The permissions in deploy/eks/iam/s3-checkpoints.json are those that the store asks S3 for: every
request of every operation is allowed by it, and each action of it is needed by some.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from process.s3_server import BUCKET, Proxy, environment_of, running_server
from stepfast.checkpoint import objects
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.errors import StateError

POLICY = Path(__file__).parents[2] / "deploy" / "eks" / "iam" / "s3-checkpoints.json"
PART_BYTES = 5 << 20  # the smallest that S3 takes


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with running_server() as port:
        proxy = Proxy(port)
        for name, value in environment_of(proxy).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(objects, "PART_BYTES_MIN", PART_BYTES)
        quick = {"init_backoff": timedelta(milliseconds=5), "base": 2}
        backoff = {**objects._RETRIES["backoff"], **quick}
        monkeypatch.setattr(objects, "_RETRIES", {**objects._RETRIES, "backoff": backoff})
        yield proxy
        proxy.close()


def action_of(method: str, path: str) -> tuple[str, str]:
    """The action that IAM looks for, and on which resource, as S3's reference has it."""
    parts = urlsplit(path)
    query = parse_qs(parts.query, keep_blank_values=True)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    resource = f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else "")
    match method:
        case "GET" if not key and "list-type" in query:
            return "s3:ListBucket", resource
        case "GET" | "HEAD" if key:
            return "s3:GetObject", resource
        case "PUT" if key:  # an object, or a part of one
            return "s3:PutObject", resource
        case "POST" if key and ("uploads" in query or "uploadId" in query):
            return "s3:PutObject", resource
        case "POST" if not key and "delete" in query:
            return "s3:DeleteObject", f"{resource}/*"  # its keys stand in the body
        case "DELETE" if key and "uploadId" in query:
            return "s3:AbortMultipartUpload", resource
        case "DELETE" if key:
            return "s3:DeleteObject", resource
    raise AssertionError(f"{method} {path} has no action here")


def allowed(action: str, resource: str, bucket: str) -> bool:
    """Whether the policy's words allow it: Allow alone, named actions, one star at an end."""
    for statement in json.loads(POLICY.read_text())["Statement"]:
        patterns = [p.replace("example-checkpoints", bucket) for p in statement["Resource"]]
        # a request to delete several names them in its body: the prefix is the store's
        fits = any(fnmatch.fnmatchcase(resource.replace("/*", "/runs/x"), p) for p in patterns)
        if action in statement["Action"] and fits:
            return True
    return False


def give_up(store: CheckpointStore) -> None:
    with store.writer("never", 1) as writer:
        writer.write(b"x" * (PART_BYTES + 1))
        raise RuntimeError("given up")


def use_every_operation(url: str) -> None:
    store = open_store(url)
    with store.writer("large", PART_BYTES * 2) as writer:
        writer.write(b"x" * PART_BYTES)
        writer.write(b"x" * PART_BYTES)
    with pytest.raises(RuntimeError, match="given up"):
        give_up(store)
    assert store.put_if_absent("a/manifest.json", b"{}")
    assert not store.put_if_absent("a/manifest.json", b"{}")
    assert store.read("a/manifest.json") == b"{}"
    assert store.size_bytes("nothing") is None
    with pytest.raises(StateError):
        store.read("nothing")
    assert store.directories() == ["a"]
    assert store.names() == ["a/manifest.json", "large"]
    store.delete("large")
    store.delete_below("a")
    store.delete_remains("a")
    assert store.names() == []


def test_the_policy_allows_what_the_store_asks_for_and_nothing_else(proxy: Proxy):
    use_every_operation(f"s3://{BUCKET}/runs/llama")
    asked = {action_of(method, path) for method, path in proxy.requests}
    refused = [one for one in asked if not allowed(*one, BUCKET)]
    assert refused == []
    granted = {a for s in json.loads(POLICY.read_text())["Statement"] for a in s["Action"]}
    assert {action for action, _ in asked} == granted


def test_the_policy_allows_nothing_outside_of_its_prefix(proxy: Proxy):
    use_every_operation(f"s3://{BUCKET}/other/llama")
    asked = {action_of(method, path) for method, path in proxy.requests}
    on_objects = [one for one in asked if f"{BUCKET}/other" in one[1]]
    assert len(on_objects) > 5
    assert not any(allowed(*one, BUCKET) for one in on_objects)
