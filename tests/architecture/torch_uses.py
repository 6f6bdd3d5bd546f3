"""What of torch the package uses that may change without notice, as its source says.

Owns: finding in the syntax tree what is private to torch, what is CUDA's, and the variables of the
environment that torch, NCCL and Gloo read. Does not own: whether an installed torch has it
(`torch_symbols`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from architecture.source_tree import PACKAGE, dotted_name, files, relative, syntax_tree

ROOMS = (PACKAGE / "train", PACKAGE / "checkpoint" / "tensors")  # torch is imported nowhere else
_VARIABLE = re.compile(r"(TORCH|PYTORCH|CUDA|NCCL|GLOO)_[A-Z0-9_]*[A-Z0-9]")
_TORCH_PATH = re.compile(r"torch(\.\w+)+")
_CUDA_FUNCTION = re.compile(r"cuda[A-Z]\w*")
_NOT_TORCHS = {"_replace", "_asdict", "_fields"}  # of named tuples
_BY_NAME = {"getattr": 1, "hasattr": 1, "setattr": 1, "delattr": 1, "attrgetter": 0}

Uses = dict[str, str]
"""Where first, by what: a path from `torch` on, or `.name` for an attribute of some object."""


def uses() -> Uses:
    """What has to have a row in the table."""
    found: Uses = {}
    for room in ROOMS:
        for path in files(".py", under=room):
            for what, line in uses_in(syntax_tree(path)):
                found.setdefault(what, f"{relative(path)}:{line}")
    return found


def variables() -> Uses:
    """The variables of the environment that the package names, wherever it does."""
    return {
        node.value: f"{relative(path)}:{node.lineno}"
        for path in files(".py", under=PACKAGE)
        if not path.is_relative_to(PACKAGE / "k8s")  # what other people's manifests set
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _VARIABLE.fullmatch(node.value)
    }


def words() -> set[str]:
    """All names that stand in the rooms with torch, as attributes, imports or texts."""
    found: set[str] = set()
    for room in ROOMS:
        for path in files(".py", under=room):
            found |= set(_words_in(syntax_tree(path)))
    return found


def uses_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The uses in one file with their lines; the same one may come again."""
    aliases, others = _imports(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            for name in _imported(node).values():
                if _is_delicate(name):
                    yield name, node.lineno
        elif isinstance(node, ast.Attribute):
            yield from _of_attribute(node, aliases, others, is_whole=id(node) not in inner)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif _is_torch_path(node):
            yield node.value, node.lineno


def _of_attribute(
    node: ast.Attribute, aliases: dict[str, str], others: set[str], *, is_whole: bool
) -> Iterator[tuple[str, int]]:
    head, _, rest = dotted_name(node).partition(".")
    base = dotted_name(node.value)
    if head in aliases:
        path = f"{aliases[head]}.{rest}"
        if is_whole and _is_delicate(path):
            yield path, node.lineno
    elif _CUDA_FUNCTION.fullmatch(node.attr):
        yield f"torch.cuda.cudart().{node.attr}", node.lineno
    elif base.rpartition(".")[2] in ("cuda", "_cuda"):
        yield f"torch.cuda.{node.attr}", node.lineno
    elif base not in ("self", "cls") and head not in others and _is_private(node.attr):
        yield f".{node.attr}", node.lineno


def _of_call(node: ast.Call) -> Iterator[tuple[str, int]]:
    name = dotted_name(node.func)
    texts = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
    at = _BY_NAME.get(name)
    if at is not None and len(texts) > at:
        text = texts[at]
        if isinstance(text, str) and _is_private(text):
            yield f".{text}", node.lineno
    if name == "loaded_type" and _is_delicate(f"{texts[0]}.{texts[1]}"):
        yield f"{texts[0]}.{texts[1]}", node.lineno


def _imports(tree: ast.Module) -> tuple[dict[str, str], set[str]]:
    """What stands for something of torch, by its name here; the names of other imports."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= _imported(node)
    of_torch = {n: p for n, p in found.items() if p == "torch" or p.startswith("torch.")}
    return of_torch, set(found) - set(of_torch)


def _imported(node: ast.ImportFrom | ast.Import) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                for a in node.names}  # fmt: skip
    return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _NOT_TORCHS


def _is_delicate(path: str) -> bool:
    parts = path.split(".")
    return parts[0] == "torch" and (
        (parts[1:2] == ["cuda"] and len(parts) > 2) or any(map(_is_private, parts))
    )


def _is_torch_path(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and bool(_TORCH_PATH.fullmatch(text)) and _is_delicate(text)


def _words_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_covered(use: str, rows: set[str]) -> bool:
    """Whether a row speaks of the use, of something in it, or of the last private name in it."""
    if use.startswith("."):
        return any(row.endswith(use) for row in rows)
    if any(row.startswith(use + ".") for row in rows):
        return True
    parts = use.split(".")
    heads = {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
    return any(h in rows and not any(map(_is_private, use[len(h) :].split("."))) for h in heads)
