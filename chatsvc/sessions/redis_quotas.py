"""Quotas in Redis, for all processes together: two buckets and the places of each key.

A bucket is one number, as in :mod:`chatsvc.api.quota` (the generic cell rate algorithm): the moment at which it is full
again. One script asks for everything at once and takes all or nothing, by the clock of Redis, so processes need not
agree on the time. Whole microseconds: a Lua number holds them exactly.

A place is a lease. The process that runs the answer renews it; one that was killed loses its places ``lease`` seconds
later. Keys: ``chatsvc:{quota-<digest>}:use`` (a hash) and ``...:places`` (a sorted set: place, end of its lease). Both
go by themselves when they say nothing any more. Commands of Redis 6.2.

A Redis that does not answer within ``deadline`` is not asked again until it answers the heartbeat, so nobody waits for
it twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff  # type: ignore[attr-defined]
from redis.exceptions import RedisError

from chatsvc.errors import StoreError
from chatsvc.sessions.guard import Guard
from chatsvc.sessions.quotas import Limits, Verdict
from chatsvc.sessions.redis_connect import AWAY, pool_of
from chatsvc.tasks import end

log = logging.getLogger(__name__)

LEASE = 10.0
HEARTBEATS = 4  # in a lease
DEADLINE = 0.5
AGAIN = 1.0  # seconds between attempts while Redis is away
COMMAND_TIMEOUT = 2.0
MAX_CONNECTIONS = 8
MOST_SETTLING = 1000  # at a time; what is more is forgotten
MICROSECOND = 1000  # nanoseconds

_COMMON = """
local minute = 60000000
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local function cost(limit, amount)
  if limit == 0 then return 0 end
  local whole = math.floor(math.abs(amount) * minute / limit)
  return amount < 0 and -whole or whole
end
local function full_at(name) return math.max(now, tonumber(redis.call('HGET', KEYS[1], name) or '0')) end
local function keep(name, limit, at)
  if limit > 0 then redis.call('HSET', KEYS[1], name, string.format('%.0f', at)) end
end
local function forget_later(a, b)
  redis.call('PEXPIRE', KEYS[1], math.ceil((math.max(a, b) - now) / 1000) + 1000)
end
local place, lease = ARGV[1], tonumber(ARGV[2])
local rpm, requests, tpm, tokens = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local function occupy()
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease * 1000), place)
  redis.call('PEXPIRE', KEYS[2], lease)
end
"""

TAKE = (
    _COMMON
    + """
local most, busy = tonumber(ARGV[7]), 0
if place ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
  if most > 0 and redis.call('ZCARD', KEYS[2]) >= most then busy = 1 end
end
local r, t = full_at('requests'), full_at('tokens')
local function wait(at, limit, amount)
  if limit == 0 then return 0 end
  return math.max(0, at - now + cost(limit, math.min(amount, limit)) - minute)
end
local r_wait, t_wait = wait(r, rpm, requests), wait(t, tpm, tokens)
if requests == 0 then r_wait = 0 end
if busy == 0 and r_wait == 0 and t_wait == 0 then
  r, t = r + cost(rpm, requests), t + cost(tpm, tokens)
  keep('requests', rpm, r)
  keep('tokens', tpm, t)
  forget_later(r, t)
  if place ~= '' then occupy() end
end
return {busy, r_wait, t_wait, r - now, t - now}
"""
)
"""Arguments: place or empty, lease in ms, requests a minute (0: no limit) and how many, the same of tokens, most places
(0: no limit). Waits and resets in microseconds; nothing was taken when one of the first three is not 0."""

SETTLE = (
    _COMMON
    + """
local r, t = full_at('requests') + cost(rpm, requests), full_at('tokens') + cost(tpm, tokens)
keep('requests', rpm, r)
keep('tokens', tpm, t)
forget_later(r, t)
if place ~= '' then redis.call('ZREM', KEYS[2], place) end
return 1
"""
)
"""Arguments 1 to 6 as of TAKE. Takes whatever the buckets hold, gives back negative amounts, leaves the place."""

RENEW = """
local clock = redis.call('TIME')
local ends = string.format('%.0f', clock[1] * 1000000 + clock[2] + ARGV[1] * 1000)
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], ends, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
"""
"""Arguments: lease in ms, then places, which are there again if they were not."""


class RedisQuotas:
    """See :class:`chatsvc.sessions.quotas.SharedQuotas`.

    Args:
        url: of the session store. Raises: ConfigError.
        failed: called for every request that could not be judged here.
        lease: seconds after which the places of a silent process are free.
        deadline: seconds that a request waits for Redis.
    """

    def __init__(
        self, url: str, failed: Callable[[], None], *, lease: float = LEASE, deadline: float = DEADLINE
    ) -> None:
        self._pool = pool_of(
            aioredis.BlockingConnectionPool,
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=COMMAND_TIMEOUT,
            socket_timeout=COMMAND_TIMEOUT,
            retry=Retry(NoBackoff(), 0),  # what is taken twice is not the same as what is taken once
        )
        self._client: Any = aioredis.Redis.from_pool(self._pool)  # type: ignore[attr-defined]
        self._take = self._client.register_script(TAKE)
        self._settle = self._client.register_script(SETTLE)
        self._renew = self._client.register_script(RENEW)
        self._guard = Guard("Redis (quotas)", deadline, (RedisError, *AWAY), AWAY)
        self._failed = failed
        self._lease = lease
        self._held: dict[str, set[str]] = {}  # account -> places
        self._away = asyncio.Event()
        self._settling: set[asyncio.Task[None]] = set()
        self._heart: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._heart = asyncio.create_task(self._heartbeat())

    async def close(self) -> None:
        if self._heart is not None:
            await end(self._heart)
            self._heart = None
        if self._settling:
            await asyncio.wait(self._settling, timeout=COMMAND_TIMEOUT)
        await self._guard.drain()
        await self._client.aclose()
        await self._pool.aclose()

    async def take(self, key: str, limits: Limits, place: str, requests: int, tokens: int) -> Verdict | None:
        if self._away.is_set():
            self._failed()
            return None
        late = asyncio.Event()
        most = limits.max_concurrent or 0
        try:
            verdict = await self._guard.run(self._ask(late, key, limits, place, requests, tokens, most))
        except StoreError as error:
            self._lost(error)
            self._failed()
            return None
        finally:
            late.set()
        if place and verdict.taken:
            self.hold(key, place)
        return verdict

    def hold(self, key: str, place: str) -> None:
        self._held.setdefault(key, set()).add(place)

    def settle(self, key: str, limits: Limits, place: str, requests: int, tokens: int) -> None:
        if place and (held := self._held.get(key)) is not None:
            held.discard(place)
            if not held:
                del self._held[key]
        if not self._away.is_set() and len(self._settling) < MOST_SETTLING:
            task = asyncio.create_task(self._quietly(self._put(key, limits, place, requests, tokens)))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    # -- inside ------------------------------------------------------------------------------------------------

    async def _ask(
        self, late: asyncio.Event, key: str, limits: Limits, place: str, requests: int, tokens: int, most: int
    ) -> Verdict:
        reply = await self._take(keys=_keys(key), args=[*self._arguments(limits, place, requests, tokens), most])
        verdict = Verdict(bool(reply[0]), *(int(x) * MICROSECOND for x in reply[1:]))
        if late.is_set() and verdict.taken:  # nobody waits for this answer any more
            await self._put(key, limits, place, -requests, -tokens)
        return verdict

    async def _put(self, key: str, limits: Limits, place: str, requests: int, tokens: int) -> None:
        await self._settle(keys=_keys(key), args=self._arguments(limits, place, requests, tokens))

    def _arguments(self, limits: Limits, place: str, requests: int, tokens: int) -> list[str | int]:
        rates = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
        return [place, int(self._lease * 1000), rates[0], requests, rates[1], tokens]

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._guard.run(work)
        except StoreError as error:
            self._lost(error)

    def _lost(self, error: StoreError) -> None:
        if error.away and not self._away.is_set():
            log.warning("Redis does not answer: until it does, this process counts quotas for itself")
            self._away.set()

    async def _heartbeat(self) -> None:
        """Renews the places; asks whether Redis is back, and tells it of the places that were taken meanwhile."""
        while True:
            if self._away.is_set():
                await asyncio.sleep(AGAIN)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._away.wait(), self._lease / HEARTBEATS)
                    continue
            try:
                await self._guard.run(self._beat())
            except StoreError as error:
                self._lost(error)
                continue
            if self._away.is_set():
                self._away.clear()
                log.info("Redis answers again: quotas are counted for all processes together")

    async def _beat(self) -> None:
        held = {key: list(places) for key, places in self._held.items()}
        if not held:
            await self._client.ping()
        for key, places in held.items():
            await self._renew(keys=[_keys(key)[1]], args=[int(self._lease * 1000), *places])
            # Those that were left meanwhile must not be there again for a whole lease.
            if gone := [p for p in places if p not in self._held.get(key, ())]:
                await self._client.zrem(_keys(key)[1], *gone)


def _keys(account: str) -> list[str]:
    """The account's name is the digest of an API key: it stays out of Redis, too."""
    tag = f"chatsvc:{{quota-{hashlib.blake2b(account.encode(), digest_size=16).hexdigest()}}}"
    return [f"{tag}:use", f"{tag}:places"]
