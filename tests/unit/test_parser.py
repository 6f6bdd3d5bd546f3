"""What the command line says of what it does not know."""

from __future__ import annotations

import pytest

from stepfast.cli.main import main
from stepfast.cli.parser import AGENT_ONLY, parse
from stepfast.cli.run import flags_of
from stepfast.config import SETTINGS, JobConfig


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


def test_a_coordinator_is_given_flags_that_it_knows_alone() -> None:
    values: dict[str, object] = {"int": 3, "float": 2.0, "str": "x", "tuple": ("x", "y")}
    given = {name: values[str(s.type).split("[")[0].split(" ")[0]] for name, s in SETTINGS.items()}
    flags = flags_of(JobConfig(**given))
    options = parse(["coordinator", *flags])
    taken = {name for name in SETTINGS if hasattr(options, name)}
    assert set(SETTINGS) - taken == {*AGENT_ONLY, "token_file"}
