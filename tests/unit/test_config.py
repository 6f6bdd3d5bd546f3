"""Settings: merged in order, checked once, refused by name."""

from pathlib import Path

import pytest

from stepfast.config import load_config, metadata_of, split_address
from stepfast.errors import EXIT_USER_ERROR, ConfigError


def load(tmp_path: Path, text: str = "", environment: dict | None = None, **flags):
    file = tmp_path / "stepfast.toml"
    file.write_text(text)
    return load_config(file, environment or {}, flags)


def test_metadata_for_checkpoints_has_keys(tmp_path):
    given = load(tmp_path, checkpoint_metadata=("run=7", "note=a=b"))
    assert metadata_of(given) == {"run": "7", "note": "a=b"}
    for wrong in (("run",), ("=7",), ("a=1", "a=2")):
        with pytest.raises(ConfigError, match="KEY=VALUE"):
            load(tmp_path, checkpoint_metadata=wrong)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    text = "nodes = 2\nnproc_per_node = 2\nrestarts_per_hour = 7\n"
    environment = {"STEPFAST_NODES": "3", "STEPFAST_RESTARTS_PER_HOUR": "8"}
    config = load(tmp_path, text, environment, nodes=4)
    assert (config.nodes, config.restarts_per_hour, config.nproc_per_node) == (4, 8, 2)
    assert config.world_size == 8


@pytest.mark.parametrize(
    ("text", "environment", "flags", "words"),
    [
        ("nodez = 2", {}, {}, "did you mean 'nodes'"),
        ("", {"STEPFAST_HANGS": "report"}, {}, "STEPFAST_HANGS"),
        ("nodes = 0", {}, {}, "at least 1"),
        ("nodes = '2'", {}, {}, "whole number"),
        ("nodes = true", {}, {}, "whole number"),
        ("", {"STEPFAST_NODES": "two"}, {}, "not a number"),
        ("recovery = 'maybe'", {}, {}, "off, report, on"),
        ("preload = 'numpy'", {}, {}, "list of strings"),
        ("hang_floor_s = 'x'", {}, {}, "must be a number"),
        ("nodes = [", {}, {}, "not valid TOML"),
        ("listen = '7070'", {}, {}, "HOST:PORT"),
        ("", {}, {"nodes": 100, "nproc_per_node": 100}, "10000 ranks"),
        ("", {}, {"checkpoint_bytes_per_s": 0.0}, "above 0"),
        (
            "[slo]\nrecover_s = 1.0",
            {},
            {},
            "unknown key 'recover_s' in [slo]; did you mean 'recovery_s'",
        ),
        ("[slo]\nx = 1.0", {}, {}, "in [slo]; it has recovery_s, steps_lost"),
        ("[slow]\nx = 1.0", {}, {}, "unknown key 'slow'"),
        ("slo = 1.0", {}, {}, "unknown key 'slo'"),
        ("[slo]\nrecovery_s = 0", {}, {}, "slo_recovery_s must be above 0"),
        ("[slo]\nrecovery_s = 'fast'", {}, {}, "must be a number"),
        ("[slo]\nsteps_lost = -1", {}, {}, "at least 0"),
        ("[health]\nunknown = 'maybe'", {}, {}, "admit, refuse"),
        ("[health]\nlimit_s = -1", {}, {}, "above 0"),
        ("metrics_port = 70000", {}, {}, "at most 65535"),
        ("metrics_port = -1", {}, {}, "at least 0"),
        ("snapshot_interval_steps = 3", {}, {"checkpoint_interval_steps": 4}, "choose 3"),
        ("snapshot_interval_steps = 3", {}, {"checkpoint_interval_steps": 2}, "choose 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, text, environment, flags, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, environment, **flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).strip()
    assert caught.value.exit_code == EXIT_USER_ERROR


def test_tables_of_the_file_are_settings_like_all_others(tmp_path):
    text = "[slo]\nrecovery_s = 1\nsteps_lost = 0\n[health]\nunknown = 'refuse'\ngpus = 8\n"
    config = load(tmp_path, text, {"STEPFAST_HEALTH_GPUS": "4"}, slo_steps_lost=2)
    assert (config.slo_recovery_s, config.slo_steps_lost) == (1.0, 2)
    assert (config.health_unknown, config.health_gpus) == ("refuse", 4)


def test_a_missing_file_that_was_named_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "nowhere.toml", {}, {})


def test_the_token_is_no_setting(tmp_path):
    config = load(tmp_path, "", {"STEPFAST_TOKEN": "secret"})
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80)), ("a.b:7070", ("a.b", 7070))],
)
def test_addresses_are_split(address, parts):
    assert split_address(address) == parts
