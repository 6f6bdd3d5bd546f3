"""The installed torch has what tests/torch_symbols.toml says, and what it has not is told."""

from __future__ import annotations

import pytest

from torch_symbols import Row, check, read

COMPILED = "compiled"


def row(name: str, where: str = COMPILED, **parameters: str) -> Row:
    return Row(name, parameters or None, (where,), False, False, name.isupper())


def verdict(one: Row, guarded: tuple[str, ...] = ("2.13",)) -> tuple[str, str]:
    (found,) = check({"guarded": guarded}, [one])
    return found.verdict, found.why


def test_the_installed_torch_has_every_symbol():
    table, rows = read()
    found = list(check(table, rows))
    assert [f for f in found if f.verdict == "differs"] == []
    assert sum(f.verdict == "ok" for f in found) > 100


GRAPH = "torch/autograd/graph.py"
RANDOM = "torch/cuda/random.py"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (row("torch.cuda.no_such_name"), "torch.cuda has no no_such_name"),
        (row("torch.no_such_module.f"), "torch.no_such_module"),
        (row("torch.nn.Module._no_such_field"), "torch.nn.Module has no _no_such_field"),
        (row("torch.autograd.graph.increment_version", RANDOM), f"is defined in {GRAPH}"),
        (row("torch.cuda.set_rng_state", RANDOM, state="(required)"), "has no parameter state"),
        (row("torch.cuda.set_rng_state", RANDOM, device="'cuda'"), "wants new_state too"),
        (row("torch.cuda.get_rng_state", RANDOM, device="0"), "device is 'cuda'"),
        (row("torch._foreach_copy_", src="(required)", self="(required)", other="1"), "other"),
        (row("TORCH_NO_SUCH_VARIABLE", "torch/cuda/__init__.py"), "in none of"),
    ],
)
def test_what_is_missing_or_different_is_told(wrong: Row, why: str):
    found = verdict(wrong)
    assert found[0] == "differs"
    assert why in found[1]


def test_parameters_in_another_order_are_told():
    wrong = row("torch.cuda.Stream", "torch/cuda/streams.py", priority="0", device="None")
    assert "another order" in verdict(wrong)[1]


def test_a_guarded_symbol_may_be_missing_where_it_is_not_used():
    guarded = row("torch.nn.Module._no_such_field")._replace(is_guarded=True)
    assert verdict(guarded, guarded=())[0] == "unused"
    assert verdict(guarded)[0] == "differs"


def test_a_symbol_may_be_missing_before_the_version_that_brings_it():
    later = row("torch.nn.Module._no_such_field")._replace(since=(99, 1))
    assert verdict(later) == ("unused", "not before torch 99.1")
