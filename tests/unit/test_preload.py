"""Which imports of a script are preloaded: installed ones run at its start, never the user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stepfast.train.preload import is_excluded, is_third_party, script_imports, try_import


def imports_of(directory: Path, text: str) -> list[str]:
    script = directory / "script.py"
    script.write_text(text)
    return script_imports(str(script))


def test_installed_imports_at_the_top_level_are_found_in_order(tmp_path: Path) -> None:
    text = """
import os, msgspec.json
from numpy.random import default_rng
if True:
    import pytest
try:
    import torch
except ImportError:
    import websockets
with open(__file__):
    import starlette
import msgspec.json
"""
    expected = ["msgspec.json", "numpy.random", "pytest", "torch", "starlette"]
    assert imports_of(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "import json",
        "import not_installed_anywhere",
        "from . import sibling",
        "import mine",
        "def later():\n    import numpy",
        "class Later:\n    import numpy",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
        "if __name__ == '__main__':\n    pass",
    ],
)
def test_nothing_else_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('the user's own')")
    assert imports_of(tmp_path, text) == []


def test_a_file_beside_the_script_hides_an_installed_package(tmp_path: Path) -> None:
    assert is_third_party("numpy", tmp_path)
    (tmp_path / "numpy").mkdir()
    assert not is_third_party("numpy", tmp_path)


def test_a_package_outside_the_installed_ones_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "on_the_path.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_third_party("on_the_path", tmp_path / "elsewhere")


@pytest.mark.parametrize("text", ["def broken(:", "\0", "import numpy\n  x"])
def test_a_broken_script_has_none(tmp_path: Path, text: str) -> None:
    assert imports_of(tmp_path, text) == []


def test_a_missing_script_has_none(tmp_path: Path) -> None:
    assert script_imports(str(tmp_path / "missing.py")) == []


def test_an_exclusion_takes_what_is_inside_with_it() -> None:
    assert is_excluded("a.b", ["a.b"])
    assert is_excluded("a.b.c", ["a.b"])
    assert not is_excluded("a.bc", ["a.b"])
    assert not is_excluded("a", ["a.b"])


def test_a_failing_import_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    assert try_import("leaves") == "SystemExit: 3"
    assert "leaves" not in sys.modules
    assert try_import("json") == ""
