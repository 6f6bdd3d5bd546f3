"""A small world in memory: the real machines through the real driver, in virtual time, by a seed.

Owns: the clock, connections (in order, delayed, lost), shells without decisions, the accidents.
Does not own: what a rank's main thread does (`property.process`) or what must hold
(`property.watcher`). One seed is one run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from property.durable import WorldStore
from property.process import Process
from property.watcher import Watcher
from stepfast.core import job, node
from stepfast.core.durable import CheckpointSettings
from stepfast.core.job_state import FromNode, JobState, NodeConnectionLost, Phase, Tick
from stepfast.core.messages import (
    Hello,
    JobSettings,
    ProbeRanks,
    RankEntered,
    RankQuiet,
    RankReturned,
    RankStart,
)
from stepfast.core.node_state import (
    CoordinatorConnected,
    CoordinatorLost,
    ForkFailed,
    FromJob,
    FromLocalRank,
    NodeState,
    NodeStopRequested,
    NodeTick,
    RankEnded,
    RankForked,
    StoreLost,
    StoreReady,
)
from stepfast.core.outputs import (
    CancelWrite,
    CommitShards,
    EndProcess,
    ForkRank,
    KillRank,
    ListCheckpoints,
    OpenStore,
    Output,
    Persist,
    Record,
    SendToCoordinator,
    SendToNode,
    SendToRank,
    WriteSlot,
)
from stepfast.core.placement import ranks_of
from stepfast.core.policy import Budget
from stepfast.core.terms import NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import solve_timeouts
from stepfast.runtime.driver import Driver

TICK_S = 0.05
IDLE_TICK_S = 0.5  # where nothing but ticks happens, time goes by in larger pieces
HANG_FLOOR_S = 0.5
HANG_CEILING_S = 30.0
MESSAGES_MAX = 200_000  # a run that needs more goes round in circles
SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The job to be run."""

    nodes: int = 2
    nproc_per_node: int = 2
    steps: int = 10
    checkpoint_every: int | None = None  # None: no store; 0: by time
    void_share: float = 0.0  # of the snapshots of each rank; above 0 they are taken with overlap
    write_s: tuple[float, ...] = ()  # what each rank's writes take; empty: different each time


def settings_of(shape: Shape) -> JobSettings:
    """A job on the CPU with short limits."""
    return JobSettings(
        job_id="world",
        world_size=shape.nodes * shape.nproc_per_node,
        nproc_per_node=shape.nproc_per_node,
        job_dir="job",
        device="cpu",
        recovery="on",
        hang="recover",
        hang_floor_s=HANG_FLOOR_S,
        hang_ceiling_s=HANG_CEILING_S,
        heartbeat_interval_s=0.5,
        snapshot_interval_steps=1,
        memory_dir="memory",
        preload=(),
        faults=(),
        checkpoints=_checkpoints_of(shape),
    )


def _checkpoints_of(shape: Shape) -> CheckpointSettings:
    if shape.checkpoint_every is None:
        return CheckpointSettings()
    interval_s = 0.0 if shape.checkpoint_every else 0.3
    return CheckpointSettings(
        url="store", interval_steps=shape.checkpoint_every, interval_s=interval_s
    )


@dataclass(slots=True)
class Connection:
    """One WebSocket: in order both ways; what is under way when it closes is lost."""

    agent: Agent
    is_open: bool = True
    last_at: dict[str, float] = field(default_factory=dict)


class Agent:
    """The shell of one node machine, its processes and stores."""

    def __init__(self, world: World, node_id: NodeId) -> None:
        self.world = world
        self.node_id = node_id
        self.is_alive = True
        self.connection: Connection | None = None
        self.processes: dict[Rank, Process] = {}
        self.forks_to_fail = 0
        self.is_frozen = False
        self.backlog: list[Any] = []
        state = NodeState(
            node=node_id,
            host=f"host-{node_id}",
            pid=world.next_pid(),
            slot_root=f"slots-{node_id}",
            log_root="logs",
        )
        self.driver: Driver[NodeState, Any] = Driver(node.step, state, self, world)
        world.at(world.delay(0.001, 0.2), self.connect)
        self._tick()

    def feed(self, given: Any) -> None:
        if self.is_frozen:
            self.backlog.append(given)
        elif self.is_alive:
            self.driver.feed(given)

    def freeze(self, seconds: float) -> None:
        """The agent's process gets no time; its connections stand."""
        self.is_frozen = True
        self.world.at(seconds, self._thaw)

    def _thaw(self) -> None:
        self.is_frozen = False
        backlog, self.backlog = self.backlog, []
        for given in backlog:
            self.feed(given)

    def stopped(self) -> frozenset[Rank]:
        """Whose process the kernel shows as stopped."""
        return frozenset(rank for rank, p in self.processes.items() if p.is_stopped)

    def _tick(self) -> None:
        if self.is_alive:
            if not self.is_frozen:
                self.feed(NodeTick(self.stopped(), self.world.store.signs(self)))
            self.world.tick_later(self._tick)

    # --- the connection ------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.is_alive or self.connection is not None:
            return
        world = self.world
        if self.node_id in world.peers or world.is_coordinator_over or world.is_coordinator_away:
            self.world.at(self.world.delay(0.02, 0.1), self.connect)
            return
        self.connection = Connection(self)
        self.feed(CoordinatorConnected())

    def cut(self, away_s: float) -> None:
        """The connection breaks; the agent is back after `away_s`."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.is_open = False
        self.world.at(self.world.delay(0.0, 0.02), lambda: self.world.peer_lost(connection))
        self.feed(CoordinatorLost())
        self.world.at(max(away_s, 0.03), self.connect)

    def die(self) -> None:
        """SIGKILL of the agent: its ranks and stores go with it, slots stay."""
        self.cut(away_s=1e9)
        self.is_alive = False
        for process in list(self.processes.values()):
            process.end(exit_code=1, signal=None, is_told=False)

    # --- the machine's hands --------------------------------------------------------------------

    def perform(self, output: Output) -> None:
        world = self.world
        match output:
            case SendToCoordinator(message):
                if self.connection is not None:
                    world.send(self.connection, "up", message)
            case SendToRank(rank, message):
                process = self.processes.get(rank)
                if process is not None:
                    process.link_down(message)
            case ForkRank(rank, incarnation):
                world.at(world.delay(0.005, 0.05), lambda: self._fork(rank, incarnation))
            case KillRank(rank, incarnation):
                world.watcher.kill_ordered(self.driver.state, rank, incarnation)
                process = self.processes.get(rank)
                if process is not None:
                    world.at(
                        world.delay(0.0, 0.002),
                        lambda: process.end(exit_code=None, signal=SIGKILL),
                    )
            case OpenStore():
                world.at(world.delay(0.001, 0.05), self._open_store)
            case ListCheckpoints() | WriteSlot() | CancelWrite() | CommitShards():
                world.store.perform(self, output)
            case EndProcess():
                self.cut_for_good()
            case _:
                raise AssertionError(f"not a node's output: {output}")

    def cut_for_good(self) -> None:
        """An orderly end: what was said is delivered first."""
        living = [p for p in self.processes.values() if p.is_alive]
        assert not living, f"node {self.node_id} ended before ranks {[p.rank for p in living]}"
        self.is_alive = False
        connection = self.connection
        if connection is not None:
            self.world.at(0.2, lambda: self.world.peer_lost(connection))

    def _fork(self, rank: Rank, incarnation: int) -> None:
        if not self.is_alive:
            return
        if self.forks_to_fail > 0:
            self.forks_to_fail -= 1
            self.feed(ForkFailed(rank, incarnation, "no more processes"))
            return
        process = Process(self.world, self, rank, incarnation)
        self.processes[rank] = process
        self.feed(RankForked(rank, incarnation, process.pid))

    def _open_store(self) -> None:
        if self.is_alive:
            self.feed(StoreReady(self.world.next_pid()))

    def lose_store(self) -> None:
        """The store's process ends; a generation that has met there does not notice."""
        self.feed(StoreLost("killed"))

    # --- from the ranks --------------------------------------------------------------------------

    def from_rank(self, process: Process, message: Any) -> None:
        looks = isinstance(message, RankEntered | RankQuiet | RankReturned)
        held = self.held_by(process.rank) if looks else None
        self.feed(FromLocalRank(process.rank, process.incarnation, message, held))

    def held_by(self, rank: Rank) -> tuple[SnapshotId, ...]:
        return tuple(sorted(self.world.slots[rank]))

    def rank_ended(self, process: Process, exit_code: int | None, signal: int | None) -> None:
        if self.processes.get(process.rank) is process:
            del self.processes[process.rank]
        self.feed(
            RankEnded(
                rank=process.rank,
                incarnation=process.incarnation,
                exit_code=exit_code,
                signal=signal,
                log_tail="",
                snapshots=self.held_by(process.rank),
            )
        )


class World:
    """Everything; also the clock and the coordinator's shell."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.random = random.Random(seed)
        self.slow_share = self.random.choice((0.0, 0.03, 0.2))
        self.now = 0.0
        self.busy_at = 0.0
        self.sequence = 0
        self.queue: list[tuple[float, int, Callable[[], None], bool]] = []
        self.pids = 100
        self.peers: dict[NodeId, Connection] = {}
        self.is_coordinator_over = False
        self.settings = settings_of(self.shape)
        self.slots: dict[Rank, dict[SnapshotId, tuple[int, ...]]] = {
            Rank(r): {} for r in range(self.settings.world_size)
        }
        self.groups: dict[int, Any] = {}
        timeouts = solve_timeouts(
            device="cpu", hang_floor_s=HANG_FLOOR_S, hang_ceiling_s=HANG_CEILING_S
        )
        self.timeouts = timeouts
        self.is_coordinator_away = False
        self.watcher = Watcher(self)
        self.store = WorldStore(self)
        self.driver: Driver[JobState, Any] = Driver(job.step, self._first_state(), self, self)
        self.agents: dict[NodeId, Agent] = {}
        for n in range(self.shape.nodes):
            self.agents[NodeId(n)] = Agent(self, NodeId(n))
        self._tick()

    def _first_state(self) -> JobState:
        """As the coordinator begins: with what its journal says."""
        history = self.watcher
        return JobState(
            settings=self.settings,
            timeouts=self.timeouts,
            budget=Budget.full(30, self.now),
            opened_at=self.now,
            join_limit_s=60.0,
            generation=history.generation,
            lineage=history.lineage,
            steps_max=Step(max(history.logged, default=0)),
            logged_max=Step(max(history.logged, default=-1)),
        )

    # --- time -----------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def at(self, after_s: float, do: Callable[[], None]) -> None:
        self._push(self.now + after_s, do, is_tick=False)

    def at_time(self, at_s: float, do: Callable[[], None]) -> None:
        """At one moment things happen in the order in which they were planned."""
        self._push(at_s, do, is_tick=False)

    def tick_later(self, do: Callable[[], None]) -> None:
        is_idle = self.now - self.busy_at > 1.0
        self._push(self.now + (IDLE_TICK_S if is_idle else TICK_S), do, is_tick=True)

    def _push(self, at_s: float, do: Callable[[], None], *, is_tick: bool) -> None:
        self.sequence += 1
        heapq.heappush(self.queue, (at_s, self.sequence, do, is_tick))

    def delay(self, low_s: float, high_s: float) -> float:
        return self.random.uniform(low_s, high_s)

    def next_pid(self) -> int:
        self.pids += 1
        return self.pids

    def _tick(self) -> None:
        if not self.is_coordinator_over:
            if not self.is_coordinator_away:
                self.driver.feed(Tick())
            self.tick_later(self._tick)

    def run(self, until_s: float) -> None:
        """Let time go by until `until_s` or until nothing is left to do."""
        for _ in range(MESSAGES_MAX):
            if not self.queue or self.queue[0][0] > until_s or self.is_over:
                return
            self.now, _, do, is_tick = heapq.heappop(self.queue)
            if not is_tick and self.now < 1e6:
                self.busy_at = self.now
            do()
            self.watcher.look()
        raise AssertionError("too many events: the world goes round in circles")

    @property
    def is_over(self) -> bool:
        ended = all(not agent.is_alive for agent in self.agents.values())
        return self.is_coordinator_over and ended

    # --- the coordinator's shell -----------------------------------------------------------------

    def send(self, connection: Connection, direction: str, message: Any) -> None:
        """In order; mostly fast, now and then slow."""
        wait_s = self.delay(0.0001, 0.003)
        if self.random.random() < self.slow_share:
            wait_s += self.delay(0.01, 0.3)
        at = max(self.now + wait_s, connection.last_at.get(direction, 0.0))
        connection.last_at[direction] = at
        arrive = self._arrive_up if direction == "up" else self._arrive_down
        self.at_time(at, lambda: arrive(connection, message))

    def _arrive_up(self, connection: Connection, message: Any) -> None:
        if not connection.is_open or self.is_coordinator_over or self.is_coordinator_away:
            return
        node_id = connection.agent.node_id
        if isinstance(message, Hello):
            self.peers[node_id] = connection
        self.watcher.heard(message)
        self.driver.feed(FromNode(node_id, message))

    def _arrive_down(self, connection: Connection, message: Any) -> None:
        agent = connection.agent
        if not connection.is_open or not agent.is_alive:
            return
        stopped: frozenset[Rank] = frozenset()
        if isinstance(message, ProbeRanks):
            stopped = agent.stopped()
        agent.feed(FromJob(message, stopped))

    def peer_lost(self, connection: Connection) -> None:
        connection.is_open = False
        node_id = connection.agent.node_id
        if self.peers.get(node_id) is connection and not self.is_coordinator_away:
            del self.peers[node_id]
            self.driver.feed(NodeConnectionLost(node_id, "the connection ended"))

    def perform(self, output: Output) -> None:
        match output:
            case Persist(event) | Record(event):
                self.watcher.event(event)
            case SendToNode(node_id, message):
                connection = self.peers.get(node_id)
                self.watcher.told(node_id, message)
                if connection is not None:
                    self.send(connection, "down", message)
            case EndProcess():
                self.is_coordinator_over = True
                for connection in list(self.peers.values()):
                    connection.agent.cut(away_s=1e9)
            case _:
                raise AssertionError(f"not a job's output: {output}")

    # --- accidents -------------------------------------------------------------------------------

    def living(self) -> list[Process]:
        """All rank processes, by rank."""
        found = [p for a in self.agents.values() if a.is_alive for p in a.processes.values()]
        return sorted((p for p in found if p.is_alive), key=lambda p: p.rank)

    def replace_agent(self, node_id: NodeId, after_s: float, *, in_order: bool) -> None:
        """An agent is killed, or stopped in order, and a fresh one comes in its place."""
        agent = self.agents[node_id]

        def come() -> None:
            if self.agents[node_id] is agent:
                agent.die()
                self.agents[node_id] = Agent(self, node_id)

        if not agent.is_alive or agent.is_frozen:
            return
        if in_order:
            agent.feed(NodeStopRequested("SIGTERM"))
        else:
            agent.die()
        self.at(after_s, come)

    def lose_memory(self, node_id: NodeId, after_s: float) -> None:
        """The machine is replaced: a fresh agent, empty slots."""
        if not self.agents[node_id].is_alive or self.agents[node_id].is_frozen:
            return
        self.watcher.memory_is_lost = True
        self.replace_agent(node_id, after_s, in_order=False)
        for rank in self.ranks_of(node_id):
            self.slots[rank].clear()

    def restart_coordinator(self, after_s: float) -> None:
        """The coordinator is killed; the next one has its journal, and what agents report."""
        if self.is_coordinator_away or self.watcher.ends:
            return
        self.is_coordinator_away = True
        self.peers.clear()
        for agent in self.agents.values():
            agent.cut(away_s=after_s)

        def come() -> None:
            self.is_coordinator_away = False
            self.watcher.forget_incident()
            self.driver = Driver(job.step, self._first_state(), self, self)

        self.at(after_s, come)

    def phase(self) -> Phase:
        return self.driver.state.phase

    def ranks_of(self, node_id: NodeId) -> tuple[Rank, ...]:
        return ranks_of(node_id, self.shape.nproc_per_node)


__all__ = ["Agent", "Connection", "RankStart", "Shape", "World"]
