"""The arithmetic of quotas, by a clock that is set by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from doorserver import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatsvc.api.quota import MINUTE, SECOND, Bucket, Limits, QuotaExceeded, Quotas, duration


def test_a_bucket_holds_one_minute_and_refills_evenly() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    for _ in range(60):
        assert bucket.wait(1) == 0
        bucket.take(1)
    assert (bucket.wait(1), bucket.wait(2), bucket.remaining()) == (SECOND, 2 * SECOND, 0)
    clock.now += SECOND - 1
    assert bucket.wait(1) == 1
    clock.now += 1
    assert bucket.wait(1) == 0 and bucket.remaining() == 1
    clock.forward(3600)
    assert bucket.remaining() == 60 and bucket.reset() == 0  # an idle hour saves nothing up


def test_a_debt_is_paid_before_anybody_goes_on() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(90)
    assert (bucket.remaining(), bucket.wait(1), bucket.reset()) == (0, 31 * SECOND, 90 * SECOND)


def test_more_than_the_bucket_holds_needs_a_full_one() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.wait(1000) == 0
    bucket.take(1)
    assert bucket.wait(1000) == SECOND


def test_no_limit_is_no_limit() -> None:
    bucket = Bucket(None, Clock())
    bucket.take(10**12)
    assert bucket.wait(10**12) == 0 and bucket.reset() == 0


class Buckets(RuleBasedStateMachine):
    """Against a bucket that does it the long way: a level, in fractions."""

    @initialize(limit=st.sampled_from([1, 7, 60, 1000, 999_983]))
    def begin(self, limit: int) -> None:
        self.limit, self.clock = limit, Clock()
        self.bucket = Bucket(limit, self.clock)
        self.level, self.at = Fraction(limit), self.clock.now
        self.taken: list[int] = []

    def now(self) -> Fraction:
        passed = self.clock.now - self.at
        self.level, self.at = (
            min(Fraction(self.limit), self.level + Fraction(passed * self.limit, MINUTE)),
            self.clock.now,
        )
        return self.level

    @rule(amount=st.integers(0, 3000), forced=st.booleans())
    def take(self, amount: int, forced: bool) -> None:
        need = min(amount, self.limit)
        wait = self.bucket.wait(amount)
        exact = max(Fraction(0), (need - self.now()) * MINUTE / self.limit)
        assert abs(wait - exact) <= self.slack()
        if wait == 0 or forced:
            self.bucket.take(amount)
            self.level = self.now() - amount
            self.taken.append(amount)

    @precondition(lambda self: bool(self.taken))
    @rule()
    def take_and_give(self) -> None:
        before = self.bucket.wait(self.limit), self.bucket.remaining()
        self.bucket.take(5)
        self.bucket.give(5)
        assert (self.bucket.wait(self.limit), self.bucket.remaining()) == before

    @rule(amount=st.integers(1, 100))
    def wait_is_exact(self, amount: int) -> None:
        if wait := self.bucket.wait(amount):
            self.clock.now += wait - 1
            assert self.bucket.wait(amount) == 1
            self.clock.now += 1
            assert self.bucket.wait(amount) == 0

    @rule(nanoseconds=st.integers(0, 3 * MINUTE))
    def pass_time(self, nanoseconds: int) -> None:
        self.clock.now += nanoseconds

    def slack(self) -> int:
        return len(self.taken) + 1  # each taking rounds down by less than a nanosecond

    @invariant()
    def remaining_is_the_level(self) -> None:
        level = max(Fraction(0), self.now())
        assert -1 <= level - self.bucket.remaining() <= 1 or abs(level - self.bucket.remaining()) < 2


TestBuckets = Buckets.TestCase
TestBuckets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Tickets(RuleBasedStateMachine):
    """Requests of one key come, are refused, run and leave in any order; what is counted is what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.quotas = Quotas(self.clock)
        self.limits = Limits(30, 600, 3)
        self.open: list[tuple[object, list[int]]] = []
        self.requests = self.tokens = 0

    def ticket(self) -> object:
        return self.quotas.ticket("k", self.limits)

    @property
    def account(self) -> object:
        return self.quotas._accounts["k"]

    @rule(prompts=st.lists(st.integers(1, 300), min_size=1, max_size=3), engine_says=st.booleans())
    def come(self, prompts: list[int], engine_says: bool) -> None:
        ticket, running = self.ticket(), []
        before = self.state()
        for prompt in prompts:
            try:
                ticket.open(prompt)  # type: ignore[attr-defined]
            except QuotaExceeded as e:
                assert e.status == 429 and e.retry_after >= 1
                break
            if not engine_says:
                ticket.refused(prompt)  # type: ignore[attr-defined]
                break
            running.append(prompt)
        if running:
            self.open.append((ticket, running))
        else:
            assert self.state() == before  # refused, by whomever: nothing was used

    def state(self) -> tuple[int, int, int]:
        account = self.account
        return account.running, account.requests.reset(), account.tokens.reset()  # type: ignore[attr-defined]

    @precondition(lambda self: bool(self.open))
    @rule(which=st.integers(0, 9), generated=st.integers(0, 400), begun=st.booleans())
    def end(self, which: int, generated: int, begun: bool) -> None:
        ticket, running = self.open[which % len(self.open)]
        prompt = running.pop()
        before = self.state()
        ticket.close(prompt, generated, begun=begun)  # type: ignore[attr-defined]
        if not running:
            self.open.remove((ticket, running))
        after = self.state()
        assert after[1] == before[1] and (after[2] >= before[2] if begun else after[2] <= before[2])

    @rule(seconds=st.integers(0, 120))
    def pass_time(self, seconds: int) -> None:
        self.clock.forward(seconds)

    @rule()
    def reload(self) -> None:
        self.limits = Limits(self.limits.requests_per_minute, self.limits.tokens_per_minute, self.limits.max_concurrent)

    @invariant()
    def as_many_run_as_there_are(self) -> None:
        self.ticket()
        assert self.account.running == len(self.open) <= 3  # type: ignore[attr-defined]


TestTickets = Tickets.TestCase
TestTickets.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def ask(quotas: Quotas, limits: Limits, tokens: int = 1) -> int:
    """0, or what Retry-After says."""
    ticket = quotas.ticket("k", limits)
    try:
        ticket.open(tokens)
    except QuotaExceeded as e:
        return e.retry_after
    ticket.close(tokens, 0, begun=True)
    return 0


@given(limit=st.integers(1, 5000), burst=st.integers(1, 50), tokens=st.integers(1, 9000))
def test_retry_after_is_the_first_second_at_which_it_passes(limit: int, burst: int, tokens: int) -> None:
    clock = Clock()
    quotas, limits = Quotas(clock), Limits(limit, 7 * limit, None)
    waits = [w for _ in range(burst) if (w := ask(quotas, limits, tokens))]
    if not waits:
        return
    assert len(set(waits)) == 1  # asking does not make it longer
    clock.forward(waits[0] - 1)
    if waits[0] > 1:
        assert ask(quotas, limits, tokens) == 1
    clock.forward(1)
    assert ask(quotas, limits, tokens) == 0


def test_the_longer_of_two_waits_counts() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    limits = Limits(60, 60, None)
    assert ask(quotas, limits, 60) == 0
    assert ask(quotas, limits, 30) == 30  # requests would pass, tokens not
    quotas = Quotas(clock)
    limits = Limits(2, 60, None)
    assert [ask(quotas, limits, 15), ask(quotas, limits, 15)] == [0, 0]
    assert ask(quotas, limits, 30) == 30  # now tokens would


def test_other_limits_in_the_file_count_at_once_and_nothing_is_forgotten() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    assert [ask(quotas, Limits(2, None, None)) for _ in range(3)] == [0, 0, 30]
    assert ask(quotas, Limits(120, None, None)) == 1  # the minute that was used is still used
    assert ask(quotas, Limits(None, None, None)) == 0


def test_keys_do_not_touch_each_other() -> None:
    quotas = Quotas(Clock())
    limits = Limits(1, None, 1)
    quotas.ticket("a", limits).open(1)
    quotas.ticket("b", limits).open(1)
    with pytest.raises(QuotaExceeded):
        quotas.ticket("a", limits).open(1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0ms"), (0.0000001, "1ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (362.25, "6m2.25s")],
)
def test_durations_as_openai_writes_them(seconds: float, words: str) -> None:
    assert duration(round(seconds * SECOND)) == words
