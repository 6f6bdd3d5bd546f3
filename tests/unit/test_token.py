"""A token file: what it may be, and that nothing says what is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepfast.cli.main import main
from stepfast.cli.token import read_token
from stepfast.errors import ConfigError

SECRET = "b7f0-the-token"


def made(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_space_around_a_token_is_no_part_of_it(tmp_path: Path, mode: int):
    for text in (SECRET, f"{SECRET}\n", f" \t{SECRET}\r\n\n"):
        file = made(tmp_path / f"token-{len(text)}", text.encode(), mode)
        assert read_token(file) == SECRET


def test_a_secret_as_kubernetes_mounts_it_is_followed_through_its_links(tmp_path: Path):
    (tmp_path / "..2026").mkdir()
    made(tmp_path / "..2026" / "token", SECRET.encode(), 0o440)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "token").symlink_to("..data/token")
    assert read_token(tmp_path / "token") == SECRET


@pytest.mark.parametrize(
    ("data", "mode", "said"),
    [
        (b"", 0o600, "is empty"),
        (b" \n\t\n", 0o600, "is empty"),
        (SECRET.encode(), 0o644, "open to others (mode 0644): chmod 600, or defaultMode: 0440"),
        (SECRET.encode(), 0o604, "open to others (mode 0604)"),
        (SECRET.encode(), 0o660, "open to others (mode 0660)"),
        (f"{SECRET}\n{SECRET}\n".encode(), 0o600, "one line of printable ASCII"),
        (f"{SECRET}\xe9".encode(), 0o600, "one line of printable ASCII"),
        (f"{SECRET}\0".encode(), 0o600, "one line of printable ASCII"),
        (SECRET.encode() * 1000, 0o600, "longer than 4096 bytes"),
    ],
)
def test_what_is_wrong_with_a_token_file_is_one_line_without_the_token(
    tmp_path: Path, data: bytes, mode: int, said: str
):
    file = made(tmp_path / "token", data, mode)
    with pytest.raises(ConfigError) as caught:
        read_token(file)
    text = str(caught.value)
    assert said in text and str(file) in text
    assert "\n" not in text and SECRET not in text


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in ((".", "no regular file"), ("pipe", "no regular file"), ("x", "cannot read")):
        with pytest.raises(ConfigError, match=said):
            read_token(tmp_path / name)


@pytest.mark.parametrize(
    "command",
    [
        "coordinator --listen 0.0.0.0:0 --job-dir {0}/job --token-file {0}/token",
        "agent --coordinator 127.0.0.1:1 --token-file {0}/token {0}/train.py",
        "run --listen 0.0.0.0:0 --job-dir {0}/job --token-file {0}/token {0}/train.py",
    ],
)
def test_every_process_that_takes_a_token_says_so_before_it_does_anything(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text("")
    made(tmp_path / "token", SECRET.encode(), 0o644)
    assert main(command.format(tmp_path).split()) == 78
    said = capsys.readouterr()
    assert "open to others" in said.err and said.err.count("\n") == 1
    assert SECRET not in said.err + said.out
    assert not (tmp_path / "job").exists()
