"""Sessions over Redis, with the server around: two processes on one store, and a Redis that goes away."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import pytest
from redis.asyncio import SSLConnection
from redisserver import DelayProxy, MakeRedis, RedisServer
from sessionserver import Running, events, read_answer, serving

from chatsvc.errors import ConfigError
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.watched import WatchedStore


async def test_rd_01_two_servers_on_one_redis(redis_server: RedisServer) -> None:
    """The second server sees the first one's turn, leaves it alone, and goes on after it with all of it."""
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


async def test_rd_03_a_redis_that_restarts_breaks_no_stream(own_redis: MakeRedis) -> None:
    """An append-only Redis is killed and started again in the middle of answers."""
    server = own_redis("--appendonly", "yes", "--appendfsync", "always")
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


class Pace:
    """How long a stream is silent at most, from reader's side."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.text = ""
        self.done = False

    async def read(self, app: Running, sid: str, **fields: Any) -> None:
        body = {"content": "x", **fields}
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            assert r.status_code == 200, await r.aread()
            last = 0.0
            async for _, data in events(r):
                if data == "[DONE]":
                    self.done = True
                    break
                choices = json.loads(data)["choices"]
                if not choices:
                    continue
                now = time.monotonic()
                self.longest = max(self.longest, now - last if last else 0.0)
                last = now
                self.text += choices[0]["delta"].get("content", "")
                if choices[0]["finish_reason"]:
                    last = 0.0


@pytest.mark.parametrize("trouble", ["slow", "hung", "full", "late"])
async def test_rd_03_a_redis_in_trouble_does_not_slow_a_stream(own_redis: MakeRedis, trouble: str) -> None:
    """The text goes on while Redis is slow, answers nothing, refuses writes, or answers what it was asked long ago."""
    server = own_redis()
    server.start()
    async with DelayProxy(server.port) as proxy:
        store = WatchedStore(
            RedisStore(f"redis://127.0.0.1:{proxy.port}/0", 3600), failed := itertools.count().__next__
        )
        async with serving(store, step=0.01) as app:
            sids = [await app.session() for _ in range(3)]
            paces = [Pace() for _ in sids]
            reading = [
                asyncio.create_task(pace.read(app, sid, max_tokens=600)) for pace, sid in zip(paces, sids, strict=True)
            ]
            async with asyncio.timeout(20):
                while not all(pace.text for pace in paces):
                    await asyncio.sleep(0.01)
            if trouble == "slow":
                proxy.delay = 1.0
            elif trouble == "late":
                proxy.delay = 2.5  # longer than a command waits: its reply comes when nobody expects it
            elif trouble == "hung":
                proxy.hang = True
            else:
                await config(server, "maxmemory", "1")
            async with asyncio.timeout(30):
                while app.engine.num_requests:
                    await asyncio.sleep(0.05)
            if trouble != "slow":
                assert failed() > 0, "reported and counted"
            proxy.delay, proxy.hang = 0.0, False
            await config(server, "maxmemory", "0")
            await asyncio.gather(*reading)
            async with asyncio.timeout(20):
                while any(app.turns.running(("", sid)) for sid in sids):
                    await asyncio.sleep(0.05)
            for pace, sid in zip(paces, sids, strict=True):
                answer = (await until_read(app, sid))["messages"][1]
                assert (answer["status"], answer["content"]) == ("done", pace.text)
                assert pace.longest < 1.0, f"{trouble}: silent for {pace.longest:.2f} s"


async def config(server: RedisServer, name: str, value: str) -> None:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(server.url) as client:
        await client.config_set(name, value)


async def until_read(app: Running, sid: str) -> dict[str, Any]:
    """The session, as soon as the store is asked again."""
    async with asyncio.timeout(20):
        while (got := await app.http.get(f"/v1/sessions/{sid}")).status_code == 503:
            await asyncio.sleep(0.05)
    return dict(got.json())


async def test_rd_03_a_redis_that_lost_its_memory_does_not_stop_a_stream(own_redis: MakeRedis) -> None:
    """It came back empty (no persistence): the answer is told to its end, and there is no session any more."""
    server = own_redis()
    server.start()
    async with serving(RedisStore(server.url, 3600), step=0.01) as app:
        sid = await app.session()
        turn = asyncio.create_task(app.turn(sid, max_tokens=250))
        async with asyncio.timeout(20):
            while not app.turns._turns:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        server.stop()
        server.start()
        answer = await turn
        assert answer.done and answer.usage is not None and answer.usage["completion_tokens"] == 250
        assert (await app.http.get(f"/v1/sessions/{sid}")).status_code == 404


async def test_rd_04_an_answer_that_lasts_longer_than_the_life_of_its_session(redis_server: RedisServer) -> None:
    async with serving(RedisStore(redis_server.url, 2.0), step=0.02) as app:
        sid = await app.session()
        assert (await app.turn(sid, max_tokens=200)).done  # four seconds
        assert (await app.read(sid))["messages"][1]["status"] == "done"
        await asyncio.sleep(2.2)
        assert (await app.http.get(f"/v1/sessions/{sid}")).status_code == 404


async def test_rd_06_dropped_and_asked_again_at_once(redis_server: RedisServer) -> None:
    async with serving(RedisStore(redis_server.url, 3600), step=0.005) as app:
        sid = await app.session()
        for i in range(15):
            body = {"content": f"q{i}", "max_tokens": 2000}
            async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
                assert r.status_code == 200, await r.aread()
                await read_answer(r, until=1)
            while (turn := app.turns.running(("", sid))) is not None and turn.readers:
                await asyncio.sleep(0.001)
        assert (await app.turn(sid, "end", max_tokens=5)).done
        messages = (await app.read(sid))["messages"]
        assert [m["content"] for m in messages[::2]] == [*(f"q{i}" for i in range(15)), "end"]
        assert [m["status"] for m in messages[1::2]] == ["interrupted"] * 15 + ["done"]


async def test_rd_05_every_key_of_a_turn_has_a_life(redis_server: RedisServer) -> None:
    """The log and the inboxes too."""
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(redis_server.url, decode_responses=True) as client:
        await client.flushall()
        async with (
            serving(RedisStore(redis_server.url, 3600), step=0.01) as one,
            serving(RedisStore(redis_server.url, 3600)) as two,
        ):
            sid = await one.session()
            turn = asyncio.create_task(one.turn(sid, max_tokens=200))
            async with asyncio.timeout(20):
                while not await client.keys("*:log-*"):
                    await asyncio.sleep(0.01)
            async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
                await read_answer(r, until=20)
            keys = await client.keys("*")
            kinds = {key.split(":")[-1].split("-")[0] for key in keys}
            assert kinds == {"meta", "msgs", "sessions", "alive", "log", "inbox", "{running}"}
            for key in keys:
                assert 0 < await client.pttl(key) <= 3600_000, key
            assert (await turn).done


async def test_a_url_with_a_password_and_tls_passes_through(own_redis: MakeRedis) -> None:
    server = own_redis("--requirepass", "p@ss word")
    server.start()
    right = RedisStore(server.url.replace("redis://", "redis://:p%40ss%20word@"), 60)
    wrong = RedisStore(server.url.replace("redis://", "redis://:secret@"), 60)
    await right.open()
    await right.ping()
    with pytest.raises(ConfigError) as refused:
        await wrong.open()
    assert "password" in str(refused.value) and "secret" not in str(refused.value)
    for store in (right, wrong):
        await store.close()
    tls = RedisStore("rediss://user:word@h:6390/2?ssl_cert_reqs=none&ssl_ca_path=/ca", 60)
    for pool in (tls._pool, tls._relay._blocking.connection_pool):
        made = pool.connection_kwargs
        assert issubclass(pool.connection_class, SSLConnection)
        assert (made["username"], made["password"], made["db"]) == ("user", "word", 2)
        assert (made["ssl_cert_reqs"], made["ssl_ca_path"]) == ("none", "/ca")
    await tls.close()


async def refusal(url: str) -> str:
    """Why a store with this URL does not start."""
    with pytest.raises(ConfigError, match=r"^--session-store") as refused:
        store = RedisStore(url, 60)
        try:
            await store.open()
        finally:
            await store.close()
    return str(refused.value)


@pytest.mark.parametrize("path", ["5x", "x", "-1", "1.5", "1/2", "%35x", "5/", "s3cret@h:6379/0"])
async def test_a_path_that_is_no_database_is_refused(path: str) -> None:
    """redis-py takes it for database 0, or for 12. Part of a password with ``/`` is in it and is not repeated."""
    for scheme in ("redis", "rediss"):
        said = await refusal(f"{scheme}://127.0.0.1:6379/{path}")
        assert "the number of a database" in said and "s3cret" not in said and path not in said.split()


@pytest.mark.parametrize("url", ["unix://", "unix:///", "unix://run/redis.sock"])
async def test_a_socket_needs_an_absolute_path(url: str) -> None:
    assert "the absolute path of a socket" in await refusal(url)


@pytest.mark.parametrize(
    ("url", "database"),
    [("redis://h", None), ("redis://h/", None), ("redis://h/15", 15), ("rediss://h/%37", 7), ("redis://h/?db=3", 3),
     ("unix:///run/redis.sock?db=2", 2), ("unix://user@/run/redis.sock", None)],
)  # fmt: skip
async def test_databases_that_can_be_meant(url: str, database: int | None) -> None:
    store = RedisStore(url, 60)
    assert store._pool.connection_kwargs.get("db") == database
    await store.close()


async def test_a_database_that_the_server_does_not_have_is_refused(
    redis_server: RedisServer, own_redis: MakeRedis
) -> None:
    host = redis_server.url.removesuffix("/0")
    for url, name in ((f"{host}/99", "99"), (f"{host}?db=-1", "-1")):
        assert f"the Redis server has no database {name}: " in await refusal(url)
    cluster = own_redis("--cluster-enabled", "yes")
    cluster.start()
    assert "has no database 1: " in await refusal(cluster.url.removesuffix("0") + "1")


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("s3cret@h/0?foo=1", ": there is no option foo."),
        ("s3cret@h/0?db=s3cret", ": its option db is wrong."),
        ("s?s3cret=1@h/0", "."),  # the password is "s?s3cret=1"
        ("1?s3cret=1@h/0", "."),
    ],
)
async def test_the_option_that_cannot_be_read_is_named_and_no_password(rest: str, reason: str) -> None:
    said = await refusal(f"redis://:{rest}")
    assert said.endswith(f"cannot be read{reason}") and "s3cret" not in said
