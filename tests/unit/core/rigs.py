"""The machines on a bench: a state, a clock that is set by hand, and the outputs of each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from stepfast.core import job, node, rank
from stepfast.core.faults import (
    ErrorClass,
    Evidence,
    ExceptionReport,
    Fault,
    FaultKind,
    Whereabouts,
)
from stepfast.core.job_state import FromNode, JobState, NodeConnectionLost, Phase, Tick
from stepfast.core.messages import (
    EvidenceGiven,
    FaultReported,
    FirstStepDone,
    HangSuspected,
    Heartbeat,
    Hello,
    Interrupt,
    JobSettings,
    NodeReport,
    RankReport,
    RankResumed,
    RankReturned,
    RankState,
    TensorDigest,
    Welcome,
)
from stepfast.core.node_state import (
    CheckpointsListed,
    CoordinatorConnected,
    FromJob,
    FromLocalRank,
    NodeState,
    NodeTick,
    RankForked,
    StoreReady,
)
from stepfast.core.outputs import (
    Output,
    Persist,
    Record,
    SendToAgent,
    SendToCoordinator,
    SendToNode,
    SendToRank,
)
from stepfast.core.policy import Budget
from stepfast.core.rank import ProcessState
from stepfast.core.terms import NO_GENERATION, Generation, NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import solve_timeouts
from stepfast.errors import EXIT_FINISHED
from stepfast.runtime.driver import in_order

USER_ERROR = ExceptionReport(
    type="ValueError",
    message="bad batch",
    traceback="Traceback ...",
    frame="train.py:7",
    error_class=ErrorClass.USER,
)


def error_of(error_class: ErrorClass, *, type: str = "Error", frame: str = "train.py:7") -> Any:
    """An exception of a class."""
    return msgspec.structs.replace(USER_ERROR, error_class=error_class, type=type, frame=frame)


def settings(*, nodes: int = 2, nproc: int = 2, **changes: Any) -> JobSettings:
    """A job on the CPU."""
    plain = JobSettings(
        job_id="job",
        world_size=nodes * nproc,
        nproc_per_node=nproc,
        job_dir="job",
        device="cpu",
        recovery="on",
        hang="recover",
        hang_floor_s=2.0,
        hang_ceiling_s=60.0,
        heartbeat_interval_s=0.5,
        snapshot_interval_steps=1,
        memory_dir="memory",
        preload=(),
        faults=(),
    )
    return msgspec.structs.replace(plain, **changes)


def fault(kind: FaultKind, rank_number: int | None = 0, **changes: Any) -> Fault:
    """A fault of generation 1 at step 5, of the first process."""
    plain = Fault(
        kind=kind,
        generation=Generation(1),
        rank=None if rank_number is None else Rank(rank_number),
        node=NodeId(0 if rank_number is None else rank_number // 2),
        step=Step(5),
        reason=f"{kind} of rank {rank_number}",
        incarnation=1,
    )
    return msgspec.structs.replace(plain, **changes)


def held(*pairs: tuple[int, int]) -> tuple[SnapshotId, ...]:
    """Snapshots by (generation, step)."""
    return tuple(SnapshotId(Generation(g), Step(s)) for g, s in pairs)


class Rig:
    """One machine, fed by hand."""

    def __init__(self, step: Any, state: Any) -> None:
        self._step = step
        self.state = state
        self.now = 100.0
        self.outputs: list[Output] = []
        self.log: list[tuple[float, Any, list[Output]]] = []

    def feed(self, given: Any) -> list[Output]:
        """One step; its outputs in the order in which the driver performs them."""
        self.state, outputs = self._step(self.state, given, self.now)
        self.outputs = in_order(outputs)
        self.log.append((self.now, given, self.outputs))
        return self.outputs

    def all_of(self, kind: Any) -> list[Any]:
        """Every output, message or event of this type since the beginning."""
        found = []
        for _, _, outputs in self.log:
            for output in outputs:
                inner = getattr(output, "event", None) or getattr(output, "message", None)
                found += [x for x in (output, inner) if isinstance(x, kind)]
        return found

    def now_of(self, kind: Any) -> list[Any]:
        """The same of the last step alone."""
        whole, self.log = self.log, self.log[-1:]
        found = self.all_of(kind)
        self.log = whole
        return found


class JobRig(Rig):
    """The job's machine with nodes that do what they are told."""

    def __init__(self, *, nodes: int = 2, nproc: int = 2, per_hour: int = 30, **changes: Any):
        told = settings(nodes=nodes, nproc=nproc, **changes)
        state = JobState(
            settings=told,
            timeouts=solve_timeouts(device="cpu", hang_ceiling_s=60.0),
            budget=Budget.full(per_hour, 100.0),
            opened_at=100.0,
            join_limit_s=600.0,
        )
        super().__init__(job.step, state)
        self.nproc = nproc
        self.stores = 7000
        self.reports: dict[Rank, RankReport] = {
            Rank(r): self._first_report(r) for r in range(nodes * nproc)
        }

    @staticmethod
    def _first_report(number: int) -> RankReport:
        return RankReport(
            rank=Rank(number),
            state=RankState.READY,
            pid=1000 + number,
            incarnation=1,
            generation=NO_GENERATION,
        )

    def ranks_of(self, node_number: int) -> list[Rank]:
        return [r for r in self.reports if r // self.nproc == node_number]

    def from_node(self, node_number: int, message: Any) -> list[Output]:
        return self.feed(FromNode(NodeId(node_number), message))

    def hello(self, node_number: int, *, pid: int | None = None) -> list[Output]:
        host = f"host-{node_number}"
        pid = pid if pid is not None else 10 + node_number
        return self.from_node(
            node_number, Hello(protocol=1, node=NodeId(node_number), host=host, pid=pid)
        )

    def set_rank(self, number: int, **changes: Any) -> None:
        self.reports[Rank(number)] = msgspec.structs.replace(self.reports[Rank(number)], **changes)

    def report(self, node_number: int, *, heard: int | None = None, store: bool = True) -> Any:
        """The node says how its ranks stand."""
        self.stores += 1
        report = NodeReport(
            node=NodeId(node_number),
            ranks=tuple(self.reports[r] for r in self.ranks_of(node_number)),
            heard=Generation(self.state.generation if heard is None else heard),
            store_port=self.stores if store else None,
        )
        return self.from_node(node_number, report)

    def all_report(self) -> list[Output]:
        for n in range(self.state.nodes):
            self.report(n)
        return self.outputs

    def start(self, *, steps: tuple[int, int] = (4, 5)) -> JobRig:
        """Up to RUNNING in generation 1, at step 5, with two snapshots in each rank's slots."""
        for n in range(self.state.nodes):
            self.hello(n)
        self.all_report()
        self.enter()
        for r in self.reports:
            self.set_rank(r, snapshots=held(*((1, s) for s in steps)))
        return self

    def enter(self) -> None:
        """Every rank joins the open generation, resumes and completes a step."""
        generation = self.state.generation
        step = self.state.start.step or Step(0)
        for r in self.reports:
            self.set_rank(r, state=RankState.ACTIVE, generation=generation, step=step)
        self.all_report()
        for r in self.reports:
            self.resumed(r)
        for r in self.reports:
            self.stepped(r)

    def resumed(self, number: int, *, generation: int | None = None) -> list[Output]:
        message = RankResumed(
            generation=Generation(self.state.generation if generation is None else generation),
            rank=Rank(number),
            step=self.state.start.step or Step(0),
            rendezvous_s=0.1,
            build_s=0.2,
            restore_s=0.3,
            kept=False,
        )
        return self.from_node(number // self.nproc, message)

    def stepped(self, number: int) -> list[Output]:
        message = FirstStepDone(
            generation=self.state.generation,
            rank=Rank(number),
            step=Step((self.state.start.step or 0) + 1),
            seconds=0.4,
        )
        return self.from_node(number // self.nproc, message)

    def returned(self, number: int, *, step: int = 9) -> list[Output]:
        message = RankReturned(
            generation=self.state.generation,
            rank=Rank(number),
            step=Step(step),
            digests=(TensorDigest("weight", (number,), f"digest-{number}"),),
        )
        return self.from_node(number // self.nproc, message)

    def fault(self, kind: FaultKind, number: int = 0, **changes: Any) -> list[Output]:
        plain = {
            "generation": self.state.generation,
            "incarnation": self.reports[Rank(number)].incarnation,
            "node": NodeId(number // self.nproc),
        }
        told = fault(kind, number, **{**plain, **changes})
        return self.from_node(number // self.nproc, FaultReported(fault=told))

    def beat(self, node_number: int, step: int) -> list[Output]:
        steps = {r: Step(step) for r in self.ranks_of(node_number)}
        return self.from_node(node_number, Heartbeat(node=NodeId(node_number), steps=steps))

    def leave(self, *numbers: int, step: int = 5) -> None:
        """These ranks are quiet."""
        for number in numbers:
            generation = self.state.generation
            self.set_rank(number, state=RankState.QUIET, generation=generation, step=Step(step))
            if self.state.phase is Phase.RECOVERING:
                self.report(number // self.nproc)

    def replace(self, *numbers: int) -> None:
        """Fresh processes stand for these ranks."""
        for number in numbers:
            before = self.reports[Rank(number)]
            self.set_rank(
                number,
                state=RankState.READY,
                pid=before.pid + 100,
                incarnation=before.incarnation + 1,
                generation=NO_GENERATION,
                step=Step(0),
            )
            self.report(number // self.nproc)

    def suspect(self, number: int) -> list[Output]:
        message = HangSuspected(
            generation=self.state.generation,
            rank=Rank(number),
            step=Step(5),
            since_progress_s=1.9,
            limit_s=2.0,
        )
        return self.from_node(number // self.nproc, message)

    def answer(self, node_number: int, **where: Whereabouts) -> list[Output]:
        """`rank_0=...`: the answers of this node's ranks; the others wait in a collective."""
        assert self.state.probe is not None, "asked"
        told = tuple(
            evidence(r, where.get(f"rank_{r}", Whereabouts.COLLECTIVE))
            for r in self.ranks_of(node_number)
        )
        return self.from_node(
            node_number, EvidenceGiven(probe=self.state.probe.number, evidence=told)
        )

    def tick(self, after_s: float = 0.0) -> list[Output]:
        """Time goes by; nodes that are connected beat, so that none is silent."""
        self.now += after_s
        nodes = {
            n: replace(v, seen_at=self.now) if v.connected else v
            for n, v in self.state.membership.nodes.items()
        }
        membership = replace(self.state.membership, nodes=nodes)
        self.state = replace(self.state, membership=membership)
        return self.feed(Tick())

    def tick_raw(self) -> list[Output]:
        """Time goes by, and who has not spoken is silent."""
        return self.feed(Tick())

    def state_orders(self, node_number: int) -> Any:
        """Whom the node was last told to replace."""
        told = [
            o.message
            for o in self.outputs
            if isinstance(o, SendToNode)
            and o.node == node_number
            and isinstance(o.message, Interrupt)
        ]
        return told[-1].replace

    def lose(self, node_number: int) -> list[Output]:
        return self.feed(NodeConnectionLost(NodeId(node_number), "the connection ended"))


def evidence(number: int, where: Whereabouts, **changes: Any) -> Evidence:
    """A rank that is beyond its limit."""
    plain = Evidence(
        rank=Rank(number),
        node=NodeId(number // 2),
        whereabouts=where,
        step=Step(5),
        since_progress_s=2.0,
        limit_s=2.0,
        collectives=10,
    )
    return msgspec.structs.replace(plain, **changes)


class NodeRig(Rig):
    """The machine of node 0 with two ranks."""

    def __init__(self, **changes: Any) -> None:
        state = NodeState(node=NodeId(0), host="host-0", pid=10, slot_root="slots", log_root="logs")
        super().__init__(node.step, state)
        self.settings = settings(**changes)

    def welcome(self, incarnation: int = 0) -> list[Output]:
        ranks = {Rank(0): incarnation, Rank(1): incarnation}
        return self.feed(FromJob(Welcome(settings=self.settings, ranks=ranks)))

    def connect(self) -> NodeRig:
        self.feed(CoordinatorConnected())
        self.welcome()
        return self

    def ready(self) -> NodeRig:
        """Both ranks wait for a generation, and a store listens; no checkpoint is there."""
        self.connect()
        if self.settings.checkpoints.url:
            self.feed(CheckpointsListed(()))
        self.feed(StoreReady(7000))
        for number in (0, 1):
            self.feed(RankForked(Rank(number), 1, 1000 + number))
            self.say(number, node_message("entered", pid=1000 + number))
        return self

    def say(self, number: int, message: Any, *, incarnation: int | None = None, snapshots=None):
        known = self.state.ranks[Rank(number)].incarnation
        incarnation = known if incarnation is None else incarnation
        return self.feed(FromLocalRank(Rank(number), incarnation, message, snapshots))

    def active(self, generation: int = 1, step: int = 5) -> NodeRig:
        """Both ranks are in a generation, in their first turn."""
        self.feed(FromJob(start_of(generation, step, self.state)))
        return self

    def tick(self, after_s: float, *, stopped: Iterable[int] = ()) -> list[Output]:
        self.now += after_s
        return self.feed(NodeTick(frozenset(map(Rank, stopped))))

    def rank(self, number: int) -> Any:
        return self.state.ranks[Rank(number)]


def start_of(generation: int, step: int | None, state: NodeState, **changes: Any) -> Any:
    """The order to start, for the processes that the node has."""
    message = node_message(
        "start",
        generation=Generation(generation),
        step=None if step is None else Step(step),
        sources={},
        store_host="host-1",
        store_port=7001,
        incarnations={r: local.incarnation for r, local in state.ranks.items()},
        keep=True,
        limit_step=None,
        limit_factor=1.0,
    )
    return msgspec.structs.replace(message, **changes)


def node_message(name: str, **fields: Any) -> Any:
    """A message by a short name."""
    from stepfast.core import messages

    names = {"entered": "RankEntered", "start": "StartGeneration"}
    return getattr(messages, names.get(name, name))(**fields)


class RankRig(Rig):
    """The machine of one process."""

    def __init__(self) -> None:
        super().__init__(rank.step, ProcessState(pid=1000, interrupt_grace_s=0.03))


# --- as text -------------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """A value as one stable line: type and the fields that are not at their defaults."""
    if isinstance(value, Persist | Record):
        return f"{type(value).__name__.lower()} {as_text(value.event)}"
    if isinstance(value, SendToNode):
        return f"send to node {value.node} {as_text(value.message)}"
    if isinstance(value, SendToCoordinator | SendToAgent):
        return f"send up {as_text(value.message)}"
    if isinstance(value, SendToRank):
        return f"send to rank {value.rank} {as_text(value.message)}"
    if isinstance(value, JobSettings):
        return "settings"
    if isinstance(value, SnapshotId):
        return f"{value.generation}:{value.step}"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        inner = ", ".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, tuple | list | frozenset | set):
        items = sorted(value) if isinstance(value, frozenset | set) else value
        return "[" + ", ".join(as_text(item) for item in items) + "]"
    return _struct_as_text(value)


def _struct_as_text(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        named = {f.name: f.default for f in msgspec.structs.fields(type(value))}
    elif hasattr(value, "__dataclass_fields__"):
        named = {name: f.default for name, f in value.__dataclass_fields__.items()}
    else:
        return str(value)
    said = [
        f"{name}={as_text(getattr(value, name))}"
        for name, default in named.items()
        if getattr(value, name) != default
    ]
    return f"{type(value).__name__}({', '.join(said)})"


__all__ = [
    "EXIT_FINISHED",
    "USER_ERROR",
    "JobRig",
    "NodeRig",
    "RankRig",
    "as_text",
    "error_of",
    "evidence",
    "fault",
    "held",
    "settings",
    "start_of",
]
