"""Plain values come back as exactly what went in, or are refused by their path."""

from __future__ import annotations

import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepfast.checkpoint import plain
from stepfast.errors import ScriptError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """A value with all types spelled out, for 1 == True == 1.0 and () == ()."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [typed(item) for item in value]
    return type(value), value


@given(TREES)
def test_what_goes_in_comes_out(tree: object) -> None:
    assert typed(plain.decode(plain.encode(tree))) == typed(tree)


@given(TREES)
def test_without_tensors_nothing_is_replaced(tree: object) -> None:
    assert typed(plain.replace_refs(tree, lambda ref: ref.name + "?")) == typed(tree)


def test_tensors_are_replaced_wherever_they_are() -> None:
    ref = plain.Ref("a", "cpu", (0, -1))
    tree = {"x": [(ref, 1)], 2: OrderedDict(y=ref), "z": deque([ref]), "c": Counter(q=2)}
    back = plain.decode(plain.encode(tree, lambda value, _: value if value is ref else None))
    found = plain.replace_refs(back, lambda got: got == ref)
    wanted = {"x": [(True, 1)], 2: OrderedDict(y=True), "z": deque([True]), "c": Counter(q=2)}
    assert typed(found) == typed(wanted)


@given(st.floats())
def test_floats_are_exact(value: float) -> None:
    back = plain.decode(plain.encode([value]))[0]
    if value == value:
        assert struct.pack("<d", back) == struct.pack("<d", value)
    else:
        assert back != back


@given(st.binary())
def test_garbage_is_a_value_error_or_a_value(garbage: bytes) -> None:
    try:
        plain.decode(garbage)
    except ValueError:
        pass


def test_rare_kinds_round_trip() -> None:
    values: dict[str, Any] = {
        "counter": Counter({3: 2, 1: 1}),
        "deque": deque([1, 2], maxlen=2),
        "frozen": frozenset({1}),
        "bytearray": bytearray(b"x"),
        "float32": numpy.float32(0.1),
        "bool": numpy.bool_(True),
    }
    assert typed(plain.decode(plain.encode(values))) == typed(values)
    array = numpy.arange(6, dtype=">i2").reshape(2, 3)
    back = plain.decode(plain.encode(array))
    assert back.dtype == array.dtype and (back == array).all()
    back[0, 0] = 9


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [Colour.RED, object(), print, defaultdict(list), numpy.array([object()], dtype=object), type],
)
def test_other_objects_are_refused_by_path(value: object) -> None:
    with pytest.raises(ScriptError, match=r"scheduler\.stages\.1\.x"):
        plain.encode({"scheduler": {"stages": [0, {"x": value}]}})


def test_endless_state_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ScriptError, match="nested"):
        plain.encode({"loader": endless})
    with pytest.raises(ScriptError, match="Unicode"):
        plain.encode({"name": "\ud800"})


def test_process_rngs_come_back() -> None:
    random.gauss(0, 1)
    state = plain.decode(plain.encode(plain.process_rng()))
    wanted = random.gauss(0, 1), random.random(), numpy.random.standard_normal(3).tolist()
    plain.set_process_rng(state)
    assert (random.gauss(0, 1), random.random(), numpy.random.standard_normal(3).tolist()) == wanted
