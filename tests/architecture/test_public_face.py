"""What users rely on by name changes only on purpose: the package's names, the flags of the CLI.

After an intended change of flags, write the golden file again and say so in the change fragment:

    .venv/bin/python tests/architecture/test_public_face.py > tests/architecture/cli_flags.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

CLI_FLAGS = Path(__file__).with_name("cli_flags.txt")
PUBLIC_NAMES = ["Interrupted", "Run", "__version__", "resilient"]


def test_public_names_are_frozen():
    import stepfast

    assert sorted(stepfast.__all__) == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(stepfast))
    assert all(getattr(stepfast, name) is not None for name in PUBLIC_NAMES)


def test_an_unknown_public_name_is_an_attribute_error():
    import stepfast

    assert not hasattr(stepfast, "no_such_name")


def test_the_version_is_that_of_the_project():
    import tomllib

    import stepfast

    project = CLI_FLAGS.parents[2] / "pyproject.toml"
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    assert stepfast.__version__ == declared


def test_cli_flags_are_frozen():
    from stepfast.cli.parser import build_parser

    frozen = CLI_FLAGS.read_text(encoding="utf-8")
    assert "\n".join(flags_of(build_parser())) + "\n" == frozen, __doc__


def flags_of(parser: argparse.ArgumentParser, command: str = "stepfast") -> Iterator[str]:
    """One line for each argument of the command and its subcommands, as they were defined."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from flags_of(subparser, f"{command} {name}")
        elif not isinstance(action, argparse._HelpAction):
            yield f"{command} {_argument(action)}"


def _argument(action: argparse.Action) -> str:
    words = [", ".join(action.option_strings) or f"<{action.dest}>"]
    if action.choices is not None:
        words.append("{" + "|".join(str(choice) for choice in action.choices) + "}")
    if action.option_strings and action.nargs != 0 and action.choices is None:
        words.append(str(action.metavar or action.dest.upper()))
    if action.nargs not in (None, 0):
        words.append(f"nargs={action.nargs}")
    if action.required and action.option_strings:
        words.append("required")
    return " ".join(words)


if __name__ == "__main__":
    from stepfast.cli.parser import build_parser

    print("\n".join(flags_of(build_parser())))
