"""What a boundary takes for true without a look, and the look that follows beside the training.

Owns: which objects are believed, and which of them were believed wrongly. Does not own: what is
looked at (`walk`, `fixed`), who looks and when (`staging`), what follows (`capture`).

An optimizer's state is other tensors only behind a step of it, or where a script puts others there:
rare, and dear to look for at every boundary. What is copied meanwhile is a snapshot in memory that
is sealed behind the look, or void.

Invariant: what was believed is looked at before the snapshot is sealed. An object that was once
believed wrongly is looked at at each boundary from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Set

Look = Callable[[], bool]


class Trust:
    """What one snapshot believes."""

    def __init__(self, doubted: Set[str]) -> None:
        """`doubted`: objects that are not believed."""
        self._doubted = doubted
        self._looks: list[tuple[str, Look]] = []

    @property
    def believed(self) -> tuple[str, ...]:
        """The objects that were."""
        return tuple(name for name, _ in self._looks)

    def holds(self, name: str, look: Look) -> bool:
        """Whether what is known of the object is true; if it is believed, `broken` will tell."""
        if name in self._doubted:
            return look()
        self._looks.append((name, look))
        return True

    def broken(self) -> list[str]:
        """The objects that were believed wrongly. While no optimizer steps, in any thread."""
        return [name for name, look in self._looks if not _is_true(look)]


def _is_true(look: Look) -> bool:
    try:
        return look()
    except RuntimeError:  # a dict that is written to meanwhile is not what it was
        return False
