"""Whether a training script uses stepfast, as its syntax tree shows it.

Owns: reading the tree. Does not own: running or importing anything of it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from stepfast.core.quantities import counted
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

_WANTED = {
    "resilient": "decorate the training function with @stepfast.resilient",
    "track": "call run.track(model=..., optimizer=...) before the loop",
    "steps": "write `for step in run.steps(total):` in the place of your own range",
}


def reads(path: Path) -> tuple[Finding, ast.Module | None]:
    """The script's syntax tree, where it has one."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        return unhealthy("script", f"{path}: {error.strerror}", "give the script's path"), None
    except SyntaxError as error:
        evidence = f"{path}, line {error.lineno}: {error.msg}"
        return unhealthy("script", evidence, "repair the script"), None
    except ValueError as error:
        return unhealthy("script", f"{path}: {error}", "give a Python script"), None
    return healthy("script", str(path)), tree


def uses(tree: ast.Module, directory: Path) -> list[Finding]:
    """One finding for each of `resilient`, `track` and `steps`.

    What is not here may be in a module of the user's own: then nobody knows.
    """
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = sorted(name for name in _imported(tree) if _is_own(name, directory))
    return [_use(wanted, change, names, own) for wanted, change in _WANTED.items()]


def _use(wanted: str, change: str, names: set[str], own: list[str]) -> Finding:
    check = f"uses {wanted}"
    if wanted in names:
        return healthy(check, "yes")
    if own:
        return unknown(check, f"not in the script; perhaps in {', '.join(own)}")
    return unhealthy(check, "no", change)


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def _is_own(name: str, directory: Path) -> bool:
    return (directory / f"{name}.py").exists() or (directory / name).is_dir()


def imports(failures: Mapping[str, str] | None, count: int, why_not: str = "") -> Finding:
    """What a throw-away process says that loaded the script's third-party modules.

    `failures`: module and reason; None: it did not answer (`why_not`).
    """
    check = "script's imports"
    if failures is None:
        return unhealthy(
            check, f"importing them did not end well: {why_not}", "look at these imports"
        )
    if failures:
        name, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return unhealthy(check, f"{name}: {reason}{more}", "install it, or repair that import")
    return healthy(check, f"{counted(count, 'third-party module')} can be loaded")
