"""Holds torch_symbols.toml against the torch that is installed: `python tests/torch_symbols.py`.

Owns: finding a symbol without making an object of its class, its parameters, its file. Needs torch
and nothing else of ours, so that an environment with torch alone can run it.
Does not own: which symbols there are (`architecture.torch_uses`).

Invariant: CUDA is not initialised, and no GPU is needed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import mmap
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_suffix(".toml")
_CUDART = "torch.cuda.cudart()"  # a call of it would initialise CUDA; this is what it returns
_REQUIRED = "(required)"
_DRIVER = "driver"
_COMPILED = "compiled"


class Row(NamedTuple):
    """One symbol or variable; `parameters` is None where nothing is said of them."""

    name: str
    parameters: dict[str, str] | None
    where: tuple[str, ...]
    is_guarded: bool
    needs_cuda: bool
    is_variable: bool
    since: tuple[int, ...] = ()


class Found(NamedTuple):
    """What became of a row: `ok`, `unused` on this torch or its build, or `differs` and why."""

    row: Row
    verdict: str
    why: str


def read(path: Path = TABLE) -> tuple[dict[str, Any], list[Row]]:
    """The table, and its rows one by one."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = []
    for group in table["symbol"]:
        for text in group["names"]:
            name, parameters = _parse(text)
            rows.append(_row(group, f"{group['owner']}.{name}", parameters, [group["where"]]))
    for group in table["variable"]:
        rows += [
            _row(group, name, None, group["where"], is_variable=True) for name in group["names"]
        ]
    return table, rows


def _row(
    group: dict[str, Any], name: str, parameters: dict[str, str] | None, where: list[str],
    *, is_variable: bool = False,
) -> Row:  # fmt: skip
    return Row(
        name=name,
        parameters=parameters,
        where=tuple(where),
        is_guarded=group.get("guarded", False),
        needs_cuda=group.get("build") == "cuda",
        is_variable=is_variable,
        since=_numbers(group.get("since", "0")),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _parse(text: str) -> tuple[str, dict[str, str] | None]:
    """`f(a, b=1)` as its name and {"a": _REQUIRED, "b": "1"}."""
    name, opening, rest = text.partition("(")
    return name, _parameters_in(rest.removesuffix(")")) if opening else None


def _parameters_in(text: str) -> dict[str, str]:
    """Out of `a: int, b: str = 'x', *, c=None`; `self` and the stars are left out."""
    found = {}
    for part in re.split(r",\s*(?![^\[\(]*[\]\)])", text):
        name, is_given, default = part.partition("=")
        name = name.split(":")[0].strip()
        if name and name not in ("self", "/") and not name.startswith("*"):
            found[name] = default.strip() if is_given else _REQUIRED
    return found


# --------------------------------------------------------------------------------- one torch


def check(table: dict[str, Any], rows: list[Row]) -> Iterator[Found]:
    """Each row against the torch that this process can import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says what it deprecates, and that it sees no GPU
        import torch

        version = torch.__version__.split("+")[0]
        is_guard_open = ".".join(version.split(".")[:2]) in table["guarded"]
        has_cuda = torch.version.cuda is not None
        for row in rows:
            if row.needs_cuda and not has_cuda:
                yield Found(row, "unused", "a build without CUDA")
                continue
            if _numbers(version) < row.since:
                yield Found(row, "unused", f"not before torch {row.since[0]}.{row.since[1]}")
                continue
            why = _why_variable(row) if row.is_variable else _why_symbol(row)
            if why and row.is_guarded and not is_guard_open:
                yield Found(row, "unused", f"not under {version}: {why}")
            else:
                yield Found(row, "differs" if why else "ok", why)
        assert not torch.cuda.is_initialized()


def _why_variable(row: Row) -> str:
    import torch

    packages = Path(torch.__file__).parents[1]
    if _DRIVER in row.where or any(_holds(packages / name, row.name) for name in row.where):
        return ""
    return f"in none of {', '.join(row.where)}"


def _holds(path: Path, text: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(text.encode() + rb"[^A-Z_]", content) is not None


def _why_symbol(row: Row) -> str:
    owner_name, _, name = row.name.rpartition(".")
    try:
        owner = _reach(owner_name)
    except (AttributeError, ImportError) as error:
        return f"{owner_name}: {error}"
    where = _field_file(owner, name)
    if where is None:
        return f"{owner_name} has no {name}"
    (expected,) = row.where
    if not where.endswith(expected):
        return f"is defined in {where.partition('site-packages/')[2] or where}"
    if row.parameters is None:
        return ""
    return _why_parameters(row.parameters, _parameters(owner, name))


def _reach(path: str) -> Any:
    """The object, the modules on the way imported."""
    if path == _CUDART:
        return importlib.import_module("torch")._C._cudart
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(".".join(parts[:at]))
        found = getattr(found, part)
    return found


def _field_file(owner: Any, name: str) -> str | None:
    """The file that defines it, of a class's instances too; None where there is no such name."""
    for base in inspect.getmro(owner) if inspect.isclass(owner) else ():
        if name in vars(base) or name in _instance_fields(base):
            own = inspect.getattr_static(base, name, None)
            return _file_of(own) if inspect.isfunction(own) else _file_of(base)
    if not hasattr(owner, name):
        return None
    value = getattr(owner, name)
    is_plain = inspect.isfunction(value) or inspect.isclass(value)
    if is_plain or inspect.isbuiltin(value):
        return _file_of(value)
    return _file_of(owner if inspect.ismodule(owner) else type(owner))


def _file_of(thing: Any) -> str:
    """Of a class by its functions: torch gives some classes another `__module__`."""
    if not inspect.isclass(thing):
        try:
            return inspect.getsourcefile(inspect.unwrap(thing)) or _COMPILED
        except TypeError:
            return _COMPILED
    for value in vars(thing).values():
        code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
        if code is not None and code.co_qualname.startswith(f"{thing.__qualname__}."):
            return str(code.co_filename)
    module = getattr(sys.modules.get(thing.__module__), "__file__", None) or _COMPILED
    return module if _class_in(module, thing.__name__) is not None else _COMPILED


def _class_in(path: str, name: str) -> ast.ClassDef | None:
    tree = _tree(path)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    return found[0] if found else None


@cache
def _tree(path: str) -> ast.Module:
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.suffix == ".py" and file.is_file() else ""
    return ast.parse(text)


@cache
def _instance_fields(cls: type) -> frozenset[str]:
    """The attributes that the class's own source gives its instances, or annotates."""
    tree = _class_in(_file_of(cls), cls.__name__)
    nodes = list(ast.walk(tree)) if tree is not None else []
    annotated = {n.target.id for n in nodes
                 if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}  # fmt: skip
    return frozenset(annotated) | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
    }


def _parameters(owner: Any, name: str) -> list[dict[str, str]]:
    """Of each overload; empty where nothing says them."""
    function = getattr(owner, name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return list(_documented_parameters(function, name))
    except AttributeError:  # a pybind class has none
        return []
    given = {
        p.name: _REQUIRED if p.default is p.empty else repr(p.default)
        for p in signature.parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in ("self", "cls")
    }
    return [given]


def _documented_parameters(function: Any, name: str) -> Iterator[dict[str, str]]:
    text = getattr(function, "__doc__", None) or ""
    signatures = re.findall(rf"\b{re.escape(name)}\((.*?)\) ->", text)
    yield from map(_parameters_in, signatures)
    import torch

    operator = getattr(torch.ops.aten, name, None)
    if not signatures and operator is not None:
        yield {
            a.name: repr(a.default_value) if a.has_default_value() else _REQUIRED
            for a in operator.default._schema.arguments
        }


def _why_parameters(ours: dict[str, str], overloads: list[dict[str, str]]) -> str:
    whys = [_why_overload({k: v for k, v in ours.items() if k != "self"}, o) for o in overloads]
    if not whys:
        return "torch does not say its parameters"
    return "" if "" in whys else whys[0]


def _why_overload(ours: dict[str, str], theirs: dict[str, str]) -> str:
    theirs = {name: default for name, default in theirs.items() if name != "self"}
    for name, default in ours.items():
        if name not in theirs:
            return f"has no parameter {name}: {_shown(theirs)}"
        if default not in (_REQUIRED, theirs[name]):
            return f"{name} is {theirs[name]} where nothing is given, not {default}"
    if [n for n in theirs if n in ours] != list(ours):
        return f"has its parameters in another order: {_shown(theirs)}"
    more = [n for n, default in theirs.items() if default == _REQUIRED and n not in ours]
    return f"wants {', '.join(more)} too" if more else ""


def _shown(parameters: dict[str, str]) -> str:
    return ", ".join(n if d == _REQUIRED else f"{n}={d}" for n, d in parameters.items())


# --------------------------------------------------------------------------------- the program


def main() -> int:
    """Prints a line for each row; 1 where one differs."""
    table, rows = read()
    found = list(check(table, rows))
    import torch

    version = torch.__version__.split("+")[0]
    width = max(len(row.name) for row in rows)
    for one in found:
        print(f"{one.verdict:<8} {one.row.name:<{width}} {one.why}".rstrip())
    count = {v: sum(f.verdict == v for f in found) for v in ("ok", "unused", "differs")}
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    print(
        f"torch {torch.__version__} ({build}): " + ", ".join(f"{n} {v}" for v, n in count.items())
    )
    if version not in table["checked"]:
        print(f"torch {version} is not among the checked versions: {', '.join(table['checked'])}")
    return 1 if count["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
