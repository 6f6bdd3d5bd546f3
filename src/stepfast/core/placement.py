"""Which node holds which rank. Ranks stay where they are; a move happens only where membership
forces it.
"""

from __future__ import annotations

from stepfast.core.terms import NodeId, Rank


def ranks_of(node: NodeId, nproc_per_node: int) -> tuple[Rank, ...]:
    """The ranks of one node: consecutive, in the order of nodes, as torchrun numbers them."""
    first = node * nproc_per_node
    return tuple(Rank(r) for r in range(first, first + nproc_per_node))


def node_of(rank: Rank, nproc_per_node: int) -> NodeId:
    """The node that holds the rank."""
    return NodeId(rank // nproc_per_node)
