"""Whose a store of checkpoints is: one job's at a time, and each generation one job's for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stepfast.checkpoint.directory import DirectoryStore
from stepfast.checkpoint.owner import LIMIT_S, StoreOwner, StoreTaken
from stepfast.core.terms import Generation, JobId
from stepfast.errors import StateError
from unit.stored_checkpoints import ROOT, in_memory


class Time:
    """Goes on when somebody sleeps; then others may do something."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


class Jobs:
    """Jobs that share one store."""

    def __init__(self) -> None:
        self.store = in_memory()[0]
        self.time = Time()
        self.waited_for: list[str] = []

    def agent(self, job: str, store: DirectoryStore | None = None) -> StoreOwner:
        return StoreOwner(store or self.store, JobId(job), clock=self.time, sleep=self.time.sleep)

    def take(self, job: str, there: int = 0) -> tuple[StoreOwner, int]:
        agent = self.agent(job)
        return agent, agent.take(Generation(there), self.waited_for.append)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_a_job_begins_above_what_others_wrote_in(jobs: Jobs) -> None:
    first, below = jobs.take("a", there=3)
    assert below == 3
    first.cover(Generation(4))
    first.cover(Generation(7))
    assert jobs.take("a")[1] == 7, "an agent of the same job, or its next run"
    first.release()
    second, below = jobs.take("b")
    assert below == 7 and jobs.waited_for == []
    second.cover(Generation(8))
    for late in (lambda: first.cover(Generation(8)), first.show_life):
        with pytest.raises(StoreTaken, match="job b's, which has taken it"):
            late()


def test_one_that_lives_is_seen_at_its_next_sign(jobs: Jobs) -> None:
    first, _ = jobs.take("a")
    jobs.time.meanwhile = first.show_life
    with pytest.raises(StoreTaken, match=r"is job a's, which writes .* give this job another --ch"):
        jobs.take("b")
    assert jobs.waited_for == ["a"] and jobs.time.now_s < 100 + LIMIT_S
    first.cover(Generation(1))


def test_a_dead_one_is_waited_for_no_longer_than_the_limit(jobs: Jobs) -> None:
    jobs.take("a")
    _, below = jobs.take("b")
    assert below == 0 and 100 + LIMIT_S <= jobs.time.now_s <= 102 + LIMIT_S
    jobs.take("b")
    assert jobs.waited_for == ["a"], "its own is not waited for"


def test_one_that_ends_meanwhile_is_not_waited_for(jobs: Jobs) -> None:
    first, _ = jobs.take("a")
    jobs.time.meanwhile = first.release
    jobs.take("b")
    assert jobs.time.now_s < 103


def test_of_two_that_come_at_once_one_gets_it(jobs: Jobs) -> None:
    """Both have seen that nobody has the store; the other one's claim comes between."""
    other = jobs.agent("b")

    class Slow(DirectoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            if name.startswith("owner/claim-"):
                other.take(Generation(0))
                jobs.time.meanwhile = other.show_life
            return super().put_if_absent(name, data)

    agent = jobs.agent("a", Slow(ROOT, jobs.store._disk))
    with pytest.raises(StoreTaken, match="is job b's"):
        agent.take(Generation(0))
    other.cover(Generation(1))


def test_a_claim_that_was_swept_is_not_made_again(jobs: Jobs) -> None:
    """So late that the number it is about to put was taken, and removed, long ago."""
    jobs.take("a")
    second = jobs.agent("b")

    class Late(DirectoryStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            if not jobs.waited_for:
                jobs.take("b")
                for generation in range(1, 20):
                    second.cover(Generation(generation))
            return super().put_if_absent(name, data)

    late = jobs.agent("a", Late(ROOT, jobs.store._disk))
    with pytest.raises(StoreTaken, match="is job b's"):
        late.cover(Generation(1))
    assert jobs.waited_for == ["a"]
    assert len(jobs.store.names("owner")) < 12, "claims do not pile up"
    second.cover(Generation(20))


def test_agents_of_one_job_leave_the_sign_to_each_other(jobs: Jobs) -> None:
    one, _ = jobs.take("a")
    other, _ = jobs.take("a")

    def sign() -> bytes:
        return jobs.store.read("owner/sign-of-life.json")

    one.show_life()  # the other one's take was the newest sign
    seen = sign()
    one.show_life()
    assert sign() != seen, "nobody else has, since"
    seen = sign()
    other.show_life()
    assert sign() == seen
    one.release()
    seen = sign()
    for agent in (one, other, one, other):
        agent.show_life()
    assert sign() == seen, "the end stays said"


def test_of_many_agents_one_lists_the_claims(jobs: Jobs) -> None:
    class Counted(DirectoryStore):
        listed = 0

        def names(self, prefix: str = "") -> list[str]:
            self.listed += 1
            return super().names(prefix)

    store = Counted(ROOT, jobs.store._disk)
    agents = [jobs.agent("a", store) for _ in range(20)]
    for agent in agents:
        agent.take(Generation(0))
    for _ in range(2):  # all know the newest sign then
        for agent in agents:
            agent.show_life()
    before = store.listed
    for _ in range(10):
        for agent in agents:
            agent.show_life()
    assert store.listed - before <= 10 * 3, "for the one whose turn it is, not for each"


def test_what_is_no_claim_is_named(jobs: Jobs) -> None:
    jobs.store.put_if_absent("owner/claim-000000001.json", b"{")
    with pytest.raises(StateError, match=r"owner/claim-000000001\.json is none of stepfast's"):
        jobs.take("a")
