"""Tidy is a test: sizes are ratchets, some calls are banned, no text names its author's machine.

A number here may go down in any commit. It goes up only in a commit that says why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest

from architecture.source_tree import (
    PACKAGE,
    ROOT,
    dotted_name,
    files,
    functions,
    relative,
    syntax_tree,
)

SOURCE_LINES_MAX = 600
TEST_LINES_MAX = 900
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 10
LINE_LENGTH_MAX = 100

# Broad excepts are for supervising loops: "file::function" and why. Their number is bounded too.
BROAD_EXCEPTS = {
    "src/stepfast/train/birth.py::become": "the last frame of a process: it goes into the log",
    "src/stepfast/train/birth.py::_leave": "the end of a process: exit functions are foreign code",
    "src/stepfast/train/preload.py::_report_and_exit": "the last frame of a throw-away child",
    "src/stepfast/train/preload.py::try_import": "a foreign import may fail in any way",
    "src/stepfast/train/entry.py::run_rank": "the user's script may raise anything: it is a fault",
    "src/stepfast/train/wrapper.py::RankProcess._outcome": "the same for the user's function",
    "src/stepfast/train/report.py::_message": "the text of a user's exception is user code",
    "src/stepfast/train/forming.py::Helper._run": "handed to the thread that waits for it",
    "src/stepfast/checkpoint/writer.py::_WriteBehind._run": "handed to the thread that reads",
    "src/stepfast/checkpoint/parallel.py::_Workers._run": "handed to the thread that asks",
}
BROAD_EXCEPTS_PER_LINE = 0.5 / 1000
BROAD_EXCEPTS_WHILE_SMALL = 8  # as many as 16,000 lines may have

# Settings are read from the environment at the door alone; others only make an environment.
ENVIRONMENT_USERS = {
    "src/stepfast/cli/main.py": "the door",
    "src/stepfast/train/entry.py": "the door of python and torchrun",
    "src/stepfast/agent/zygotes.py": "gives the agent's environment on to the zygote",
    "src/stepfast/train/birth.py": "gives a forked rank the environment that an exec would have",
    "src/stepfast/train/preload.py": "cuts a throw-away child off from devices and networks",
    "src/stepfast/train/zygote.py": "holds imports to one thread, and gives the user's values back",
}
# print is for what has a console (and files named so); everything else records events.
PRINTERS = {
    "src/stepfast/train/birth.py": "what a script said with sys.exit, as the interpreter prints it",
}

SLEEPLESS_TIERS = ("architecture", "unit", "property", "golden", "sim")

PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLING_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.getenvb", "os.putenv", "os.unsetenv"}


def package_files() -> list[Path]:
    return list(files(".py", under=PACKAGE))


def all_python_files() -> list[Path]:
    return list(files(".py"))


def refuse(found: list[str], instead: str = "") -> None:
    """Fail with every finding on a line of its own."""
    assert not found, "\n".join([instead, *found])


def is_test(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests")


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted_name(node.func), node


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def has_true_keyword(call: ast.Call, name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


# ---------------------------------------------------------------------- sizes


def test_no_file_is_too_long():
    too_long = [
        f"{relative(path)}: {lines} lines"
        for path in all_python_files()
        if (lines := path.read_text(encoding="utf-8").count("\n"))
        > (TEST_LINES_MAX if is_test(path) else SOURCE_LINES_MAX)
    ]
    refuse(too_long)


def test_no_function_is_too_long():
    too_long = [
        f"{relative(path)}:{node.lineno} {name}: {lines} lines"
        for path in all_python_files()
        for name, node in functions(path)
        if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    refuse(too_long)


def test_no_function_has_too_many_parameters():
    too_many = []
    for path in all_python_files():
        for name, node in functions(path):
            a = node.args
            names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")])
            if count > PARAMETERS_MAX:
                too_many.append(f"{relative(path)}:{node.lineno} {name}: {count} parameters")
    refuse(too_many)


def test_no_line_is_too_long():
    too_long = [
        f"{relative(path)}:{number}: {len(line)} characters"
        for path in all_python_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LINE_LENGTH_MAX and "://" not in line
    ]
    refuse(too_long)


# ---------------------------------------------------------------------- banned calls


def pickles_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for module, line in imported_modules(tree):
        if module.split(".")[0] in PICKLERS:
            yield line, f"import of {module}"
    for name, call in calls(tree):
        last = name.rsplit(".", 1)[-1]
        if last in PICKLING_COLLECTIVES:
            yield call.lineno, f"{name} pickles"
        if name == "torch.load" and not has_true_keyword(call, "weights_only"):
            yield call.lineno, "torch.load without weights_only=True"
        if last == "load" and has_true_keyword(call, "allow_pickle"):
            yield call.lineno, f"{name} with allow_pickle"


def evals_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, call in calls(tree):
        if name in ("eval", "builtins.eval"):
            yield call.lineno, "eval"


def environment_reads_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for module, line in imported_modules(tree):
        if module in ENVIRONMENT:
            yield line, f"import of {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted_name(node) in ENVIRONMENT:
            yield node.lineno, dotted_name(node)


def prints_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, call in calls(tree):
        if name in ("print", "pprint", "pprint.pprint"):
            yield call.lineno, name


def sleeps_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for name, call in calls(tree):
        if name in ("time.sleep", "sleep"):
            yield call.lineno, name


def is_console(path: Path) -> bool:
    return relative(path) in PRINTERS or "console" in path.stem


BANS = {
    "pickle": (pickles_in, lambda path: path.is_relative_to(PACKAGE)),
    "eval": (evals_in, lambda path: True),
    "environment": (
        environment_reads_in,
        lambda path: path.is_relative_to(PACKAGE) and relative(path) not in ENVIRONMENT_USERS,
    ),
    "print": (prints_in, lambda path: path.is_relative_to(PACKAGE) and not is_console(path)),
    "sleep": (
        sleeps_in,
        lambda path: any(path.is_relative_to(ROOT / "tests" / tier) for tier in SLEEPLESS_TIERS),
    ),
}


@pytest.mark.parametrize("ban", sorted(BANS))
def test_banned_calls(ban: str):
    find, applies_to = BANS[ban]
    found = [
        f"{relative(path)}:{line}: {what}"
        for path in all_python_files()
        if applies_to(path)
        for line, what in find(syntax_tree(path))
    ]
    refuse(found)


@pytest.mark.parametrize(
    ("find", "text"),
    [  # source as text, to be caught: nothing of it is run
        (pickles_in, "import pickle"),
        (pickles_in, "from pickle import loads"),
        (pickles_in, "dist.broadcast_object_list(x)"),
        (pickles_in, "torch.load(path)"),
        (pickles_in, "torch.load(path, weights_only=False)"),
        (pickles_in, "np.load(path, allow_pickle=True)"),
        (evals_in, "eval(text)"),
        (environment_reads_in, "os.environ['HOME']"),
        (environment_reads_in, "from os import environ"),
        (environment_reads_in, "os.getenv('HOME')"),
        (prints_in, "print(1)"),
        (sleeps_in, "time.sleep(1)"),
    ],
)
def test_bans_see_what_they_ban(find, text: str):
    assert list(find(ast.parse(text)))


@pytest.mark.parametrize(
    ("find", "text"),
    [
        (pickles_in, "torch.load(path, weights_only=True)"),
        (evals_in, "model.eval()"),
        (prints_in, "self.print(1)"),
    ],
)
def test_bans_let_pass_what_is_fine(find, text: str):
    assert not list(find(ast.parse(text)))


# ---------------------------------------------------------------------- broad excepts


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether the handler takes any error and does not, as its last act, raise again."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {dotted_name(c) for c in caught if c is not None}
    takes_all = handler.type is None or names & {"Exception", "BaseException"}
    return bool(takes_all) and not isinstance(handler.body[-1], ast.Raise)


def broad_excepts() -> list[str]:
    return [
        f"{relative(path)}::{name}"
        for path in package_files()
        for name, node in functions(path)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ExceptHandler) and is_broad(inner)
    ]


def test_broad_excepts_are_listed_with_a_reason():
    found = set(broad_excepts())
    refuse(sorted(found - set(BROAD_EXCEPTS)), "not in BROAD_EXCEPTS")
    refuse(sorted(set(BROAD_EXCEPTS) - found), "in BROAD_EXCEPTS, but no longer there")
    assert all(reason.strip() for reason in BROAD_EXCEPTS.values())


def test_broad_excepts_stay_few():
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in package_files())
    allowed = max(BROAD_EXCEPTS_WHILE_SMALL, ceil(lines * BROAD_EXCEPTS_PER_LINE))
    found = broad_excepts()
    assert len(found) <= allowed, found


# ---------------------------------------------------------------------- reasons and foreign words


def test_every_lint_exception_has_a_reason():
    pattern = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<rest>.*)$")
    bare = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in all_python_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := pattern.search(line)) and not re.search(r" (-|#) \w+", match["rest"])
    ]
    refuse(bare, "write `# noqa: CODE - why` or `# type: ignore[code]  # why`")


# Texts of a repository speak of the product, not of the machine or the way in which they were
# written. Each word is put together from halves, so that this file does not contain it.
FOREIGN = {
    "an absolute path of one machine": r"(?<![\w.~$}\-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me)/\w",
    "a folder of packages of one machine": r"/opt/(?:wh" + r"eels|py" + r"pi)",
    "a host of a package registry": r"py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.org",
    "how it was made": r"\bsess" + r"ions? of wo" + r"rk\b|\bfiled by a sess" + r"ion\b",
    "a number of a task": r"\b(?:see|in|of|by|from) iss" + r"ue #?\d+\b",
}
TEXT_SUFFIXES = (".py", ".md", ".toml", ".txt", ".cfg", ".yaml", ".yml", "Makefile", "run")


@pytest.mark.parametrize("what", sorted(FOREIGN))
def test_no_text_names(what: str):
    pattern = re.compile(FOREIGN[what], re.IGNORECASE)
    found = [
        f"{relative(path)}:{number}: {match.group()}"
        for path in files(*TEXT_SUFFIXES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    refuse(found)
