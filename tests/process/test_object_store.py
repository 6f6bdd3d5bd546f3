"""Checkpoints in a service that speaks S3, over HTTP: the contract of every store, uploads in
parts, retries, and errors that say what to change and give no secret away.
"""

from __future__ import annotations

import itertools
import os
import secrets
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from process.s3_server import (
    ACCESS_KEY,
    BUCKET,
    DENIED,
    SECRET_KEY,
    SESSION_TOKEN,
    SLOW_DOWN,
    Proxy,
    environment_of,
    running_server,
)
from stepfast.checkpoint import objects
from stepfast.checkpoint.catalog import (
    Damage,
    Retention,
    committed,
    prune,
    sweep_unfinished,
    verify,
)
from stepfast.checkpoint.manifest import checkpoint_name, shard_name
from stepfast.checkpoint.store import CheckpointStore, open_store
from stepfast.cli.main import main
from stepfast.errors import ConfigError, OperatingError, StateError
from unit.stored_checkpoints import Slots, snap
from unit.test_checkpoint_store import (  # noqa: F401 - the contract, collected here too
    test_an_error_leaves_what_was_there,
    test_an_object_is_there_when_its_writer_is_left,
    test_below_means_below_as_a_directory,
    test_put_if_absent_never_replaces,
)

PART_BYTES = 5 << 20  # the smallest that S3 takes


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with running_server() as port:
        yield port


@pytest.fixture
def proxy(server_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the server; this process's credentials and endpoint lead there."""
    proxy = Proxy(server_port)
    for name, value in environment_of(proxy).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(objects, "PART_BYTES_MIN", PART_BYTES)
    quick = {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20)}
    monkeypatch.setattr(objects, "_RETRIES", {**objects._RETRIES, "backoff": {**quick, "base": 2}})
    yield proxy
    proxy.close()


@pytest.fixture
def store(proxy: Proxy) -> CheckpointStore:
    """An empty one: a prefix that nobody used."""
    return open_store(f"s3://{BUCKET}/{secrets.token_hex(4)}")


def words_of(error: BaseException) -> str:
    """All that a log may show of it."""
    return "".join(traceback.format_exception(error))


def test_checkpoints_live_there_as_in_a_directory(
    store: CheckpointStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = Slots(tmp_path)
    slots.save(store, snap(10), snap(20), snap(30))
    slots.write(store, snap(15))
    assert committed(store) == [snap(30), snap(20), snap(10)]
    assert verify(store, snap(20)) == []
    name = f"{checkpoint_name(20, 1)}/{shard_name(1, 2)}"
    assert store.read(name) == slots.content(snap(20), 1)
    assert sweep_unfinished(store) == [snap(15)]
    assert prune(store, Retention()) == [snap(10)]
    assert store.directories() == [checkpoint_name(step, 1) for step in (20, 30)]
    assert main(["ckpt", "verify", store.url]) == 0
    assert main(["ckpt", "diff", f"{store.url}/{checkpoint_name(30, 1)}", store.url]) == 0
    with store.writer(name) as writer:
        writer.write(slots.content(snap(20), 0))
    assert [finding.damage for finding in verify(store, snap(20))] == [Damage.DIGEST]
    assert main(["ckpt", "verify", store.url, "20"]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_a_large_object_goes_up_in_parts(store: CheckpointStore, proxy: Proxy) -> None:
    data = secrets.token_bytes(PART_BYTES * 2 + 12345)
    with store.writer("a/b", len(data)) as writer:
        for start in range(0, len(data), 1 << 20):
            writer.write(memoryview(data)[start : start + (1 << 20)])
        assert store.size_bytes("a/b") is None
    assert len([1 for method, path in proxy.requests if "partNumber=" in path]) == 3
    assert store.size_bytes("a/b") == len(data)
    assert store.read("a/b") == data
    buffer = bytearray(1000)
    store.read_into("a/b", PART_BYTES - 500, memoryview(buffer))
    assert buffer == data[PART_BYTES - 500 : PART_BYTES + 500]


def test_an_upload_that_is_given_up_is_aborted(store: CheckpointStore, proxy: Proxy) -> None:
    def give_up() -> None:
        with store.writer("a/b", PART_BYTES * 2) as writer:
            for _ in range(12):
                writer.write(bytes(1 << 20))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert store.names() == []
    begun = [path for method, path in proxy.requests if method == "POST" and "?uploads" in path]
    aborted = [path for method, path in proxy.requests if method == "DELETE" and "uploadId" in path]
    assert len(begun) == len(aborted) == 1


def test_what_is_absent_or_too_short_is_a_state_error(store: CheckpointStore) -> None:
    assert store.put_if_absent("a/b", b"four")
    for name, start, size_bytes in (("a/c", 0, 4), ("a/c", 0, None), ("a/c", 0, 0), ("a/b", 2, 3)):
        with pytest.raises(StateError):
            store.read(name, start, size_bytes)
    for start in (1, 4, 9):
        with pytest.raises(StateError, match="it has fewer"):
            store.read_into("a/b", start, memoryview(bytearray(4)))
    assert store.read("a/b", 4) == b"" and store.read("a/b", 1, 0) == b""


def test_a_service_that_asks_for_less_is_tried_again(
    store: CheckpointStore, proxy: Proxy, tmp_path: Path
) -> None:
    number = itertools.count()
    proxy.plan = lambda method, path: SLOW_DOWN if next(number) % 3 == 0 else None
    slots = Slots(tmp_path)
    slots.save(store, snap(10), snap(20))
    assert verify(store, snap(20)) == [] and verify(store, snap(10)) == []
    assert prune(store, Retention(keep_last=1)) == [snap(10)]
    assert proxy.refused > 10


def test_looking_for_checkpoints_lists_once_and_outlasts_an_overloaded_service(
    store: CheckpointStore, proxy: Proxy, tmp_path: Path
) -> None:
    Slots(tmp_path).save(store, snap(5), snap(6))
    overloaded = iter([SLOW_DOWN] * 3)

    def is_listing(path: str) -> bool:
        return "list-type" in path

    proxy.plan = lambda method, path: next(overloaded, None) if is_listing(path) else None
    before, refused = len(proxy.requests), proxy.refused
    assert committed(store) == [snap(6), snap(5)]
    listings = [path for _, path in proxy.requests[before:] if is_listing(path)]
    assert (len(listings), proxy.refused - refused) == (4, 3), "one, and its tries"


@pytest.mark.parametrize("call", ["write", "put", "read", "list", "delete"])
def test_a_service_that_stays_overloaded_ends_in_one_line(
    call: str, store: CheckpointStore, proxy: Proxy
) -> None:
    proxy.plan = lambda method, path: SLOW_DOWN

    def write() -> None:
        with store.writer("a/b") as writer:
            writer.write(b"x")

    calls = {
        "write": write,
        "put": lambda: store.put_if_absent("a/b", b"x"),
        "read": lambda: store.read("a/b", 0, 1),
        "list": store.names,
        "delete": lambda: store.delete("a/b"),
    }
    with pytest.raises(OperatingError, match="asks for fewer requests") as caught:
        calls[call]()
    assert not isinstance(caught.value, StateError), "the object may be fine"
    assert "\n" not in str(caught.value)
    assert 2 <= proxy.refused <= 9, "tried again, and not for ever"


def test_a_lost_answer_is_told_from_anothers_object(store: CheckpointStore, proxy: Proxy) -> None:
    lost = iter([SLOW_DOWN])
    proxy.plan = lambda method, path: next(lost, None) if method == "PUT" else None
    proxy.answers_late = True
    assert store.put_if_absent("a/b", b"mine"), "it was carried out at the first try"
    assert proxy.refused == 1
    proxy.plan = lambda method, path: None
    assert not store.put_if_absent("a/b", b"mine")
    assert store.read("a/b") == b"mine"


def test_no_error_gives_a_secret_away(store: CheckpointStore, proxy: Proxy) -> None:
    proxy.plan = lambda method, path: DENIED

    def write() -> None:
        with store.writer("a/b") as writer:
            writer.write(b"x")

    calls = (
        write,
        lambda: store.put_if_absent("a/b", b"x"),
        lambda: store.read("a/b", 0, 1),
        lambda: store.read("a/b"),
        store.names,
        store.directories,
        lambda: store.delete("a/b"),
    )
    for call in calls:
        with pytest.raises(OperatingError) as caught:
            call()
        words = words_of(caught.value)
        assert not any(secret in words for secret in (ACCESS_KEY, SECRET_KEY, SESSION_TOKEN))
        assert store.url in str(caught.value) and "\n" not in str(caught.value)
    assert proxy.refused >= len(calls)


def test_weights_of_others_are_imported(store: CheckpointStore, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3_000_000)}, tmp_path / "w.safetensors")  # more than one part
    assert main(["ckpt", "import", str(tmp_path / "w.safetensors"), store.url]) == 0
    assert verify(store, snap(0, generation=0)) == []
    assert main(["ckpt", "import", str(tmp_path / "w.safetensors"), store.url]) == 78
    os.truncate(tmp_path / "w.safetensors", 9_000_000)
    assert main(["ckpt", "import", str(tmp_path / "w.safetensors"), store.url, "--step", "1"]) == 1
    assert store.directories() == ["step-000000000-gen-0000"]


def test_what_is_missing_is_said(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = open_store("s3://no-such-bucket/x")
    for call in (nowhere.names, lambda: nowhere.put_if_absent("a", b"x")):
        with pytest.raises(OperatingError, match="the bucket does not exist; make it"):
            call()
    with pytest.raises(OperatingError, match="the bucket does not exist"), nowhere.writer("a") as w:
        w.write(b"x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    proxy.plan = lambda method, path: (404, "")
    with pytest.raises(OperatingError, match="no credentials were found; set AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{BUCKET}/x").put_if_absent("a", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OperatingError, match="cannot be reached; check the network"):
        open_store(f"s3://{BUCKET}/x").names()


@pytest.mark.parametrize("url", ["s3://", "s3:///a", "s3://key:secret@bucket/a", "s3://b/a?x=1"])
def test_a_url_with_credentials_or_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)
