"""Metrics: what events say, counted from them alone; read by Prometheus' own client library."""

from __future__ import annotations

import math
import threading
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from stepfast.core.messages import RankState
from stepfast.core.objectives import Objectives
from stepfast.events import (
    CheckpointCommitted,
    CheckpointRejected,
    CheckpointsVanished,
    Event,
    EventLine,
    FaultSeen,
    JobOpened,
    NodeChecked,
    Recovered,
    SloBreached,
)
from stepfast.observe.exposition import GAUGE, Family, Histogram, Sample, page
from stepfast.observe.metrics import PHASES, JobMetrics, Levels, Pace
from stepfast.observe.node_metrics import NodeLevels, NodeMetrics
from stepfast.observe.summary import summarize

OPENED = JobOpened(job_id="a", nodes=1, nproc_per_node=2, script="x", stepfast_version="1")


def line(event: Event, at: float = 1000.0) -> EventLine:
    return EventLine(v=1, at=at, t=at, event=event)


def recovered(kind: str = "kill", total_s: float = 0.4, steps_lost: int = 1) -> Recovered:
    phases = {f"{phase}_s": total_s / 10 for phase in PHASES}
    return Recovered(
        **{**phases, "total_s": total_s},
        generation=2, kind=kind, rank=0, node=0, step=7, resumed_step=6, steps_lost=steps_lost,
        survivors_kept_pid=True, kept_model=True, causes=(),
    )  # fmt: skip


def seen(kind: str, *, collateral: bool = False) -> FaultSeen:
    return FaultSeen(
        kind=kind, rank=0, node=0, generation=1, step=7, reason="x", collateral=collateral,
        detect_s=0.0,
    )  # fmt: skip


def committed(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(step=step, generation=1, name="n", size_bytes=1, seconds=0.1)


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a page, as Prometheus' own parser reads it."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    found = [(s.name, frozenset(s.labels.items()), s.value) for f in families for s in f.samples]
    assert len({key[:2] for key in found}) == len(found), "a series is there twice"
    return {(name, labels): value for name, labels, value in found}


def value(text: str, name: str, **labels: str) -> float:
    return read(text)[name, frozenset(labels.items())]


def test_a_page_of_a_job_agrees_with_the_summary_of_its_events():
    log = [
        line(OPENED, 900.0),
        line(seen("kill")),
        line(seen("collective", collateral=True)),
        line(recovered("kill", 0.4, steps_lost=1)),
        line(seen("hang")),
        line(recovered("hang", 7.0, steps_lost=0)),
        line(seen("kill")),
        line(recovered("kill", 0.6, steps_lost=2)),
    ]
    summary, text = summarize(log), JobMetrics(log).page(1100.0)
    by_kind = {
        kind: [r["seconds"] for r in summary["recoveries"] if r["kind"] == kind]
        for kind in ("kill", "hang")
    }
    for kind, seconds in by_kind.items():
        for phase in PHASES:
            labels = {"kind": kind, "phase": phase}
            assert value(text, "stepfast_recovery_seconds_count", **labels) == len(seconds)
            total = value(text, "stepfast_recovery_seconds_sum", **labels)
            assert math.isclose(total, sum(s[phase] for s in seconds))
    lost = sum(r["steps_lost"] for r in summary["recoveries"])
    assert value(text, "stepfast_steps_lost_total") == lost == 3
    faults = {k: v for k, v in read(text).items() if k[0] == "stepfast_faults_total"}
    assert sum(faults.values()) == summary["faults"] == 3
    assert value(text, "stepfast_faults_total", kind="kill") == 2


def test_events_that_come_later_count_as_those_that_were_there():
    log = [line(OPENED), line(recovered()), line(committed(5)), line(seen("kill"))]
    late = JobMetrics()
    for each in log:
        late.take(each)
    assert late.page(1001.0) == JobMetrics(log).page(1001.0)


def test_buckets_count_what_is_at_or_below_their_bound():
    made = Histogram((1, 2.5))
    for observed in (0.5, 1.0, 1.1, 2.5, 99.0):
        made.observe(observed)
    family = Family(name="x", kind="histogram", text="t", samples=tuple(made.samples()))
    text = page([family])
    assert [value(text, "x_bucket", le=bound) for bound in ("1", "2.5", "+Inf")] == [2, 4, 5]
    assert (value(text, "x_count"), value(text, "x_sum")) == (5, 104.1)


def test_a_label_may_be_any_text():
    wild = 'a "quoted" \\ back\nslash {} }, x="1"'
    family = Family(
        name="x", kind=GAUGE, text='of "x" \\ and\nmore', samples=(Sample(1, (("a", wild),)),)
    )
    assert value(page([family]), "x", a=wild) == 1


def test_the_age_of_a_checkpoint_is_that_of_the_newest_that_is_still_there():
    metrics = JobMetrics([line(OPENED, 900.0)])

    def age() -> float:
        return value(metrics.page(1000.0), "stepfast_checkpoint_age_seconds")

    assert age() == 100.0, "none yet: as old as the job"
    for step, at in ((10, 920.0), (20, 950.0), (30, 990.0)):
        metrics.take(line(committed(step), at))
    assert age() == 10.0
    metrics.take(line(CheckpointRejected(step=30, generation=1, reason="damaged")))
    assert age() == 50.0
    metrics.take(line(CheckpointsVanished(steps=(10, 20), url="x")))
    assert age() == 100.0
    metrics.take(line(committed(40), 1010.0))
    assert age() == 0.0, "a clock that was set back makes nothing younger than new"
    for step in range(41, 300):
        metrics.take(line(committed(step), 999.0))
    assert age() == 1.0


def test_breaches_are_counted_by_objective():
    goals = Objectives(recovery_s=0.5, steps_lost=0)
    metrics = JobMetrics()
    for event in (recovered(total_s=0.5, steps_lost=0), recovered(total_s=0.6, steps_lost=3)):
        for breach in goals.breached_by(event):
            metrics.take(line(breach))
    text = metrics.page(0.0)
    assert value(text, "stepfast_slo_breaches_total", objective="recovery_s") == 1
    assert value(text, "stepfast_slo_breaches_total", objective="steps_lost") == 1
    assert not Objectives().breached_by(recovered(total_s=999.0, steps_lost=99))
    (breach,) = Objectives(recovery_s=0.5).breached_by(recovered("hang", total_s=0.6))
    assert breach == SloBreached(
        objective="recovery_s", limit=0.5, value=0.6, generation=2, kind="hang"
    )


def test_a_node_that_is_refused_is_counted_and_one_that_is_admitted_is_not():
    metrics = JobMetrics()
    for admitted in (True, False, True):
        metrics.take(
            line(
                NodeChecked(
                    node=0, occasion="join", verdict="unhealthy", admitted=admitted, seconds=0.1,
                    healthy=(), findings=(),
                )
            )
        )  # fmt: skip
    assert value(metrics.page(0.0), "stepfast_unfit_total") == 1


def test_levels_are_those_of_the_last_look():
    metrics = JobMetrics()
    ranks = Counter({RankState.ACTIVE: 3, RankState.ABSENT: 1})
    metrics.look(Levels(generation=4, step=17, ranks=ranks), now=1.0)
    text = metrics.page(0.0)
    assert value(text, "stepfast_generation") == 4
    assert value(text, "stepfast_step") == 17
    states = {state: value(text, "stepfast_ranks", state=state.value) for state in RankState}
    assert states == {state: ranks[state] for state in RankState}, "each state, also without ranks"


def test_what_a_step_takes_is_seen_between_two_looks_of_one_generation():
    pace = Pace()
    assert pace.at(1, 0, 0.0) is None
    assert pace.at(1, 2, 10.0) is None, "the first steps are no steps like others"
    assert pace.at(1, 2, 11.0) is None
    assert pace.at(1, 6, 12.0) == (0.5, 4), "from the look that saw the step before"
    assert pace.at(2, 7, 13.0) is None, "another generation"
    assert pace.at(2, 6, 14.0) is None, "it went back"
    assert pace.at(2, 8, 15.0) == (0.5, 2)


def test_one_thread_may_ask_while_another_takes_events_in():
    metrics = JobMetrics()
    kinds = [f"kind-{number}" for number in range(60)]
    asked: list[str] = []
    writing = threading.Thread(
        target=lambda: [metrics.take(line(recovered(kind))) for kind in kinds]
    )
    writing.start()
    while writing.is_alive() and len(asked) < 200:
        asked.append(metrics.page(0.0))
    writing.join()
    counts = [text.count("stepfast_recovery_seconds_count") for text in asked]
    assert counts == sorted(counts) and all(count % len(PHASES) == 0 for count in counts)


def test_a_page_of_a_node():
    metrics = NodeMetrics()
    for seconds in (0.2, 0.3):
        metrics.turn_took(seconds)
    levels = NodeLevels(
        generation=2,
        step=9,
        ranks=Counter({RankState.ACTIVE: 2}),
        is_connected=True,
        health={"gpu count": "healthy", "efa": "unknown"},
    )
    text = metrics.page(levels)
    assert value(text, "stepfast_node_step") == 9
    assert value(text, "stepfast_node_generation") == 2
    assert value(text, "stepfast_node_step_seconds_count") == 2
    assert value(text, "stepfast_node_ranks", state="active") == 2
    assert value(text, "stepfast_node_coordinator_connected") == 1
    for check, verdict in levels.health.items():
        found = {
            word: value(text, "stepfast_node_health", check=check, verdict=word)
            for word in ("healthy", "unhealthy", "unknown")
        }
        assert found == {**dict.fromkeys(found, 0.0), verdict: 1.0}


def test_names_and_units_are_as_prometheus_wants_them():
    families = (*JobMetrics().families(0.0), *NodeMetrics().families(NodeLevels()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family.name.startswith("stepfast_") and family.text.endswith(".")
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not family.name.endswith(("_s", "_ms", "_count", "_sum", "_bucket"))
