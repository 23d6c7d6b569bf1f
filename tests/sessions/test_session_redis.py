"""Sessions over Redis, with the server around: two processes on one store, and a Redis that goes away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from redisserver import RedisServer
from sessionserver import read_answer, serving

from chatsvc.sessions.redis import RedisStore


async def test_two_servers_on_one_redis(redis_server: RedisServer) -> None:
    """RD-01: the second server sees the first one's turn, leaves it alone, and goes on after it with all of it."""
    async with (
        serving(RedisStore(redis_server.url, 3600), step=0.005) as one,
        serving(RedisStore(redis_server.url, 3600)) as two,
    ):
        sid = await one.session(system="S")
        async with one.http.stream(
            "POST", f"/v1/sessions/{sid}/messages", json={"content": "a", "max_tokens": 400}
        ) as r:
            part = await read_answer(r, until=2)
            refused = await two.http.post(f"/v1/sessions/{sid}/messages", json={"content": "b"})
            assert refused.status_code == 409 and refused.json()["error"]["turn_id"] == part.turn_id
            rest = await read_answer(r)
        assert rest.done
        assert (await two.turn(sid, "c", max_tokens=5)).done
        messages = (await one.read(sid))["messages"]
        assert [(m["role"], m["status"]) for m in messages] == [("user", "done"), ("assistant", "done")] * 2
        assert messages[1]["content"] == part.text + rest.text
        assert messages[2]["parent_id"] == messages[1]["id"]
        prompts = [m["usage"]["prompt_tokens"] for m in messages[1::2]]
        assert prompts[1] > prompts[0] + 400  # the whole first turn was in it


async def test_a_redis_that_restarts_breaks_no_stream(tmp_path: Path, redis_server: RedisServer) -> None:
    """RD-03: an append-only Redis is killed and started again in the middle of answers."""
    server = RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    async with serving(RedisStore(server.url, 3600), step=0.005) as app:
        sids = [await app.session() for _ in range(5)]

        async def turn(sid: str) -> None:
            assert (await app.turn(sid, max_tokens=150)).done

        turns = [asyncio.create_task(turn(sid)) for sid in sids]
        async with asyncio.timeout(10):
            while len(app.turns._turns) < 5:
                await asyncio.sleep(0.01)
        server.stop()
        away = await app.http.get(f"/v1/sessions/{sids[0]}")
        assert away.status_code == 503 and away.headers["retry-after"]
        assert (await app.http.post("/v1/sessions", json={})).status_code == 503
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        assert (await app.http.post("/v1/chat/completions", json=chat)).status_code == 200  # stateless chat goes on
        server.start()
        await asyncio.gather(*turns)
        for sid in sids:
            answer = (await app.read(sid))["messages"][1]
            assert answer["status"] == "done" and answer["usage"]["completion_tokens"] == 150
    server.stop()
