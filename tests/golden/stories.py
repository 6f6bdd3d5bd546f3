"""The stories that are recorded: start-up, exception, kill, hang, a fault in a recovery, end."""

from __future__ import annotations

from collections.abc import Callable

from stepfast.core.faults import ErrorClass, FaultKind, Whereabouts
from stepfast.core.job_state import StopRequested
from stepfast.core.messages import (
    Bye,
    FinishJob,
    FirstStepDone,
    Heartbeat,
    Interrupt,
    LoggedStep,
    PhaseBegan,
    ProbeAnswer,
    ProbeRanks,
    RankEntered,
    RankFinish,
    RankLeave,
    RankLogged,
    RankQuiet,
    RankRaised,
    RankResumed,
    RankReturned,
    RankStart,
    RankState,
    Replacement,
    TensorDigest,
)
from stepfast.core.node_state import FromJob, RankEnded, RankForked
from stepfast.core.rank import (
    MainEntered,
    MainInterrupted,
    MainQuiet,
    MainRaised,
    MainReturned,
    Ordered,
    RankTick,
)
from stepfast.core.terms import Generation, NodeId, Rank, SnapshotId, Step
from stepfast.core.timeouts import FIRST_TURN, TURN
from unit.core.rigs import (
    USER_ERROR,
    JobRig,
    NodeRig,
    RankRig,
    Rig,
    error_of,
    held,
    settings,
    start_of,
)

G1, G2 = Generation(1), Generation(2)
Stories = dict[str, Callable[[], Rig]]


# --- the job -------------------------------------------------------------------------------------


def job_stories() -> Stories:
    return {
        "start-up": job_start_up,
        "exception": job_exception,
        "kill": job_kill,
        "hang": job_hang,
        "fault-in-recovery": job_fault_in_recovery,
        "finish": job_finish,
        "stop": job_stop,
        "user-bug": job_user_bug,
    }


def small_job() -> JobRig:
    return JobRig(nodes=2, nproc=1)


def running_job() -> JobRig:
    """In generation 1; what led there is in the story of the start-up."""
    rig = small_job().start()
    rig.log.clear()
    return rig


def go_on(rig: JobRig) -> None:
    rig.now += 0.1
    rig.enter()


def job_start_up() -> Rig:
    rig = small_job()
    for n in (0, 1):
        rig.hello(n)
        rig.now += 0.5
        rig.set_rank(n, state=RankState.STARTING)
        rig.report(n)
    for n in (0, 1):
        rig.now += 0.5
        rig.set_rank(n, state=RankState.READY)
        rig.report(n)
    go_on(rig)
    logged = (LoggedStep(step=Step(1), values={"loss": 2.5}),)
    rig.from_node(0, Heartbeat(node=NodeId(0), steps={Rank(0): Step(1)}, logged=logged))
    rig.beat(1, 1)
    return rig


def job_exception() -> Rig:
    rig = running_job()
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    rig.now += 0.01
    rig.fault(FaultKind.COLLECTIVE, 0, error=error_of(ErrorClass.COLLECTIVE))
    rig.leave(0, 1)
    go_on(rig)
    return rig


def job_kill() -> Rig:
    rig = running_job()
    rig.fault(FaultKind.KILL, 0)
    rig.set_rank(0, state=RankState.ABSENT, pid=0)
    rig.report(0)
    rig.now += 0.01
    rig.leave(1)
    rig.set_rank(0, pid=1000)
    rig.now += 0.05
    rig.replace(0)
    go_on(rig)
    return rig


def job_hang() -> Rig:
    rig = running_job()
    rig.suspect(0)
    rig.now += 0.01
    rig.answer(0)
    rig.answer(1, rank_1=Whereabouts.USER)
    rig.leave(0, 1)
    go_on(rig)
    return rig


def job_fault_in_recovery() -> Rig:
    rig = running_job()
    rig.fault(FaultKind.EXCEPTION, 1, error=error_of(ErrorClass.MEMORY))
    rig.leave(0, 1)
    for r in rig.reports:
        rig.set_rank(r, state=RankState.ACTIVE, generation=G2, step=Step(5))
    rig.all_report()
    rig.resumed(1)
    rig.now += 0.1
    rig.fault(FaultKind.KILL, 0)
    rig.leave(1)
    rig.replace(0)
    go_on(rig)
    return rig


def job_finish() -> Rig:
    rig = running_job()
    for number in (1, 0):
        rig.returned(number)
    for n in (0, 1):
        rig.now += 0.1
        rig.from_node(n, Bye(node=NodeId(n)))
    return rig


def job_stop() -> Rig:
    rig = running_job()
    rig.feed(StopRequested("Ctrl-C", 130))
    rig.from_node(0, Bye(node=NodeId(0)))
    rig.tick(7.0)
    return rig


def job_user_bug() -> Rig:
    rig = running_job()
    for count in range(3):
        rig.fault(FaultKind.EXCEPTION, 1, error=USER_ERROR)
        rig.leave(0, 1)
        if count == 1:
            rig.replace(1)
        if count < 2:
            go_on(rig)
    return rig


# --- the node ------------------------------------------------------------------------------------


def node_stories() -> Stories:
    return {
        "start-up": node_start_up,
        "exception": node_exception,
        "kill": node_kill,
        "hang": node_hang,
        "fault-in-recovery": node_fault_in_recovery,
        "finish": node_finish,
    }


def training_node() -> NodeRig:
    """In generation 1, at step 7; what led there is in the story of the start-up."""
    rig = NodeRig().ready().active()
    for number in (0, 1):
        rig.say(number, PhaseBegan(generation=G1, step=Step(5), phase=FIRST_TURN))
        for step in (6, 7):
            rig.say(number, PhaseBegan(generation=G1, step=Step(step), phase=TURN, turn_s=0.1))
    rig.log.clear()
    return rig


def leave(rig: NodeRig, *numbers: int) -> None:
    for number in numbers:
        message = RankQuiet(
            generation=rig.rank(number).generation,
            keep_obstacle=None,
            build_has_collectives=False,
            interrupt_s=0.01,
        )
        rig.now += 0.01
        rig.say(number, message, snapshots=held((1, 6), (1, 7)))


def interrupt(generation: int, *replaced: tuple[int, int]) -> FromJob:
    order = Interrupt(
        generation=Generation(generation),
        reason="a fault",
        replace=tuple(Replacement(Rank(r), i) for r, i in replaced),
    )
    return FromJob(order)


def start(rig: NodeRig, generation: int) -> None:
    source = SnapshotId(G1, Step(7))
    order = start_of(generation, 7, rig.state, sources={Rank(r): source for r in (0, 1)})
    rig.now += 0.01
    rig.feed(FromJob(order))


def ended(rig: NodeRig, number: int, *, signal: int | None) -> None:
    rig.feed(
        RankEnded(
            rank=Rank(number),
            incarnation=rig.rank(number).incarnation,
            exit_code=None if signal is not None else 0,
            signal=signal,
            log_tail="last words",
            snapshots=held((1, 6), (1, 7)),
        )
    )


def fresh(rig: NodeRig, number: int, pid: int) -> None:
    rig.now += 0.05
    rig.feed(RankForked(Rank(number), rig.rank(number).incarnation, pid))
    rig.now += 0.05
    rig.say(number, RankEntered(pid=pid), snapshots=held((1, 6), (1, 7)))


def node_start_up() -> Rig:
    rig = NodeRig().ready().active()
    for number in (0, 1):
        resumed = RankResumed(
            generation=G1,
            rank=Rank(number),
            step=Step(5),
            rendezvous_s=0.1,
            build_s=0.2,
            restore_s=0.3,
            kept=False,
        )
        rig.say(number, resumed)
        rig.say(number, PhaseBegan(generation=G1, step=Step(5), phase=FIRST_TURN))
        rig.now += 0.5
        done = FirstStepDone(generation=G1, rank=Rank(number), step=Step(6), seconds=0.5)
        rig.say(number, done)
    logged = LoggedStep(step=Step(6), values={"loss": 2.5})
    rig.say(0, RankLogged(generation=G1, logged=logged))
    rig.tick(0.6)
    return rig


def node_exception() -> Rig:
    rig = training_node()
    rig.say(1, RankRaised(generation=G1, step=Step(7), error=USER_ERROR))
    rig.feed(interrupt(1))
    leave(rig, 1, 0)
    start(rig, 2)
    return rig


def node_kill() -> Rig:
    rig = training_node()
    ended(rig, 1, signal=9)
    rig.feed(interrupt(1, (1, 1)))
    leave(rig, 0)
    fresh(rig, 1, 1002)
    start(rig, 2)
    return rig


def node_hang() -> Rig:
    rig = training_node()
    rig.tick(1.9)
    rig.feed(FromJob(ProbeRanks(probe=1, generation=G1), frozenset()))
    answer = ProbeAnswer(
        probe=1,
        whereabouts=Whereabouts.COLLECTIVE,
        seconds_there=1.8,
        collectives=9,
        stack="in a barrier",
    )
    rig.say(0, answer)
    rig.tick(0.1)
    rig.feed(interrupt(1, (1, 1)))
    ended(rig, 1, signal=9)
    leave(rig, 0)
    fresh(rig, 1, 1002)
    return rig


def node_fault_in_recovery() -> Rig:
    rig = training_node()
    rig.say(0, RankRaised(generation=G1, step=Step(7), error=USER_ERROR))
    rig.feed(interrupt(1))
    leave(rig, 0)
    rig.tick(2.1)
    rig.feed(interrupt(1, (1, 1)))
    ended(rig, 1, signal=9)
    fresh(rig, 1, 1002)
    start(rig, 2)
    ended(rig, 1, signal=11)
    rig.feed(interrupt(2, (1, 2)))
    leave(rig, 0)
    fresh(rig, 1, 1003)
    start(rig, 3)
    return rig


def node_finish() -> Rig:
    rig = training_node()
    for number in (0, 1):
        digests = (TensorDigest("weight", (number,), "abc"),)
        returned = RankReturned(generation=G1, rank=Rank(number), step=Step(9), digests=digests)
        rig.say(number, returned, snapshots=held((1, 8), (1, 9)))
    rig.feed(FromJob(FinishJob(finished=True, exit_code=0, reason="finished at step 9")))
    for number in (0, 1):
        rig.now += 0.1
        ended(rig, number, signal=None)
    return rig


# --- the rank ------------------------------------------------------------------------------------


def rank_stories() -> Stories:
    return {
        "start-up": rank_start_up,
        "exception": rank_exception,
        "interrupt": rank_interrupt,
        "hang": rank_hang,
        "fault-in-recovery": rank_fault_in_recovery,
        "finish": rank_finish,
    }


def order(generation: int) -> Ordered:
    told = RankStart(
        generation=Generation(generation),
        rank=Rank(1),
        local_rank=1,
        world_size=2,
        local_world_size=2,
        node=NodeId(0),
        step=Step(7),
        source=SnapshotId(G1, Step(7)),
        store_host="host-0",
        store_port=7000,
        keep=True,
        slot_directory="slots/rank-1",
        log_path="logs/rank-1.log",
        settings=settings(),
    )
    return Ordered(told)


def leave_order(generation: int) -> Ordered:
    return Ordered(RankLeave(generation=Generation(generation)))


def running_rank() -> RankRig:
    rig = RankRig()
    rig.feed(MainEntered())
    rig.feed(order(1))
    rig.log.clear()
    return rig


def rank_start_up() -> Rig:
    rig = RankRig()
    rig.feed(MainEntered())
    rig.now += 0.1
    rig.feed(order(1))
    rig.feed(order(1))
    rig.feed(RankTick())
    return rig


def rank_exception() -> Rig:
    rig = running_rank()
    rig.feed(MainRaised(Step(7), USER_ERROR))
    rig.feed(leave_order(1))
    rig.now += 0.01
    rig.feed(MainQuiet(None, False))
    rig.feed(order(2))
    return rig


def rank_interrupt() -> Rig:
    rig = running_rank()
    rig.feed(leave_order(1))
    rig.now += 0.005
    rig.feed(MainRaised(Step(7), error_of(ErrorClass.COLLECTIVE)))
    rig.now += 0.005
    rig.feed(MainQuiet("a mesh of one's own", True))
    rig.feed(leave_order(1))
    rig.feed(order(2))
    return rig


def rank_hang() -> Rig:
    rig = running_rank()
    rig.feed(leave_order(1))
    for _ in range(3):
        rig.now += 0.03
        rig.feed(RankTick())
    rig.feed(MainInterrupted())
    rig.feed(MainQuiet(None, False))
    return rig


def rank_fault_in_recovery() -> Rig:
    rig = running_rank()
    rig.feed(leave_order(1))
    rig.feed(MainInterrupted())
    rig.feed(MainQuiet(None, False))
    rig.feed(order(2))
    rig.feed(leave_order(1))
    rig.feed(leave_order(2))
    rig.feed(MainInterrupted())
    rig.feed(MainQuiet(None, False))
    rig.feed(order(3))
    return rig


def rank_finish() -> Rig:
    rig = running_rank()
    rig.feed(MainReturned(Step(9), (TensorDigest("weight", (1,), "abc"),)))
    rig.now += 0.1
    rig.feed(Ordered(RankFinish(finished=True)))
    return rig
