"""Which turns of stepfast's job have snapshots, and which boundary is made durable.

Owns: the cycle. It begins with a durable boundary and the turns in which that is written; then come
a block of turns with a snapshot at each and one without any, or the other way round.
"""

DURABLE_TURNS = 5  # more than writing takes
BLOCK_TURNS = 8
CYCLE_TURNS = DURABLE_TURNS + 2 * BLOCK_TURNS


def is_without(step: int) -> bool:
    """Whether no snapshot is taken at this boundary. The first cycle has all: it warms up."""
    cycle, at = divmod(step, CYCLE_TURNS)
    if cycle == 0 or at < DURABLE_TURNS:
        return False
    return (at < DURABLE_TURNS + BLOCK_TURNS) == (cycle % 2 == 1)
