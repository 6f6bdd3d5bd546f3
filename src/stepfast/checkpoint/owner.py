"""Which job a store of checkpoints belongs to, and which generations in it are that job's.

Owns: the claims in a store, the sign of life beside them. Does not own: who asks, and when
(`agent.durable`).

Invariants:
- Claims are numbered. Each is put only if there is none of its number, and the newest one counts.
- A generation's number is one job's in a store: a job claims a generation before it writes in it,
  and begins above all that older claims name. So no two jobs ever write into one checkpoint's
  directory, whatever clocks, pauses and networks do.
- The sign of life decides how early a second job is refused, and nothing else. It is compared,
  never dated: clocks need not agree. Every wait for it has an end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stepfast.checkpoint.store import CheckpointStore
from stepfast.core.terms import Generation, JobId
from stepfast.errors import OperatingError, StateError
from stepfast.runtime.clock import SystemClock
from stepfast.runtime.ports import Clock

BEAT_S = 5.0  # between two signs of life; what a second job waits for where the first one lives
LIMIT_S = 30.0  # without a sign for so long, a job is taken for dead; it may just be cut off
_POLL_S = 1.0
_DIRECTORY = "owner"
_CLAIM = f"{_DIRECTORY}/claim-"
_SIGN = f"{_DIRECTORY}/sign-of-life.json"
_CLAIMS_KEPT = 8  # who was about to put an older one finds, behind it, that it was too late
_TRIES_MAX = 100  # a claim that others of the same job overtook is tried again

Sleep = Callable[[float], None]
OnWait = Callable[[str], None]


class StoreTaken(StateError):
    """The store is another job's, which lives or has taken it meanwhile."""


class Claim(msgspec.Struct, frozen=True):
    """`generation`: the newest in which the job writes; those of others begin above it. `at_s`, in
    seconds since the epoch, is for people.
    """

    job_id: str
    generation: int
    at_s: float


class _Sign(msgspec.Struct, frozen=True):
    """That whoever made the claim of that number lives, or (`is_over`) has ended in order."""

    claim: int
    token: str
    is_over: bool


class _Numbered(NamedTuple):
    number: int
    claim: Claim


class StoreOwner:
    """One job's side of the claims in a store; its agents each have one. For any thread."""

    def __init__(
        self,
        store: CheckpointStore,
        job_id: JobId | None,
        *,
        clock: Clock | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """`job_id` None: a job that is not named yet, which can only look."""
        self._store = store
        self._job_id = job_id
        self._clock: Clock = SystemClock() if clock is None else clock
        self._sleep = sleep
        self._seen: _Sign | None = None

    def wait_until_free(self, on_wait: OnWait = lambda job_id: None) -> None:
        """Return when no other living job has the store; only looks. Raises StoreTaken.

        Where another job had it and did not end in order, a sign of life is waited for, for at most
        `LIMIT_S`; `on_wait` is told that job's id.
        """
        newest = self._newest()
        if newest is None or newest.claim.job_id == self._job_id:
            return
        first = self._sign()
        if _is_over(first, newest):
            return
        on_wait(newest.claim.job_id)
        deadline = self._clock.monotonic() + LIMIT_S
        while self._clock.monotonic() < deadline:
            self._sleep(_POLL_S)
            sign = self._sign()
            if sign != first:
                if _is_over(sign, newest):
                    return
                raise self._taken(newest.claim, "writes its checkpoints there, and lives")

    def take(
        self, generation_there: Generation, on_wait: OnWait = lambda job_id: None
    ) -> Generation:
        """Make the store this job's, and show life; the newest generation that others may have
        written in. Raises StoreTaken where another job lives in it.

        `generation_there`: the newest that is seen in the store, where nobody claimed any.
        """
        assert self._job_id is not None, "a job takes a store by its name"
        for _ in range(_TRIES_MAX):
            self.wait_until_free(on_wait)
            newest = self._newest()
            below = max(generation_there, 0 if newest is None else newest.claim.generation)
            is_mine = newest is not None and newest.claim.job_id == self._job_id
            if is_mine or self._append(newest, below):
                self._write_sign(is_over=False)
                return Generation(below)
        raise OperatingError(f"{self._store.url}: others claim it all the time; try again")

    def cover(self, generation: Generation) -> None:
        """Before anything of `generation` is written or committed. Raises StoreTaken where the
        store has become another job's.
        """
        for _ in range(_TRIES_MAX):
            newest = self._newest()
            if newest is not None and newest.claim.job_id != self._job_id:
                raise self._taken(newest.claim, "has taken it, for this one gave no sign of life")
            if newest is not None and newest.claim.generation >= generation:
                return
            if self._append(newest, generation):
                return
        raise OperatingError(f"{self._store.url}: others claim it all the time; try again")

    def show_life(self) -> None:
        """Every `BEAT_S`: a new sign, unless another agent of this job left one since the last
        time. Raises StoreTaken as `cover` does.
        """
        sign = self._sign()
        if sign is not None and self._seen is not None:
            is_same_claims = sign.claim == self._seen.claim and not sign.is_over
            if is_same_claims and sign.token != self._seen.token:
                # Another agent of this job: of many, all but one read one small object.
                self._seen = sign
                return
        newest = self._newest()
        if newest is not None and newest.claim.job_id != self._job_id:
            raise self._taken(newest.claim, "has taken it, for this one gave no sign of life")
        if sign != self._seen:
            self._seen = sign
        elif sign is None or not sign.is_over:
            self._write_sign(is_over=False)

    def release(self) -> None:
        """The job is over, in order: nobody need wait for a sign of it."""
        newest = self._newest()
        if newest is not None and newest.claim.job_id == self._job_id:
            self._write_sign(is_over=True)

    def _newest(self) -> _Numbered | None:
        for _ in range(_TRIES_MAX):
            names = [name for name in self._store.names(_DIRECTORY) if name.startswith(_CLAIM)]
            if not names:
                return None
            try:
                data = self._store.read(names[-1])
            except StateError:
                if self._store.size_bytes(names[-1]) is None:
                    continue  # many newer ones were put meanwhile
                raise
            number = names[-1].removeprefix(_CLAIM).removesuffix(".json")
            try:
                return _Numbered(int(number), msgspec.json.decode(data, type=Claim))
            except (msgspec.MsgspecError, ValueError) as error:
                raise StateError(
                    f"{self._store.url}/{names[-1]} is none of stepfast's claims: {error};"
                    f" remove {_DIRECTORY}/ if no job uses this store"
                ) from error
        raise OperatingError(f"{self._store.url}: its claims change all the time; try again")

    def _append(self, newest: _Numbered | None, generation: int) -> bool:
        """Whether the claim that follows `newest` is this job's, and still the newest."""
        assert self._job_id is not None, "a claim has a name"
        number = 1 if newest is None else newest.number + 1
        claim = Claim(self._job_id, int(generation), self._clock.wall())
        if not self._store.put_if_absent(_claim_name(number), msgspec.json.encode(claim)):
            return False
        # One of that number may have been there, and be swept: then there are newer ones.
        there = [name for name in self._store.names(_DIRECTORY) if name.startswith(_CLAIM)]
        if there[-1:] != [_claim_name(number)]:
            return False
        for old in there[:-_CLAIMS_KEPT]:
            self._store.delete(old)
        return True

    def _sign(self) -> _Sign | None:
        try:
            return msgspec.json.decode(self._store.read(_SIGN), type=_Sign)
        except (StateError, msgspec.MsgspecError):
            return None  # as good as none: it only says how early another job is refused

    def _write_sign(self, *, is_over: bool) -> None:
        newest = self._newest()
        number = 0 if newest is None else newest.number
        sign = _Sign(number, secrets.token_hex(8), is_over)
        with self._store.writer(_SIGN) as writer:
            writer.write(msgspec.json.encode(sign))
        self._seen = sign

    def _taken(self, claim: Claim, how: str) -> StoreTaken:
        return StoreTaken(
            f"{self._store.url} is job {claim.job_id}'s, which {how}; give this job another"
            " --checkpoints, or wait until that one has ended"
        )


def _claim_name(number: int) -> str:
    return f"{_CLAIM}{number:09d}.json"


def _is_over(sign: _Sign | None, newest: _Numbered) -> bool:
    return sign is not None and sign.is_over and sign.claim == newest.number
