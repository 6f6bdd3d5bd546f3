"""Writes docs/gpu-status.md: `make gpu-status`.

    python tests/gpu_status.py > docs/gpu-status.md

Owns: what of the page is not written by hand, and reading what it is made of: the claims
(`gpu.claims`), the reports in docs/gpu-reports, the docstrings that say "Never run", the table of
symbols. Does not own: what any of those say, and the words of docs/gpu-status.in.
tests/architecture/test_gpu_status.py holds the page to be fresh, and its names to be real.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "docs" / "gpu-status.in"
REPORTS = ROOT / "docs" / "gpu-reports"
PACKAGE = ROOT / "src" / "stepfast"
NEVER_RUN = "never run"


def page() -> str:
    """The whole of docs/gpu-status.md."""
    from gpu.claims import CLAIMS

    reports = read_reports()
    made = {
        "verdict": _verdict(reports),
        "claims": "\n".join(_claims(CLAIMS, reports)),
        "symbols": _symbols(),
        "code": "\n".join(f"- [{p}](../{p}): {names}" for p, names in never_run().items()),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in made.items():
        text = text.replace(f"@{name}@", part)
    return text


def read_reports(directory: Path = REPORTS) -> list[dict[str, Any]]:
    """The reports that were kept, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    return sorted(found, key=lambda report: report["written"])


def _verdict(reports: list[dict[str, Any]]) -> str:
    if not reports:
        return "**No GPU has run any of this yet.** It was shown without one, or not at all."
    names = ", ".join(sorted({machine_words(r["machine"]) for r in reports}))
    return f"Reports so far: {len(reports)}, of {names}."


def machine_words(machine: dict[str, Any]) -> str:
    """The machine of a report in one line."""
    gpus = f"{len(machine['gpus'])} x {', '.join(sorted(set(machine['gpus'])))}"
    return f"{gpus} (driver {machine['driver']}, torch {machine['torch']}, NCCL {machine['nccl']})"


def status_of(name: str, reports: list[dict[str, Any]]) -> str:
    """What the newest report that ran the claim says."""
    for report in reversed(reports):
        for row in report["claims"]:
            if row["name"] != name or row["status"] == "NOT RUN":
                continue
            word = "verified" if row["status"] == "PASS" else f"FAILED ({row['reason']})"
            return f"{word} on {machine_words(report['machine'])}, {report['written'][:10]}"
    return NEVER_RUN


def _claims(claims: Any, reports: list[dict[str, Any]]) -> Iterator[str]:
    yield "| claim | GPUs | on a GPU | tests over doubles |"
    yield "|---|--:|---|--:|"
    for claim in claims:
        count = len(claim.doubles) or "none"
        yield f"| {claim.name} | {claim.gpus} | {status_of(claim.name, reports)} | {count} |"
    yield "\nThe code that measures them is executed over"
    yield "[a double of `torch.cuda`](../tests/fakes/device.py) in `make test`.\n"
    for claim in claims:
        more = f" Not shown by it: {claim.not_shown}." if claim.not_shown else ""
        yield f"**{claim.name}.** {claim.says}{more}\n"
        for test in claim.doubles:
            path, _, function = test.partition("::")
            yield f"- [{path.removeprefix('tests/')}](../{path}): `{function}`"
        yield "" if claim.doubles else "- no test over a double\n"


def _symbols() -> str:
    from torch_symbols import read

    table, rows = read()
    cuda = sum("cuda" in row.name.lower() or "nccl" in row.name.lower() for row in rows)
    return (
        f"{len(rows)} names of torch, CUDA and NCCL are used, {cuda} of them CUDA's or NCCL's."
        " Each was held, with its parameters and defaults, against torch"
        f" {', '.join(table['checked'])}\n([torch_symbols.toml](../tests/torch_symbols.toml),"
        " `make check-cuda`). That says that the calls exist, not what they do."
    )


def never_run() -> dict[str, str]:
    """The names, by file, whose docstrings say so; the whole module where its own does."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "k8s"):  # what no cluster has run is said in its own place
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        named = [n.name for n in ast.walk(tree) if isinstance(n, kinds) and _says_so(n)]
        if _says_so(tree):
            found[path.relative_to(ROOT).as_posix()] = "the module"
        elif named:
            found[path.relative_to(ROOT).as_posix()] = ", ".join(f"`{name}`" for name in named)
    return found


def _says_so(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> bool:
    return NEVER_RUN in " ".join((ast.get_docstring(node) or "").lower().split())


if __name__ == "__main__":
    sys.stdout.write(page())
