"""tests/torch_symbols.toml has a row for each name of torch that may change unannounced, and no
row that nothing uses."""

from __future__ import annotations

import ast
import tomllib

import pytest

from architecture.source_tree import PACKAGE, ROOT, syntax_tree
from architecture.torch_uses import is_covered, uses, uses_in, variables, words
from torch_symbols import read

# Private names of others that look as if they were torch's.
NOT_OF_TORCH = {"._config": "multiprocessing's directory for its sockets"}
KEYS = {"symbol": {"owner", "names", "where", "without", "guarded", "build", "since"},
        "variable": {"names", "where", "build", "since"}}  # fmt: skip


def table() -> dict[str, list[dict[str, object]]]:
    return read()[0]


def symbols() -> set[str]:
    return {row.name for row in read()[1] if not row.is_variable}


def test_every_use_of_a_private_name_or_of_cuda_has_a_row():
    rows = symbols()
    found = uses()
    assert not [f"{where}: {use}" for use, where in found.items()
                if not is_covered(use, rows) and use not in NOT_OF_TORCH]  # fmt: skip
    assert set(NOT_OF_TORCH) <= set(found)


def test_every_variable_of_torch_has_a_row_and_no_other():
    assert {row.name for row in read()[1] if row.is_variable} == set(variables())


def test_every_row_is_used():
    used = words()
    # The code compares what these return with 0, as `int(...)`: the type is what has to be there.
    assert {name for name in symbols() if name.rpartition(".")[2] not in used} == {
        "torch.cuda.cudart().cudaError"
    }


def test_no_row_stands_twice():
    names = [row.name for row in read()[1]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", KEYS)
def test_rows_say_what_they_have_to(kind: str):
    for group in table()[kind]:
        assert set(group) <= KEYS[kind]
        assert all(group[key] for key in KEYS[kind] - {"guarded", "build", "since"})
        assert group.get("build", "cuda") == "cuda"


@pytest.mark.parametrize("file", ["train/torch_private.py", "checkpoint/tensors/flat.py"])
def test_guarded_rows_are_guarded_by_the_same_versions(file: str):
    (listed,) = [
        ast.literal_eval(node.value)
        for node in syntax_tree(PACKAGE / file).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "TORCH_VERSIONS_VERIFIED"
    ]
    assert list(listed) == table()["guarded"]


def test_the_oldest_version_that_installs_was_checked():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (wanted,) = [d for d in settings["project"]["optional-dependencies"]["train"] if "torch>=" in d]
    assert table()["checked"][0].startswith(wanted.removeprefix("torch>="))


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("import torch\ntorch.cuda.Graph()", "torch.cuda.Graph"),
        ("import torch.cuda as c\nc.Graph", "torch.cuda.Graph"),
        ("from torch.cuda import Graph", "torch.cuda.Graph"),
        ("from torch._C import _x", "torch._C._x"),
        ("import torch\ntorch._C._x()", "torch._C._x"),
        ("def f(mesh): return mesh._ranks", "._ranks"),
        ("def f(mesh): return getattr(mesh, '_ranks', 0)", "._ranks"),
        ("_RANKS = attrgetter('_ranks')", "._ranks"),
        ("loaded_type('torch.a._b', 'C')", "torch.a._b.C"),
        ("class A:\n def f(self): self._cuda.Graph()", "torch.cuda.Graph"),
        ("driver.cudaFree(0)", "torch.cuda.cudart().cudaFree"),
    ],
)
def test_a_new_use_is_seen(text: str, use: str):
    found = {what for what, _ in uses_in(ast.parse(text))}
    assert use in found
    assert not is_covered(use, symbols())


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n def f(self): return self._own",
        "import os\nos._exit(0)",
        "part._replace(a=1)",
        "import torch\ntorch.nn.Linear",
    ],
)
def test_what_is_ones_own_or_public_is_no_use(text: str):
    assert not list(uses_in(ast.parse(text)))
