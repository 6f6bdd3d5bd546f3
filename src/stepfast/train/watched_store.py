"""A generation's store as its groups see it: what passes through tells where the groups connect.

Owns: refusing everything once the generation is cut.
Does not own: what is done with the addresses (`train.abort`).

Not carried over: queues and `list_keys`, which torch's trampoline for stores in Python lacks.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from stepfast.errors import Interrupted
from stepfast.train.abort import Connections


class WatchedStore(Store):
    """A generation's store as its groups see it: learns addresses, refuses everything after the
    cut.

    torch calls it from C++ through a trampoline that does not own the Python object: whoever makes
    one keeps it for as long as a group of the generation lives.
    """

    def __init__(self, inner: Store, connections: Connections) -> None:
        super().__init__()
        self._inner = inner
        self._connections = connections
        self._clones: list[WatchedStore] = []
        self.group_keys: set[str] = set()
        """Keys under which this process published a listener, so one for each Gloo group it ever
        joined.
        """

    def _open(self) -> Store:
        if self._connections.is_cut:
            raise Interrupted("this generation's store is closed")
        return self._inner

    def set(self, key: str, value: str) -> None:
        store = self._open()
        if self._connections.learn_own(_bytes(value)):
            self.group_keys.add(key)
        store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._open().get(key)
        self._connections.learn_peer(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._open().multi_get(keys)
        for value in values:
            self._connections.learn_peer(value)
        return values

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        store = self._open()
        if timeout is None:
            store.wait(keys)
        else:
            store.wait(keys, timeout)

    def add(self, key: str, value: int) -> int:
        return self._open().add(key, value)

    def append(self, key: str, value: str) -> None:
        self._open().append(key, value)  # type: ignore[attr-defined]  # torch's stub lacks it

    def check(self, keys: list[str]) -> bool:
        return self._open().check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._open().compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._open().delete_key(key)

    def num_keys(self) -> int:
        return self._open().num_keys()

    def has_extended_api(self) -> bool:
        return False  # Gloo then asks for one key at a time, through `get`

    def clone(self) -> Store:
        inner = self._open().clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        clone = WatchedStore(inner, self._connections)
        self._clones.append(clone)
        return clone

    # The trampoline looks these two up under their C++ names.
    deleteKey = delete_key  # noqa: N815 - C++ looks for it
    getNumKeys = num_keys  # noqa: N815 - C++ looks for it


def _bytes(value: str | bytes) -> bytes:
    """What torch hands to a Python store is bytes, whatever the stub says."""
    return value.encode() if isinstance(value, str) else value
