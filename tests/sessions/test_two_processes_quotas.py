"""A key's quotas over real servers on one Redis: together, with one of them killed, with Redis away and back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Process, metric
from redisserver import NO_REDIS, RedisServer, find_redis

pytestmark = pytest.mark.timeout(180)

KEY = "sk-test-" + "0123456789abcdef" * 3
BODY = {"prompt": "hi", "max_tokens": 2, "ignore_eos": True}
# A busy machine is no Redis that is away.
PATIENT = "from chatsvc.sessions.redis_quotas import RedisQuotas as Q; Q.__init__.__kwdefaults__['deadline'] = 30.0; "
LONG = {**BODY, "max_tokens": 4000, "stream": True}


@asynccontextmanager
async def servers(folder: Path, engine: str = "thread", **limits: int) -> AsyncIterator[tuple[Any, ...]]:
    """(Redis, two processes, a client of each)."""
    if find_redis() is None:
        pytest.skip(NO_REDIS)
    lines = ["[[key]]", 'name = "ann"', f'sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"']
    (folder / "keys.toml").write_text("\n".join([*lines, *(f"{k} = {v}" for k, v in limits.items())]))
    flags = ["--api-key-file", "keys.toml", "--engine", engine]
    flags += ["--simulated-step-ms", "20"]
    with RedisServer(folder) as redis:
        flags += ["--session-store", redis.url]
        made = [Process(folder, name, *flags, before=PATIENT) for name in ("one", "two")]
        try:
            for process in made:
                await asyncio.to_thread(process.wait)
            async with made[0].client() as a, made[1].client() as b:
                for http in (a, b):
                    http.headers["Authorization"] = f"Bearer {KEY}"
                yield redis, *made, a, b
        finally:
            for process in made:
                process.kill()


async def ask(http: httpx.AsyncClient, body: dict[str, Any] = BODY) -> httpx.Response:
    return await http.post("/v1/completions", json=body)


async def read(http: httpx.AsyncClient, began: asyncio.Event, told: list[str]) -> int:
    """A long stream to its end, or to that of its connection; returns the status."""
    try:
        async with http.stream("POST", "/v1/completions", json=LONG) as response:
            async for line in response.aiter_lines():
                told.append(line)
                began.set()
            began.set()
            return response.status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize("engine", ["thread", "process"])
async def test_requests_are_counted_together(tmp_path: Path, engine: str) -> None:
    async with servers(tmp_path, engine, requests_per_minute=7) as (_, _, _, a, b):
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(http) for http in [a, b] * 10))
        refilled = int((time.monotonic() - began) * 7 / 60) + 1  # at most
        counts = Counter(r.status_code for r in answers)
        assert 7 <= counts[200] <= 7 + refilled and counts[200] + counts[429] == 20
        refused = next(r for r in answers if r.status_code == 429)
        assert refused.headers["x-ratelimit-limit-requests"] == "7" and int(refused.headers["retry-after"]) <= 9
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for http in (a, b):
            assert await metric(http, "quota_fallbacks_total") == 0


async def test_tokens_of_answers_are_counted_together(tmp_path: Path) -> None:
    async with servers(tmp_path, tokens_per_minute=100) as (_, _, _, a, b):
        first = await ask(a, {**BODY, "max_tokens": 300})
        assert first.status_code == 200
        async with asyncio.timeout(20):  # what was generated is told a moment after the end
            while (second := await ask(b)).status_code == 200:
                await asyncio.sleep(0.02)
        assert second.status_code == 429 and int(second.headers["retry-after"]) > 60
        assert second.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_places_are_shared_and_a_killed_process_frees_its_own(tmp_path: Path) -> None:
    async with servers(tmp_path, max_concurrent=3) as (_, one, _, a, b):
        streams = []
        for http in (a, a, b):
            began: asyncio.Event = asyncio.Event()
            streams.append(asyncio.create_task(read(http, began, [])))
            await asyncio.wait_for(began.wait(), 20)
        assert [(await ask(http)).status_code for http in (a, b)] == [429, 429]
        await asyncio.to_thread(one.kill)
        assert await asyncio.gather(*streams[:2]) == [0, 0]
        assert (await ask(b)).status_code == 429  # nobody knows yet
        async with asyncio.timeout(30):
            while (await ask(b)).status_code == 429:
                await asyncio.sleep(0.1)
        streams[2].cancel()
        await asyncio.gather(streams[2], return_exceptions=True)
        assert await metric(b, "quota_fallbacks_total") == 0


async def test_without_redis_every_process_goes_by_its_own_count_and_no_stream_stops(tmp_path: Path) -> None:
    async with servers(tmp_path, max_concurrent=2) as (redis, _, _, a, b):
        told: list[str] = []
        began: asyncio.Event = asyncio.Event()
        stream = asyncio.create_task(read(a, began, told))
        await asyncio.wait_for(began.wait(), 20)
        redis.stop()
        assert [(await ask(http)).status_code for http in (a, b)] == [200, 200]
        more = [asyncio.Event(), asyncio.Event(), asyncio.Event()]
        running = [asyncio.create_task(read(http, e, [])) for http, e in zip((a, b, b), more, strict=True)]
        await asyncio.wait_for(asyncio.gather(*(e.wait() for e in more)), 20)
        assert [(await ask(http)).status_code for http in (a, b)] == [429, 429]  # each has two of its own
        assert await metric(a, "quota_fallbacks_total") > 0 and await metric(b, "quota_fallbacks_total") > 0
        seen = len(told)
        async with asyncio.timeout(20):
            while len(told) < seen + 20:
                await asyncio.sleep(0.01)
        redis.start()
        for http in (a, b):  # together again: four run and two may
            async with asyncio.timeout(30):
                while True:
                    before = await metric(http, "quota_fallbacks_total")
                    answer = await ask(http)
                    if await metric(http, "quota_fallbacks_total") == before:
                        break
                    await asyncio.sleep(0.1)
            assert answer.status_code == 429
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)
        assert (await ask(b)).status_code == 429  # a's two are known here
        assert not stream.done()
        for task in (stream, running[0]):
            task.cancel()
        await asyncio.gather(stream, running[0], return_exceptions=True)
        async with asyncio.timeout(30):
            while (await ask(b)).status_code != 200:
                await asyncio.sleep(0.05)
