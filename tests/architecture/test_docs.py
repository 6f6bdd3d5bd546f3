"""What the documents point to exists, and the commands that they show parse."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from architecture.source_tree import ROOT, files, relative
from stepfast.errors import ConfigError

DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "deploy/README.md",
    "docs/eks.md",
    "docs/from-aws-nvrx-sample.md",
    "docs/glossary.md",
    "docs/your-loop.md",
    "tests/README.md",
]

_FENCE = re.compile(r"^\s*(```+|~~~+)(.*)$")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_INLINE_CODE = re.compile(r"`[^`]*`")
# At a line's beginning, behind a pipe, or in a container: `kubectl exec ... -- stepfast doctor`.
_COMMAND = re.compile(
    r"^\s*(?:\$ )?(?:\S.*?\s(?:--|\|)\s+)?(?:\.venv/bin/)?stepfast\s+(?P<arguments>\S.*)$"
)
_SHELL_LANGUAGES = ("", "sh", "bash", "shell", "console", "text")


def fenced_lines(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Each line with its number and the language of its fenced block (None outside of any)."""
    fence, language = "", None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(line)
        if match and not fence:
            fence, language = match[1], match[2].strip().split(" ")[0]
        elif match and match[1].startswith(fence) and not match[2].strip():
            fence, language = "", None
        else:
            yield number, line, language


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings: lower case, no punctuation, hyphens."""
    titles = (line for _, line, language in fenced_lines(path) if language is None)
    headings = [title.lstrip("#").strip() for title in titles if re.match(r"#{1,6} ", title)]
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(path: Path) -> Iterator[str]:
    for number, line, language in fenced_lines(path):
        if language is not None:
            continue
        for target in _LINK.findall(_INLINE_CODE.sub("", line)):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue  # another scheme: not ours to look up
            name, _, anchor = target.partition("#")
            aim = (path.parent / unquote(name)).resolve() if name else path
            if not aim.exists():
                yield f"{relative(path)}:{number}: {target} does not exist"
            elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
                yield f"{relative(path)}:{number}: {target} has no such heading"


def documented_commands(path: Path) -> Iterator[tuple[int, str]]:
    """The arguments of every `stepfast ...` line in a fenced block of shell.

    A backslash at the end of a line goes on in the next.
    """
    begun: tuple[int, str] | None = None
    for number, line, language in fenced_lines(path):
        if language not in _SHELL_LANGUAGES or language is None:
            begun = None
            continue
        if begun is not None:
            begun = (begun[0], begun[1] + " " + line.strip())
        elif match := _COMMAND.match(line):
            begun = (number, match["arguments"].strip())
        if begun is not None and not begun[1].endswith("\\"):
            yield begun
            begun = None
        elif begun is not None:
            begun = (begun[0], begun[1][:-1].strip())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_exists(name: str):
    assert (ROOT / name).is_file()
    assert (ROOT / name).stat().st_size > 200


def test_links_resolve():
    assert [broken for path in files(".md") for broken in broken_links(path)] == []


def complaint_about(words: list[str]) -> str:
    """What the command line says about the words of a command; empty where it takes them."""
    from stepfast.cli.parser import parse

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse(words)
    except ConfigError as error:
        return str(error)
    except SystemExit as end:  # --help and --version
        return "" if end.code in (0, None) else said.getvalue().strip()
    return ""


def test_documented_commands_parse():
    refused = []
    for path in files(".md"):
        for number, arguments in documented_commands(path):
            words = shlex.split(arguments, comments=True)
            ends = [words.index(word) for word in ("&", "&&", "|", ">") if word in words]
            words = words[: min(ends, default=len(words))]
            if complaint := complaint_about(words):
                refused.append(f"{relative(path)}:{number}: stepfast {arguments}: {complaint}")
    assert refused == []


def test_a_command_is_found_in_a_fenced_block(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "stepfast not this\n```sh\n$ stepfast run \\\n  --nodes 2 train.py  # two nodes\n"
        "k exec pod -- stepfast doctor --json\nhelm template x | stepfast k8s validate -\n```\n",
        encoding="utf-8",
    )
    assert list(documented_commands(page)) == [
        (3, "run --nodes 2 train.py  # two nodes"),
        (5, "doctor --json"),
        (6, "k8s validate -"),
    ]
