"""What a node says of its own health when it joins, or instead of joining.

Owns: the message; it is the event that it becomes. Does not own: any check (`health`).
"""

from __future__ import annotations

import msgspec

from stepfast.events import NodeChecked


class HealthReported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Behind a node's hello; or in its place, from a node that does not join for what was found."""

    protocol: int
    checked: NodeChecked

    @property
    def node(self) -> int:
        """Whose it is."""
        return self.checked.node
