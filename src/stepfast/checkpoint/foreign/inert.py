"""A pickle read as data: what it says, without a single object of anybody's being made.

Owns: the pickle machine's stack and memo; which opcodes there are. Does not own: what the names in
a pickle mean (`torch_file`, `dcp`).

Invariants:
- No module is imported, no name is looked up and nothing is called, whatever the bytes say: a
  global is a `Name`, a call is a `Made` that lists its arguments. There is no unpickler to get out
  of, and no class whose `__setstate__` could run.
- A name that the caller does not admit ends the reading, with that name in the error.
- Torn or foolish bytes are a StateError, never another exception.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from typing import Any, Final

from stepfast.errors import StateError

PROTOCOL_MAX = 5


class Name:
    """A global of a pickle, by its name; it is not looked up."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        """`text`: module and name, with a dot between."""
        self.text = text


class Made:
    """What a pickle would make by calling `name`: the arguments, and what is set behind that."""

    __slots__ = ("arguments", "items", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Not called: only said."""
        self.name = name
        self.arguments = arguments
        self.state: Any = None
        self.items = Pairs()


class Pairs:
    """A dict of a pickle, as its items in order: keys may be what Python could not hash."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        """Without an item."""
        self.items: list[tuple[Any, Any]] = []


class Persistent:
    """What lies outside of the pickle, by its id."""

    __slots__ = ("id",)

    def __init__(self, id_: Any) -> None:
        """`id_`: as the pickle has it."""
        self.id = id_


def read_inert(data: bytes, admitted: Collection[str], place: str) -> Any:
    """What the pickle in `data` describes: plain values, and the classes above for all else.

    Sets are lists. `place` is whose bytes these are, for errors. Raises StateError for a name that
    is not `admitted` and for what is no whole pickle.
    """
    machine = _Machine(admitted, place)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.run(opcode.name, argument)
    except StateError:
        raise
    # What the standard library and the stack raise for bytes that are no pickle, or a torn one.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise StateError(f"{place}: it is no whole pickle ({_words(error)})") from error
    raise AssertionError("pickletools ends with STOP, or raises")


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:80]
    return text or type(error).__name__


class _Machine:
    def __init__(self, admitted: Collection[str], place: str) -> None:
        self._admitted = admitted
        self._place = place
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _CONSTANTS:
            self._stack.append(argument)
        elif (step := _STEPS.get(name)) is not None:
            step(self, argument)
        else:
            raise StateError(f"{self._place}: refused: its pickle has the opcode {name}")

    def pop(self) -> Any:
        """What is on top; IndexError where nothing is."""
        return self._stack.pop()

    # --- steps; `argument` is the opcode's own, None where it has none ----------------------------

    def protocol(self, argument: int) -> None:
        if argument > PROTOCOL_MAX:
            raise StateError(
                f"{self._place}: refused: a pickle of protocol {argument}, of a newer Python than"
                f" is known here (up to {PROTOCOL_MAX}); save it again with an older one"
            )

    def nothing(self, argument: object) -> None:
        pass

    def mark(self, argument: object) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def to_mark(self) -> list[Any]:
        """What lies above the newest mark, which is gone then."""
        found, self._stack = self._stack, self._marks.pop()
        return found

    def pop_top(self, argument: object) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.to_mark()

    def pop_mark(self, argument: object) -> None:
        self.to_mark()

    def duplicate(self, argument: object) -> None:
        self._stack.append(self._stack[-1])

    def put(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    def memoize(self, argument: object) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    def name(self, argument: str) -> None:
        # The standard library gives module and name with one blank between.
        self._stack.append(self._admit(".".join(argument.split(" ", 1))))

    def stack_name(self, argument: object) -> None:
        last, module = self.pop(), self.pop()
        if not (isinstance(last, str) and isinstance(module, str)):
            raise StateError(f"{self._place}: refused: a name in its pickle is no text")
        self._stack.append(self._admit(f"{module}.{last}"))

    def _admit(self, text: str) -> Name:
        if text not in self._admitted:
            raise StateError(
                f"{self._place}: refused: its pickle names {text[:200]!r}, which no checkpoint"
                " needs; nothing of it was executed"
            )
        return Name(text)

    def call(self, argument: object) -> None:
        arguments, what = self.pop(), self.pop()
        self._stack.append(self._made(what, arguments))

    def call_with_keywords(self, argument: object) -> None:
        keywords, arguments, what = self.pop(), self.pop(), self.pop()
        made = self._made(what, arguments)
        made.state = keywords
        self._stack.append(made)

    def call_on_mark(self, argument: object) -> None:
        what, *arguments = self.to_mark()
        self._stack.append(self._made(what, tuple(arguments)))

    def call_named_on_mark(self, argument: str) -> None:
        arguments = tuple(self.to_mark())
        self.name(argument)
        self._stack.append(self._made(self.pop(), arguments))

    def _made(self, what: Any, arguments: Any) -> Made:
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise StateError(f"{self._place}: refused: its pickle calls what is no plain name")
        return Made(what.text, arguments)

    def build(self, argument: object) -> None:
        state, made = self.pop(), self._stack[-1]
        if not isinstance(made, Made):
            raise StateError(f"{self._place}: refused: its pickle sets the state of a plain value")
        made.state = state

    def outside(self, argument: object) -> None:
        self._stack.append(Persistent(self.pop() if argument is None else argument))

    def tuple_of(self, argument: object, count: int) -> None:
        start = len(self._stack) - count
        if start < 0:
            raise IndexError("the stack is empty")
        self._stack[start:] = [tuple(self._stack[start:])]

    def tuple_to_mark(self, argument: object) -> None:
        found = tuple(self.to_mark())
        self._stack.append(found)

    def empty_list(self, argument: object) -> None:
        self._stack.append([])

    def list_to_mark(self, argument: object) -> None:
        found = self.to_mark()
        self._stack.append(found)

    def append(self, argument: object) -> None:
        value = self.pop()
        self._list().append(value)

    def appends(self, argument: object) -> None:
        found = self.to_mark()
        self._list().extend(found)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise StateError(f"{self._place}: refused: its pickle appends to what is no list")
        return target

    def empty_dict(self, argument: object) -> None:
        self._stack.append(Pairs())

    def dict_to_mark(self, argument: object) -> None:
        found = self.to_mark()
        self._stack.append(Pairs())
        self._set(found)

    def set_item(self, argument: object) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def set_items(self, argument: object) -> None:
        self._set(self.to_mark())

    def _set(self, flat: list[Any]) -> None:
        target, pairs = self._stack[-1], zip(flat[::2], flat[1::2], strict=True)
        if isinstance(target, Made):  # an OrderedDict is called first and filled behind that
            target = target.items
        if not isinstance(target, Pairs):
            raise StateError(f"{self._place}: refused: its pickle sets an item of what is no dict")
        target.items.extend(pairs)


_Step = Callable[[_Machine, Any], None]

# Whose argument is the value itself.
_CONSTANTS: Final = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "FLOAT", "BINFLOAT",
})  # fmt: skip


def _constant(value: object) -> _Step:
    return lambda machine, _: machine._stack.append(value)


def _tuple(count: int) -> _Step:
    return lambda machine, argument: machine.tuple_of(argument, count)


# Left out, and so refused: bytearrays and buffers, and extension codes, which mean a process's own.
_STEPS: Final[dict[str, _Step]] = {
    "PROTO": _Machine.protocol, "FRAME": _Machine.nothing,
    "NONE": _constant(None), "NEWTRUE": _constant(True), "NEWFALSE": _constant(False),
    "MARK": _Machine.mark, "POP": _Machine.pop_top, "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "GET": _Machine.get, "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.name, "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.call, "NEWOBJ": _Machine.call, "NEWOBJ_EX": _Machine.call_with_keywords,
    "OBJ": _Machine.call_on_mark, "INST": _Machine.call_named_on_mark, "BUILD": _Machine.build,
    "PERSID": _Machine.outside, "BINPERSID": _Machine.outside,
    "EMPTY_TUPLE": _tuple(0), "TUPLE1": _tuple(1), "TUPLE2": _tuple(2), "TUPLE3": _tuple(3),
    "TUPLE": _Machine.tuple_to_mark,
    "EMPTY_LIST": _Machine.empty_list, "LIST": _Machine.list_to_mark,
    "APPEND": _Machine.append, "APPENDS": _Machine.appends,
    "EMPTY_SET": _Machine.empty_list, "ADDITEMS": _Machine.appends,
    "FROZENSET": _Machine.list_to_mark,
    "EMPTY_DICT": _Machine.empty_dict, "DICT": _Machine.dict_to_mark,
    "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items,
}  # fmt: skip
