"""Many users, two servers, and a Redis that is killed again and again: what was told is what is stored."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest
from redisserver import MakeRedis
from sessionserver import Answer, Running, read_answer, serving

import chatsvc.api.replica as replica
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.watched import WatchedStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

USERS = 10
SECONDS = 15.0  # of kills, at least
CALM = 5.0  # after them
CANNOT = {409, 503}  # a turn is running there; Redis is away


class User:
    """Has one session. Asks, leaves in the middle, joins again through either server, cancels now and then."""

    def __init__(self, apps: list[Running], rng: random.Random, seen: Counter[str]) -> None:
        self.apps = apps
        self.rng = rng
        self.seen = seen
        self.sid = ""

    @property
    def app(self) -> Running:
        return self.rng.choice(self.apps)

    async def live(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            if not self.sid:
                made = await self.app.http.post("/v1/sessions", json={})
                assert made.status_code in (201, 503)
                self.sid = made.json().get("id", "")
            elif (answer := await self.ask()) is not None:
                await self.follow(answer)
                await self.check(answer)
                continue
            await asyncio.sleep(0.2)

    async def ask(self) -> Answer | None:
        body = {"content": "q", "max_tokens": self.rng.choice([5, 40, 150]), "temperature": 1.0}
        async with self.app.http.stream("POST", f"/v1/sessions/{self.sid}/messages", json=body) as r:
            if r.status_code != 200:
                assert r.status_code in CANNOT, await r.aread()
                return None
            return await read_answer(r, until=None if self.rng.random() < 0.3 else self.rng.randrange(1, 40))

    async def follow(self, answer: Answer) -> None:
        """Adds what is read to ``answer``."""
        while answer.ids and not answer.done and answer.error is None and self.rng.random() < 0.8:
            if self.rng.random() < 0.1:
                assert (await self.app.http.post(f"/v1/sessions/{self.sid}/cancel")).status_code in (200, 503)
            url, last = f"/v1/sessions/{self.sid}/stream", answer.ids[-1]
            async with self.app.http.stream("GET", url, headers={"Last-Event-ID": last}) as r:
                if r.status_code == 204:
                    return
                if r.status_code == 200:
                    until = int(last.rsplit(":", 1)[1]) + self.rng.randrange(1, 60)
                    more = await read_answer(r, until=until)
                    assert not more.ids or more.turn_id == answer.turn_id, "nobody else asks in this session"
                    answer.go_on(more)
                    self.seen["joined"] += 1
                    self.seen["snapshots"] += more.snapshot
                else:
                    assert r.status_code == 503, r.status_code
            await asyncio.sleep(0.02)

    async def check(self, answer: Answer) -> None:
        if not answer.ids:
            return
        session = await self.session()
        messages = session["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert sum(m["status"] == "running" for m in messages) <= 1
        message = next(m for m in messages if m["id"] == answer.turn_id)  # accepted, so it is there
        if answer.done:
            assert message["content"] == answer.text and message["status"] in ("done", "cancelled")
        elif message["status"] != "running":
            assert message["content"].startswith(answer.text)
        self.seen["turns"] += 1

    async def session(self) -> dict[str, Any]:
        async with asyncio.timeout(30):
            while (got := await self.app.http.get(f"/v1/sessions/{self.sid}")).status_code == 503:
                await asyncio.sleep(0.1)
        assert got.status_code == 200, got.text
        return dict(got.json())


async def test_rd_01_rd_03_rd_06_nothing_is_lost_doubled_or_mixed(
    own_redis: MakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 20)
    rng, seen = random.Random(7), Counter[str]()
    server = own_redis("--appendonly", "yes", "--appendfsync", "always")
    server.start()
    stores = [WatchedStore(RedisStore(server.url, 3600, lease=3.0), lambda: seen.update(["failed"])) for _ in range(2)]
    async with serving(stores[0], step=0.005) as one, serving(stores[1], step=0.005) as two:
        apps, until, ended = [one, two], time.monotonic() + SECONDS, asyncio.Event()
        async with asyncio.TaskGroup() as users:
            for i in range(USERS):
                users.create_task(User(apps, random.Random(i), seen).live(ended))
            # On a busy machine it takes longer until enough has been seen.
            while time.monotonic() < until or min(seen["turns"], seen["joined"]) <= 20 or not seen["failed"]:
                await asyncio.sleep(rng.uniform(1, 4))
                server.stop()
                await asyncio.sleep(rng.choice([0.05, 0.5, 3.5]))  # the last: longer than a lease
                server.start()
            await asyncio.sleep(CALM)
            ended.set()
        assert seen["turns"] > 20 and seen["joined"] > 20 and seen["failed"] > 0, seen
        for app in apps:
            neighbours = app.turns._neighbours
            assert neighbours is not None
            async with asyncio.timeout(20):
                while app.turns._turns or neighbours._own or neighbours._joined:
                    await asyncio.sleep(0.05)
            assert app.engine.scheduler.manager.pool.num_used == 0
