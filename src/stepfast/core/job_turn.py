"""One step of the job in the making: the state so far and the outputs so far.

It lives for one call of `job.step`; nothing outside ever sees it, so the machine stays pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from stepfast.core.durable import DRAIN_LIMIT_S
from stepfast.core.faults import Fault
from stepfast.core.job_state import Drain, JobEnd, JobState, Phase
from stepfast.core.messages import AFTER_FINISH_LIMIT_S, FinishJob, FromCoordinator, RankReturned
from stepfast.core.outputs import Output, Persist, Record, SendToNode
from stepfast.core.quantities import numbered
from stepfast.core.terms import NO_GENERATION, NodeId, Rank, Step
from stepfast.errors import EXIT_FINISHED, EXIT_TRY_AGAIN
from stepfast.events import Event, JobEnded, Note


class Turn:
    """State and outputs of one step; the handlers change it in order."""

    def __init__(self, state: JobState, now: float) -> None:
        """Begin from `state` at `now`."""
        self.state = state
        self.now = now
        self.outputs: list[Output] = []

    def update(self, **changes: object) -> None:
        """Replace fields of the state."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # replace checks

    def emit(self, output: Output) -> None:
        """Add an output."""
        self.outputs.append(output)

    def send(self, node: NodeId, message: FromCoordinator) -> None:
        """Add a message to a node."""
        self.emit(SendToNode(node, message))

    def record(self, event: Event) -> None:
        """Add an event."""
        self.emit(Record(event))

    def persist(self, event: Event) -> None:
        """Add an event that must be durable before this step's messages leave."""
        self.emit(Persist(event))

    def completed(self, reached: Step) -> None:
        """Every rank has completed `reached`: progress, if the job never had before."""
        new_steps = reached - self.state.steps_max
        if new_steps > 0:
            budget = self.state.budget.refilled(self.now, new_steps=new_steps)
            repeat = self.state.repeat.passed(reached)
            self.update(steps_max=reached, budget=budget, repeat=repeat, has_progressed=True)

    def finish_message(self) -> FinishJob:
        """What nodes are told of the end."""
        end = self.state.end
        assert end is not None, "no end decided"
        return FinishJob(
            finished=end.status == "finished",
            exit_code=end.exit_code,
            reason=end.reason,
            drain=end.drain is not Drain.NONE,
            keep_memory=end.keep_memory,
        )

    def end(self, status: str, exit_code: int, reason: str, fault: Fault | None = None) -> None:
        """Decide the job's end, once; later reasons change nothing but how long is waited."""
        limits = self.state.timeouts
        deadline = self.now + limits.stop_grace_s * 2
        if self.state.end is not None:
            if status == "stopped" and self.state.end.drain is not Drain.NONE:
                text = "not made durable, in a hurry; the newest state is kept in memory"
                self.record(Note(topic="checkpoint", text=text))
                self.end_drain(keep_memory=True)
            elif status == "stopped" and self.state.end.deadline > deadline:
                self._stop_waiting(deadline)
            return
        digest = final_digest(self.state.returned.values()) if status == "finished" else None
        steps = max((r.step for r in self.state.returned.values()), default=self.state.steps_max)
        drain = Drain.NONE
        if status == "finished":
            deadline = self.now + AFTER_FINISH_LIMIT_S
        elif self.state.settings.checkpoints.url and self.state.generation != NO_GENERATION:
            drain = Drain.RANKS
            deadline = self.now + DRAIN_LIMIT_S
        end = JobEnd(
            status=status,
            exit_code=exit_code,
            reason=reason,
            deadline=deadline,
            fault=fault,
            drain=drain,
            keep_memory=status == "failed" and _holds_earlier_state(self.state),
        )
        self.update(end=end, phase=Phase.ENDING)
        self._persist_what_was_recorded()  # or it would stand behind the end in the journal
        self.persist(
            JobEnded(
                status=status, exit_code=exit_code, reason=reason, steps=steps, final_digest=digest
            )
        )
        for node in self.state.membership.connected_nodes:
            self.send(node, self.finish_message())

    def end_drain(self, *, keep_memory: bool) -> None:
        """The nodes may leave now."""
        assert self.state.end is not None, "only an ending job drains"
        deadline = self.now + self.state.timeouts.stop_grace_s * 2
        end = replace(self.state.end, drain=Drain.NONE, deadline=deadline, keep_memory=keep_memory)
        self.update(end=end)
        for node in self.state.membership.connected_nodes:
            self.send(node, self.finish_message())

    def _persist_what_was_recorded(self) -> None:
        self.outputs = [Persist(o.event) if isinstance(o, Record) else o for o in self.outputs]

    def failed_after_the_end(self, ranks: tuple[Rank, ...]) -> None:
        """The steps are done, but the script's own end is not: whoever waits has to hear of it."""
        end = self.state.end
        if end is not None and end.status == "finished":
            reason = (
                f"{end.reason}, but {numbered('rank', ranks)} failed behind the resilient function"
            )
            self.update(end=replace(end, exit_code=EXIT_TRY_AGAIN, reason=reason))

    def _stop_waiting(self, deadline: float) -> None:
        """The job has finished, but its user will not wait for code behind the resilient
        function.
        """
        assert self.state.end is not None, "only an ending job can be hurried"
        self.update(end=replace(self.state.end, deadline=deadline))
        for node in self.state.membership.connected_nodes:
            self.send(
                node,
                FinishJob(finished=False, exit_code=self.state.end.exit_code, reason="stopped"),
            )

    def end_finished(self) -> None:
        """Every rank returned."""
        steps = max((r.step for r in self.state.returned.values()), default=Step(0))
        self.end("finished", EXIT_FINISHED, f"finished at step {steps}")


def _holds_earlier_state(state: JobState) -> bool:
    """Whether slots alone hold what an earlier run left, and this one added nothing to it: a
    mistake in the script must not cost what it could not even read.
    """
    if state.settings.checkpoints.url or state.generation == NO_GENERATION or state.has_progressed:
        return False
    start = state.start
    return start is None or (start.checkpoint is None and (start.step or 0) > 0)


def final_digest(returned: Iterable[RankReturned]) -> str:
    """One hash over all tracked tensors in global order: by name, then offsets; replicas count
    once.
    """
    shards = sorted({d for r in returned for d in r.digests})
    total = hashlib.sha256()
    for shard in shards:
        total.update(
            f"{shard.name}\0{','.join(map(str, shard.offsets))}\0{shard.digest}\n".encode()
        )
    return total.hexdigest()
