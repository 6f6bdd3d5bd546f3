"""Plain values as bytes: MessagePack that comes back as exactly what went in, and no pickle.

Owns: the codec, which leaves it takes, and the RNG states of Python and NumPy as plain values.
Does not own: tensors; a leaf that the caller turns into a `Ref` stands for one.

Invariants: decode(encode(x)) == x with the same types (tuples, integer keys, integers of any size,
NumPy scalars), or encode raises a ScriptError that names the path of what it cannot take. Decoding
runs no code that the bytes choose.
"""

from __future__ import annotations

import functools
import random
import struct
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from stepfast.errors import ScriptError

DEPTH_MAX = 100
_STRINGS = frozenset({str})
_AS_THEY_ARE = frozenset({float, bool, bytes, type(None)})
_INT64 = range(-(2**63), 2**63)


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """Stands for a tensor: its entry's name and the kind of device it lives on.

    `shards` is None for a plain tensor; for a DTensor, per mesh dimension, the dimension that is
    sharded, or -1 where it is replicated.
    """

    name: str
    device: str
    shards: tuple[int, ...] | None


Leaf = Callable[[object, str], Ref | None]

# Extension codes; their numbers are part of the format.
_TUPLE, _PAIRS, _ORDERED, _COUNTER, _SET, _FROZENSET, _DEQUE = 1, 2, 3, 4, 5, 6, 7
_INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR, _REF = 8, 9, 10, 11, 12, 13

_MAPPINGS: dict[type, int] = {OrderedDict: _ORDERED, Counter: _COUNTER}
_SEQUENCES: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_REF_DECODER = msgspec.msgpack.Decoder(Ref)
_BUILD: dict[int, Callable[[Any], object]] = {
    _TUPLE: tuple, _SET: set, _FROZENSET: frozenset, _PAIRS: dict, _ORDERED: OrderedDict,
    _COUNTER: lambda pairs: Counter(dict(pairs)),
    _DEQUE: lambda parts: deque(parts[0], maxlen=parts[1]),
    _ARRAY: lambda parts: _array(*parts), _SCALAR: lambda parts: _array(*parts)[()],
    _COMPLEX: lambda parts: complex(*parts),
}  # fmt: skip


def encode(value: object, leaf: Leaf | None = None, path: str = "") -> bytes:
    """The bytes of `value`; `leaf(object, path)` may make a Ref of what is not plain.

    A value that was encoded before may be inside, as a msgspec.Raw of its bytes; `path` is then
    where it will be.
    """
    packed = _pack(value, path, 0, leaf or _no_leaf)
    return msgspec.msgpack.encode(packed)


def decode(blob: bytes | memoryview) -> Any:
    """The value whose bytes these are; ValueError where they are not of this codec."""
    try:
        return msgspec.msgpack.decode(blob, ext_hook=_unpack)
    except (msgspec.MsgspecError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"the plain values are damaged: {error!r}") from error


def replace_refs(value: Any, resolve: Callable[[Ref], object]) -> Any:
    """`value` with every Ref in it replaced by what `resolve` makes of it."""
    kind = type(value)
    if kind is Ref:
        return resolve(value)
    if kind in (dict, OrderedDict, Counter):
        # Through a dict, for a Counter counts what it is given instead of taking pairs.
        return kind({key: replace_refs(item, resolve) for key, item in value.items()})
    if kind in (list, tuple):
        return kind([replace_refs(item, resolve) for item in value])
    if kind is deque:
        return deque((replace_refs(item, resolve) for item in value), maxlen=value.maxlen)
    return value


def process_rng() -> dict[str, object]:
    """The RNG states of Python and, where it is loaded, of NumPy."""
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    return rng_values(random.getstate(), of_numpy)


def rng_values(of_python: Any, of_numpy: dict[str, Any] | None) -> dict[str, object]:
    """States of generators of the kinds of Python's and NumPy's, for `set_process_rng`.

    Their words are bytes: to pack them as what they are would be the dearest part of a small
    snapshot.
    """
    version, words, gauss = of_python
    states: dict[str, object] = {"python": [version, struct.pack(f"<{len(words)}I", *words), gauss]}
    if of_numpy is not None:
        states["numpy"] = _with_key(of_numpy, lambda key: key.tobytes())
    return states


def set_process_rng(states: dict[str, Any]) -> None:
    """Set what `process_rng` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, struct.unpack(f"<{len(words) // 4}I", words), gauss))
    if "numpy" in states:
        import numpy

        as_words = functools.partial(numpy.frombuffer, dtype=numpy.uint32)
        numpy.random.set_state(_with_key(states["numpy"], as_words))


def _with_key(state: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    """NumPy's state with its words as `change` makes them; not all of its generators have any."""
    inner = state["state"]
    return (
        state if "key" not in inner else {**state, "state": {**inner, "key": change(inner["key"])}}
    )


def _pack(value: Any, path: str, depth: int, leaf: Leaf) -> object:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is str:
        return _checked_text(value, path)
    if kind is int:
        return value if value in _INT64 else _ext(_INT, _int_bytes(value))
    if depth >= DEPTH_MAX:
        raise ScriptError(
            f"the state at {path[:200]} is nested more than {DEPTH_MAX} deep; flatten it"
        )
    if kind is list:
        return [_pack(item, f"{path}.{i}", depth + 1, leaf) for i, item in enumerate(value)]
    if kind is dict and _STRINGS.issuperset(map(type, value)):
        # Scalars at once: most of what is in a state is one, and this runs at every snapshot.
        return {
            (k if k.isascii() else _checked_text(k, path)): (
                v if type(v) in _AS_THEY_ARE else _pack(v, _join(path, k), depth + 1, leaf)
            )
            for k, v in value.items()
        }
    if kind is msgspec.Raw:
        return value
    ref = leaf(value, path)
    if ref is not None:
        return _pack_ref(ref)
    if kind is dict or kind in _MAPPINGS:
        pairs = [
            [_pack(k, path, depth + 1, _no_leaf), _pack(v, _join(path, k), depth + 1, leaf)]
            for k, v in value.items()
        ]
        return _nested(_MAPPINGS.get(kind, _PAIRS), pairs)
    if kind in _SEQUENCES:
        return _nested(
            _SEQUENCES[kind],
            [_pack(item, f"{path}.{i}", depth + 1, leaf) for i, item in enumerate(value)],
        )
    return _pack_rare(value, path, depth, leaf)


def _pack_rare(value: Any, path: str, depth: int, leaf: Leaf) -> object:
    kind = type(value)
    if kind is deque:
        items = [_pack(item, f"{path}.{i}", depth + 1, leaf) for i, item in enumerate(value)]
        return _nested(_DEQUE, [items, value.maxlen])
    if kind is bytearray:
        return _ext(_BYTEARRAY, bytes(value))
    if kind is complex:
        return _nested(_COMPLEX, [value.real, value.imag])
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and kind is numpy.ndarray
    is_scalar = numpy is not None and isinstance(value, numpy.generic)
    if (is_array or is_scalar) and value.dtype.kind in "biufcSU":
        parts = [value.dtype.str, list(value.shape), value.tobytes()]
        return _nested(_ARRAY if is_array else _SCALAR, parts)
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ScriptError(
        f"the state at {path} holds a {name}, which stepfast does not keep; return numbers,"
        " strings, tensors, lists, tuples and dicts from state_dict()"
    )


@functools.lru_cache(maxsize=65536)  # the same few per parameter, at every snapshot
def _pack_ref(ref: Ref) -> msgspec.msgpack.Ext:
    return _nested(_REF, [ref.name, ref.device, ref.shards])


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _unpack(code: int, data: memoryview) -> object:
    if code == _INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _BYTEARRAY:
        return bytearray(data)
    if code == _REF:  # the most frequent one, in one go
        return _REF_DECODER.decode(data)
    return _BUILD[code](msgspec.msgpack.decode(data, ext_hook=_unpack))


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    import numpy

    # A copy, because arrays over bytes are read-only.
    return numpy.frombuffer(data, dtype=numpy.dtype(dtype)).reshape(shape).copy()


def _checked_text(value: str, path: str) -> str:
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ScriptError(f"the state at {path} holds text that is no valid Unicode")
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _ext(code: int, data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, data)


def _nested(code: int, parts: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(parts))


def _no_leaf(value: object, path: str) -> None:
    return None
