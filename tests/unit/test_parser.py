"""What the command line says of what it does not know."""

from __future__ import annotations

import pytest

from stepfast.cli.main import main
from stepfast.cli.parser import parse


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --checkpoint-interval 5 x.py", "-interval-s or --checkpoint-interval-steps? (see st"),
        ("run --strikt x.py", "did you mean --strict? (see stepfast run --help)"),
        ("run --frobnicate x.py", "no such flag: --frobnicate (see stepfast run --help)"),
        ("run --checkpoints s3:/bucket x.py", "s3:/bucket has one slash behind its scheme: s3://b"),
        ("ckpt ls --jsn x", "did you mean --json? (see stepfast ckpt ls --help)"),
        ("ckpt ls x y", "y is one argument too many (see stepfast ckpt ls --help)"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_is_near(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 78
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1


def test_what_stands_behind_the_script_is_the_scripts() -> None:
    options = parse(["run", "--strict", "train.py", "--strikt", "x", "y"])
    assert options.script_args == ["--strikt", "x", "y"]
