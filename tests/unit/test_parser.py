"""What the command line says of what it does not know."""

from __future__ import annotations

import argparse

import pytest

from stepfast.cli.main import main
from stepfast.cli.parser import AGENT_ONLY, HEALTH, build_parser, parse
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


VALUES: dict[str, object] = {"int": 3, "float": 2.0, "str": "x", "tuple": ("x", "y")}


def test_who_is_started_knows_the_flags_that_it_is_given() -> None:
    given = {name: VALUES[str(s.type).split("[")[0].split(" ")[0]] for name, s in SETTINGS.items()}
    config = JobConfig(**given)  # type: ignore[arg-type]  # of each field's own type
    ours = {*AGENT_ONLY, "token_file"}
    for command, names in (
        (["coordinator"], set(SETTINGS) - ours),
        (["agent", "--coordinator", "x:1", "--", "x.py"], {"device", *HEALTH}),
    ):
        flags = flags_of(config, sorted(names))
        options = parse([command[0], *flags, *command[1:]])
        assert {name for name in names if hasattr(options, name)} == names


def test_a_coordinator_takes_every_setting_that_is_not_an_agents_alone() -> None:
    taken = {s.removeprefix("--").replace("-", "_") for s in flags_of_coordinator()}
    assert set(SETTINGS) - taken == set(AGENT_ONLY)


def flags_of_coordinator() -> list[str]:
    (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return [f for a in commands.choices["coordinator"]._actions for f in a.option_strings]
