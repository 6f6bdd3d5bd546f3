"""What a node finds in the checkpoint store before the first step, and whether a job may begin so.

Owns: the judgement, for an agent and for `stepfast run --check` alike. Does not own: the looking
(`checkpoint.catalog`, `agent.memory`), which step is gone on from (`core.durable`).
Invariant: nothing begins anew beside state that cannot be read.
"""

from __future__ import annotations

from stepfast.agent.memory import HINT, Memory
from stepfast.checkpoint.catalog import Finding, Survey
from stepfast.checkpoint.manifest import checkpoint_name, parse_checkpoint_name
from stepfast.core.durable import CheckpointSettings
from stepfast.core.node_state import CheckpointsListed, StoreUnusable
from stepfast.core.quantities import counted
from stepfast.core.terms import NO_GENERATION, Generation, SnapshotId


def refuse_without_store(memory: Memory, settings: CheckpointSettings) -> StoreUnusable | None:
    """Memory of another layout is of use only where a store has what can be resharded."""
    if memory.problem is None or settings.url:
        return None
    return StoreUnusable(f"{memory.problem}; {HINT}")


def judge(
    url: str,
    seen: Survey,
    memory: Memory,
    *,
    is_strict: bool,
    below: Generation = NO_GENERATION,
) -> CheckpointsListed | StoreUnusable:
    """What the job is told of a store; `below`: the newest generation that may be another job's."""
    committed = tuple(sorted(manifest.snapshot for manifest in seen.manifests))
    if not committed and memory.other is not None:
        return StoreUnusable(
            "memory holds steps of another layout, and the store has no checkpoint to reshard"
            f" from; {HINT}"
        )
    if not committed and seen.damaged and not memory.is_held:
        first = _words(url, seen.damaged[0])
        return StoreUnusable(
            f"of {counted(len(seen.damaged), 'checkpoint')} none can be read ({first}); choose"
            " another place for --checkpoints to begin anew"
        )
    # Older ones are no candidates: whatever they lack, a newer one is whole.
    newer = [f for f in seen.damaged if not committed or _snapshot_of(f) > committed[-1]]
    if is_strict and newer and not memory.is_held:
        return StoreUnusable(f"{_words(url, newer[-1])} (without --strict an older one is used)")
    problems = [finding.text for finding in seen.damaged]
    begun = [s for s in seen.unfinished if not committed or s > committed[-1]]
    for snapshot in begun:
        where = checkpoint_name(snapshot.step, snapshot.generation)
        problems.append(f"{url}/{where}: it has no manifest: it was never committed")
    return CheckpointsListed(committed, tuple(problems), below)


def _snapshot_of(finding: Finding) -> SnapshotId:
    snapshot = parse_checkpoint_name(finding.name.partition("/")[0])
    assert snapshot is not None, f"{finding.name} is in no checkpoint's directory"
    return snapshot


def _words(url: str, finding: Finding) -> str:
    place = f"{url}/{finding.name}"
    return f"{place}: {finding.text.removeprefix(f'{place}: ')}"
