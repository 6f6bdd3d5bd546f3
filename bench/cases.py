"""What is measured: each case with its limit and the sketch that was made before measuring.

Owns: kinds, limits, expectations, in seconds. Does not own: how a case is run.
Sources of the sketch: single costs measured before, on torch 2.13, CPU and Gloo (waking a peer 1 to
8 ms, a new group 7 to 16 ms, forking a rank 13 ms, importing torch 2.3 s, and 1 s for what FSDP2's
first step loads), and one step of `debug` at about 60 ms with four ranks on two cores.
"""

from dataclasses import dataclass, field

HANG_FLOOR_S = 2.0  # stepfast's own default on CPU
STEP_RATIO = 4.0  # a hang may be noticed within so many step times, where they are longer

TO_FIRST_STEP = "fault to first step"
DETECTION = "fault to detection"
AFTER_DETECTION = "detection to first step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of fault on one system. Sketches are sums of parts, by name."""

    name: str
    kind: str
    system: str  # "stepfast" or "torchrun"
    sketch_s: dict[str, dict[str, float]]  # measure -> part -> seconds
    limit_s: dict[str, float] = field(default_factory=dict)
    holds_group: bool = False  # user code keeps a process group, so that the model is built again

    def expected_s(self, measure: str) -> float:
        return sum(self.sketch_s[measure].values())


_IN_PROCESS = {
    "notice": 0.005,
    "interrupt": 0.010,
    "rendezvous": 0.020,
    "restore": 0.005,
    "first step": 0.060,
}
_FRESH_PROCESS = {
    "notice": 0.005,
    "interrupt and fork": 0.070,
    "rendezvous": 0.020,
    "build in the fresh rank": 0.100,
    "restore": 0.005,
    "first step of a fresh process": 0.150,
}
_BY_LIMIT = {"nine tenths of the floor": 1.8, "probe": 0.1}
_DETECTION_LIMIT_S = {DETECTION: HANG_FLOOR_S, AFTER_DETECTION: 0.8}

STEPFAST_CASES = (
    Case(
        name="exception, model kept",
        kind="exception",
        system="stepfast",
        sketch_s={TO_FIRST_STEP: _IN_PROCESS},
        limit_s={TO_FIRST_STEP: 0.25},
    ),
    Case(
        name="exception, model built again",
        kind="exception",
        system="stepfast",
        sketch_s={TO_FIRST_STEP: {**_IN_PROCESS, "build": 0.100}},
        limit_s={TO_FIRST_STEP: 0.4},
        holds_group=True,
    ),
    Case(
        name="SIGKILL",
        kind="kill",
        system="stepfast",
        sketch_s={TO_FIRST_STEP: _FRESH_PROCESS},
        limit_s={TO_FIRST_STEP: 0.8},
    ),
    Case(
        name="hang",
        kind="hang",
        system="stepfast",
        sketch_s={
            TO_FIRST_STEP: {**_BY_LIMIT, **_IN_PROCESS},
            DETECTION: _BY_LIMIT,
            AFTER_DETECTION: _IN_PROCESS,
        },
        limit_s=_DETECTION_LIMIT_S,
    ),
    Case(
        name="SIGSTOP",
        kind="stop",
        system="stepfast",
        sketch_s={
            TO_FIRST_STEP: {**_BY_LIMIT, **_FRESH_PROCESS},
            DETECTION: _BY_LIMIT,
            AFTER_DETECTION: _FRESH_PROCESS,
        },
        limit_s=_DETECTION_LIMIT_S,
    ),
)

# torchrun notices the end of a process only. A hang ends by the timeout of the process group (half
# an hour by default; here as short as anybody would dare), then torchrun has to end all workers.
TORCHRUN_GROUP_TIMEOUT_S = 10.0
# Its default between SIGTERM, which a stopped process does not hear, and SIGKILL.
TORCHRUN_SHUTDOWN_S = 30.0
_TORCHRUN_RESTART = {
    "notice and end all": 0.2,
    "four imports on two cores": 6.6,
    "build, rendezvous, load": 0.5,
    "first step": 0.3,
}


def _torchrun_case(name: str, kind: str, **before: float) -> Case:
    sketch_s = {TO_FIRST_STEP: {**before, **_TORCHRUN_RESTART}}
    return Case(name=name, kind=kind, system="torchrun", sketch_s=sketch_s)


TORCHRUN_CASES = (
    _torchrun_case("exception", "exception"),
    _torchrun_case("SIGKILL", "kill"),
    _torchrun_case("hang", "hang", timeout=TORCHRUN_GROUP_TIMEOUT_S),
    _torchrun_case(
        "SIGSTOP", "stop", timeout=TORCHRUN_GROUP_TIMEOUT_S, shutdown=TORCHRUN_SHUTDOWN_S
    ),
)

DOES_NOT_SHOW = (
    "CUDA and NCCL: CPU and Gloo only",
    "several machines: two agents of two ranks on one, four ranks on its cores",
    "models whose state takes longer to copy than a step: `debug` has about 1 M parameters",
    "faults while another recovery runs, lost nodes, lost coordinators",
    "torchrun on several nodes, where its agents also have to agree on a new rendezvous",
)
