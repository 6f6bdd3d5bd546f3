"""The repository's own files, as the architecture tests read them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "stepfast"

_NOT_OURS = {
    ".git",
    ".venv",
    ".venv-cuda",
    "__pycache__",
    "build",
    "dist",
    "stepfast-jobs",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".import_linter_cache",
    ".hypothesis",
}


def files(*suffixes: str, under: Path = ROOT) -> Iterator[Path]:
    """Every file of ours below `under` whose name ends with one of `suffixes`, sorted.

    All of them, where no suffix is given.
    """
    for folder, folders, names in os.walk(under):
        folders[:] = sorted(
            f for f in folders if f not in _NOT_OURS and not f.endswith(".egg-info")
        )
        for name in sorted(names):
            if not suffixes or name.endswith(suffixes):
                yield Path(folder, name)


def relative(path: Path) -> str:
    """The path as the tables of the tests write it."""
    return path.relative_to(ROOT).as_posix()


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the file with its qualified name (`Class.method`, `outer.inner`)."""

    def walk(
        node: ast.AST, prefix: str
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(syntax_tree(path), "")


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` for the expression a.b.c; empty for anything that is not a plain chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""
