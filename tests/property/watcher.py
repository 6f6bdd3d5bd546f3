"""What must hold in the world, judged after every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepfast.core.faults import FaultKind
from stepfast.core.messages import FaultReported, Interrupt, StartGeneration
from stepfast.core.node_state import NodeState
from stepfast.core.outputs import WriteSlot
from stepfast.core.rank import Place
from stepfast.core.recovery import Lineage
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.events import FaultSeen, GenerationOpened, JobEnded, Recovered, StepLogged

if TYPE_CHECKING:
    from property.process import Process
    from property.world import World

_ENDS = (FaultKind.KILL, FaultKind.EXIT)
_IN_A_GENERATION = (Place.ACTIVE, Place.LEAVING, Place.RETURNED)


class Watcher:
    """Sees everything, changes nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events: list[Any] = []
        self.strikes_after: list[tuple[type, float, Callable[[], None]]] = []
        self.ends: list[JobEnded] = []
        self.ended_at = 0.0
        self.recovered: list[Recovered] = []
        self.generation = Generation(0)
        self.told_generation = Generation(0)
        self.lineage = Lineage()
        self.reported_dead: set[tuple[Rank, int]] = set()
        self.open_incident = False
        self.reached: dict[Rank, Step] = {}
        self.ordered: dict[Rank, int] = {}
        self.logged: list[int] = []
        self.memory_is_lost = False  # of a whole machine, once
        self.may_lack_a_step = world.shape.void_share > 0  # memory need not hold a common one
        self.slots_taken = 0

    @property
    def is_excused(self) -> bool:
        """Whether more than a step may be lost."""
        return self.memory_is_lost or self.may_lack_a_step

    # --- events ----------------------------------------------------------------------------------

    def event(self, event: Any) -> None:
        self.events.append(event)
        self._strike_after(type(event))
        assert not self.ends or not isinstance(event, JobEnded), "the job ended twice"
        match event:
            case FaultSeen():
                self.open_incident = True
            case Recovered():
                assert self.open_incident, "recovered from nothing"
                self.open_incident = False
                self.recovered.append(event)
                assert event.steps_lost <= 1 or self.is_excused, event
                assert event.survivors_kept_pid, event
            case GenerationOpened():
                self._opened(event)
            case StepLogged(step=step):
                self.logged.append(step)
                assert self.logged.count(step) == 1, f"step {step} was delivered twice"
            case JobEnded():
                self.ends.append(event)
                self.ended_at = self.world.now

    def _strike_after(self, kind: type) -> None:
        """The first accident that waits for such an event comes soon after it."""
        for planned in self.strikes_after:
            if planned[0] is kind:
                self.strikes_after.remove(planned)
                self.world.at(planned[1], planned[2])
                return

    def forget_incident(self) -> None:
        """The coordinator that kept its account is no more."""
        self.open_incident = False
        self.reported_dead.clear()  # incarnations are counted anew

    def _opened(self, event: GenerationOpened) -> None:
        assert event.generation == self.generation + 1, "generations grow by one"
        if event.source == "checkpoint":
            assert self.is_excused, "memory was there, and storage was read"
        self.generation = Generation(event.generation)
        self.lineage = self.lineage.opened(self.generation, Step(event.step or 0))
        inside = [p.rank for p in self.world.living() if p.place in _IN_A_GENERATION]
        assert not inside, f"generation {event.generation} opens over ranks {inside}"
        dead = self.reported_dead & {(Rank(r), i) for r, i in event.incarnations.items()}
        assert not dead, f"generation {event.generation} opens with the dead {dead}"
        lost = min(self.reached.values(), default=Step(0)) - (event.step or 0)
        assert lost <= 1 or self.is_excused, (
            f"generation {event.generation} resumes {lost} steps back"
        )

    def heard(self, message: Any) -> None:
        """What the job is about to be told."""
        if isinstance(message, FaultReported) and message.fault.kind in _ENDS:
            fault = message.fault
            assert fault.rank is not None, "the end of a process"
            self.reported_dead.add((fault.rank, fault.incarnation))

    def told(self, node: NodeId, message: Any) -> None:
        match message:
            case StartGeneration(generation=generation, step=step, sources=sources):
                if message.checkpoint is not None:
                    assert message.checkpoint in self.world.store.committed
                    assert message.checkpoint.step == step
                elif generation != self.told_generation:  # later ones are the same order again
                    self.told_generation = generation
                    self._check_sources(step, sources)
            case Interrupt(replace=replacements):
                for order in replacements:
                    known = self.ordered.get(order.rank, 0)
                    self.ordered[order.rank] = max(known, order.incarnation)

    def _check_sources(self, step: Step | None, sources: dict[Rank, SnapshotId]) -> None:
        if step is None:
            return
        assert set(sources) == set(self.world.slots), "every rank has a source"
        states = set()
        for rank, source in sources.items():
            held = self.world.slots[rank]
            assert source.step == step, f"rank {rank} would resume from {source}, not {step}"
            assert source in held, f"rank {rank} does not hold {source}, only {sorted(held)}"
            states.add(held[source])
        assert len(states) == 1, f"ranks resume from different states: {states}"

    # --- processes -------------------------------------------------------------------------------

    def entered(self, process: Process, order: Any) -> None:
        assert order.generation <= self.generation, "a generation before it was opened"

    def restored(self, process: Process, source: SnapshotId) -> tuple[int, ...]:
        held = self.world.slots[process.rank]
        assert source in held, f"rank {process.rank} holds {sorted(held)}, not {source}"
        return held[source]

    def slot_taken(self, order: WriteSlot) -> None:
        """A slot that was being written is no more: its machine is gone, or its rank had returned
        and was made to go on.
        """
        self.slots_taken += 1

    def sealed(self, rank: Rank, step: Step) -> None:
        self.reached[rank] = max(step, self.reached.get(rank, Step(0)))

    def kill_ordered(self, state: NodeState, rank: Rank, incarnation: int) -> None:
        """A living process ends by order of the job alone, or because the job is over."""
        if state.finish is None:
            assert incarnation <= self.ordered.get(rank, 0), f"rank {rank} was killed unasked"

    def look(self) -> None:
        """After every event."""
        state = self.world.driver.state
        assert state.generation == self.generation, "a generation that was not persisted"
        for process in self.world.living():
            generation = process.driver.state.generation
            assert generation <= self.generation
