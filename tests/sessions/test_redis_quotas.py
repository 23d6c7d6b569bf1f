"""Quotas that processes share: the script against exact arithmetic, leases, and a Redis that is slow or away."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

import pytest
import redis.asyncio as aioredis
from redisserver import DelayProxy, MakeRedis, RedisServer

from chatsvc.api.quota import QuotaExceeded, Quotas
from chatsvc.sessions.quotas import Limits
from chatsvc.sessions.redis_quotas import RedisQuotas, _keys

MINUTE = 60_000_000  # microseconds


class Counted:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@asynccontextmanager
async def quotas(url: str, **kwargs: Any) -> AsyncIterator[tuple[RedisQuotas, Counted]]:
    failed = Counted()
    kwargs.setdefault("deadline", 10.0)
    made = RedisQuotas(url, failed, **kwargs)
    await made.open()
    try:
        yield made, failed
    finally:
        await made.close()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Any]:
    async with aioredis.Redis.from_url(redis_server.url, decode_responses=True) as client:
        await client.flushall()
        yield client


async def now(client: Any) -> int:
    seconds, rest = await client.time()
    return int(seconds) * 1_000_000 + int(rest)


async def settled(shared: RedisQuotas) -> None:
    async with asyncio.timeout(20):
        while shared._settling:
            await asyncio.sleep(0.005)


class Model:
    """A bucket the long way, in fractions: when it is full again, for a moment of which two bounds are known."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.full: tuple[Fraction, Fraction] = (Fraction(0), Fraction(0))

    def cost(self, amount: int) -> Fraction:
        return Fraction(amount * MINUTE, self.limit) if self.limit else Fraction(0)

    def wait(self, low: int, high: int, amount: int) -> tuple[Fraction, Fraction]:
        if not self.limit:
            return Fraction(0), Fraction(0)
        need = self.cost(min(amount, self.limit)) - MINUTE
        least = max(Fraction(0), max(self.full[0] - high, 0) + need)
        return least, max(Fraction(0), max(self.full[1] - low, 0) + need)

    def take(self, low: int, high: int, amount: int) -> None:
        cost = self.cost(amount)
        self.full = max(self.full[0], Fraction(low)) + cost, max(self.full[1], Fraction(high)) + cost


@pytest.mark.parametrize("seed", range(6))
async def test_the_script_does_what_exact_arithmetic_says(redis_server: RedisServer, client: Any, seed: int) -> None:
    draw = random.Random(seed)
    limits = Limits(draw.choice([None, 3, 7, 60, 3000]), draw.choice([None, 11, 600, 90_000, 10**9]), None)
    models = Model(limits.requests_per_minute), Model(limits.tokens_per_minute)
    slack, outcomes = 1, set()
    async with quotas(redis_server.url) as (one, _), quotas(redis_server.url) as (two, _):
        for _ in range(120):
            who = draw.choice([one, two])
            requests, tokens = draw.choice([0, 1]), draw.choice([0, 1, 5, draw.randint(0, 400)])
            slack += 1  # every taking rounds down by less than a microsecond
            low = await now(client)
            if draw.random() < 0.3:
                back = -1 if draw.random() < 0.3 else 1
                who.settle("k", limits, "", requests * back, tokens * back)
                await settled(who)
                high = await now(client)
                for model, amount in zip(models, (requests, tokens), strict=True):
                    model.take(low, high, amount * back)
                continue
            verdict = await who.take("k", limits, "", requests, tokens)
            high = await now(client)
            assert verdict is not None and not verdict.busy
            for model, amount, wait in zip(
                models, (requests, tokens), (verdict.request_wait, verdict.token_wait), strict=True
            ):
                least, most = model.wait(low, high, amount)
                if model is models[0] and not amount:  # a generation more of a request that was counted
                    least = most = Fraction(0)
                assert least - slack <= Fraction(wait, 1000) <= most + slack
            if verdict.taken:
                for model, amount in zip(models, (requests, tokens), strict=True):
                    model.take(low, high, amount)
            outcomes.add(verdict.taken)
            for model, reset in zip(models, (verdict.request_reset, verdict.token_reset), strict=True):
                if model.limit:
                    least, most = model.full[0] - high, model.full[1] - low
                    assert max(Fraction(0), least) - slack <= Fraction(reset, 1000) <= max(Fraction(0), most) + slack
    assert True in outcomes


async def test_a_burst_over_many_processes_takes_what_the_bucket_holds_and_no_more(
    redis_server: RedisServer, client: Any
) -> None:
    limits = Limits(7, None, None)
    async with quotas(redis_server.url) as (one, _), quotas(redis_server.url) as (two, _):
        verdicts = await asyncio.gather(*(q.take("k", limits, "", 1, 0) for q in [one, two] * 20))
        assert sum(v is not None and v.taken for v in verdicts) == 7
        left = await two.take("k", limits, "", 1, 0)
        assert left is not None and 0 < left.request_wait <= 60 * 10**9 // 7
        other = await two.take("another key", limits, "", 1, 0)
        assert other is not None and other.taken


async def test_keys_are_in_one_slot_each_and_go_by_themselves(redis_server: RedisServer, client: Any) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    async with quotas(redis_server.url, lease=1.0) as (one, _):
        await one.take(digest, Limits(600, 600, 3), "p", 1, 1)
        keys = await client.keys("*")
        assert len(keys) == 2 and len({k[k.index("{") : k.index("}")] for k in keys}) == 1
        assert not any(digest in k for k in keys) and min([await client.pttl(k) for k in keys]) > 0
        assert await client.pttl(_keys(digest)[0]) <= 1200  # a tenth of a second to refill, and a second more
        one.settle(digest, Limits(600, 600, 3), "p", 0, 0)
        await settled(one)
        assert await client.exists(_keys(digest)[1]) == 0


async def test_places_are_counted_together_and_a_dead_process_frees_its_own(
    redis_server: RedisServer, client: Any
) -> None:
    limits = Limits(None, None, 3)

    async def enter(who: RedisQuotas, place: str) -> bool:
        verdict = await who.take("k", limits, place, 1, 5)
        assert verdict is not None and verdict.taken != verdict.busy
        return verdict.taken

    async with quotas(redis_server.url, lease=2.0) as (one, _), quotas(redis_server.url, lease=2.0) as (two, _):
        assert [await enter(one, "a"), await enter(one, "b"), await enter(two, "c")] == [True] * 3
        assert not await enter(one, "d") and not await enter(two, "d")
        one.settle("k", limits, "a", 0, 7)
        await settled(one)
        assert await enter(two, "d") and not await enter(two, "e")
        await asyncio.sleep(4.5)  # leases are renewed
        assert not await enter(one, "e") and not await enter(two, "e")
        assert one._heart is not None
        one._heart.cancel()  # as good as dead
        async with asyncio.timeout(20):
            while not await enter(two, "e"):
                await asyncio.sleep(0.05)
        assert sorted(await client.zrange(_keys("k")[1], 0, -1)) == ["c", "d", "e"]


async def test_what_is_judged_alone_is_what_this_process_took(own_redis: MakeRedis) -> None:
    server = own_redis()
    server.start()
    limits = Limits(5, None, 4)
    async with quotas(server.url, lease=2.0) as (shared, failed), quotas(server.url) as (other, _):
        accounts = Quotas(lambda: 10**15, shared)  # by itself it never gets anything back
        running = [accounts.ticket("k", limits) for _ in range(2)]
        for ticket in running:
            await ticket.enter(1)
        assert failed.count == 0 and running[0].headers()["x-ratelimit-remaining-requests"] == "4"
        server.stop()
        began = time.monotonic()
        more = [accounts.ticket("k", limits) for _ in range(2)]
        for ticket in more:
            await ticket.enter(1)
        with pytest.raises(QuotaExceeded, match="4 requests running"):
            await accounts.ticket("k", limits).enter(1)
        more.pop().close(1, 10, begun=True)
        last = accounts.ticket("k", limits)
        await last.enter(1)
        last.close(1, 0, begun=True)
        with pytest.raises(QuotaExceeded, match="5 requests a minute"):
            await accounts.ticket("k", limits).enter(1)
        assert failed.count == 5 and time.monotonic() - began < 20
        server.start()  # and knows nothing: it is told of the places that are taken
        async with asyncio.timeout(30):
            while (seen := await other.take("k", Limits(None, None, 3), "x", 0, 0)) is None or not seen.busy:
                other.settle("k", Limits(None, None, 3), "x", 0, 0)
                await asyncio.sleep(0.05)
        before = failed.count
        again = accounts.ticket("k", limits)
        await again.enter(1)
        assert failed.count == before and again.headers()["x-ratelimit-remaining-requests"] == "4"


async def test_a_slow_redis_is_waited_for_once_and_what_it_took_late_is_given_back(
    redis_server: RedisServer, client: Any
) -> None:
    limits = Limits(60, 6000, 2)
    async with DelayProxy(redis_server.port) as proxy:
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        async with quotas(url, deadline=1.0) as (shared, failed):
            first = await shared.take("k", limits, "a", 1, 100)
            assert first is not None and first.taken
            proxy.delay = 1.5  # later than the deadline, sooner than the connection is given up
            assert await shared.take("k", limits, "b", 1, 1000) is None and failed.count == 1
            began = time.monotonic()
            for _ in range(50):
                assert await shared.take("k", limits, "c", 1, 1000) is None
            assert failed.count == 51
            assert time.monotonic() - began < 25  # fifty deadlines would be fifty seconds
            async with asyncio.timeout(20):
                while await client.zrange(_keys("k")[1], 0, -1) != ["a"]:
                    await asyncio.sleep(0.01)
            full_at = int(await client.hget(_keys("k")[0], "tokens"))
            assert full_at - await now(client) <= 100 * MINUTE // 6000
            proxy.delay = 0.0
            async with asyncio.timeout(20):
                while (back := await shared.take("k", limits, "b", 1, 0)) is None:
                    await asyncio.sleep(0.02)
            assert back.taken and back.request_reset <= 2 * 10**9


async def test_a_caller_who_leaves_takes_nothing(redis_server: RedisServer, client: Any) -> None:
    limits = Limits(60, 6000, 2)
    async with DelayProxy(redis_server.port) as proxy:
        url = redis_server.url.replace(str(redis_server.port), str(proxy.port))
        async with quotas(url) as (shared, _):
            proxy.delay = 0.2
            asked = asyncio.create_task(shared.take("k", limits, "a", 1, 100))
            async with asyncio.timeout(20):
                while not await client.exists(_keys("k")[1]):
                    await asyncio.sleep(0.005)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(20):
                while await client.exists(_keys("k")[1]):
                    await asyncio.sleep(0.01)
            assert int(await client.hget(_keys("k")[0], "tokens")) <= await now(client)
            assert not shared._held
