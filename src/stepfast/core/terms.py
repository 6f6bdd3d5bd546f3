"""The words of the system, as types: one word, one meaning.

job         one training, from its first step to its last, through any number of faults
node        one agent and its ranks; a machine or a pod
rank        one training process of a generation, numbered over the whole job
slot        one snapshot file of a rank in the node's memory
generation  one membership of the job: which process holds which rank; its number only grows
step        n means "n optimizer steps are done"; a snapshot of step n is taken before turn n begins
incarnation the number of processes that have held a rank on its node so far
"""

from __future__ import annotations

from typing import NewType

import msgspec

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", int)
Rank = NewType("Rank", int)
Generation = NewType("Generation", int)
Step = NewType("Step", int)

NO_GENERATION = Generation(0)
NOTHING_HELD = Step(-1)  # a generation that begins anew goes on from no step: older states are void


class SnapshotId(msgspec.Struct, frozen=True, order=True):
    """Which state a sealed slot holds: `step` of the lineage that `generation` continued."""

    generation: Generation
    step: Step
