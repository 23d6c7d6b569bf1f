"""A server that still takes its turn for running when the store has its end, and another server that runs the next one.

So it is while the store's reply is on its way or lost, and when the first one's lease has run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redisserver import MakeRedis, RedisServer
from sessionserver import Answer, Running, serving
from test_two_processes import begin, join, seen, stored

import chatsvc.sessions.redis as redis_store
from chatsvc.errors import StoreError
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.redis import RedisStore

TROUBLES = ["late", "lost", "dead"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds is no Redis that is away."""
    monkeypatch.setattr(redis_store, "COMMAND_TIMEOUT", 30.0)
    monkeypatch.setattr(redis_store, "DEADLINE", 40.0)


@dataclass
class Stale:
    """``old`` runs in ``one`` as far as that knows; the store has its end."""

    one: Running
    two: Running
    sid: str
    old: Answer
    heal: Callable[[], None]

    async def statuses(self, app: Running) -> list[str]:
        return [m["status"] for m in (await app.read(self.sid))["messages"][1::2]]

    async def rest(self) -> None:
        """What still runs is cancelled, as its own server sees it."""
        self.heal()
        await self.one.settled(self.sid)
        await self.two.http.post(f"/v1/sessions/{self.sid}/cancel")


@asynccontextmanager
async def stale(redis: RedisServer, trouble: str) -> AsyncIterator[Stale]:
    """``late``: the store has taken the end, its reply comes when the test is through. ``lost``: it does not come, and
    is asked for again and again. ``dead``: the other server thinks this one dead."""
    async with (
        serving(RedisStore(redis.url, 3600, lease=60), step=0.01) as one,
        serving(RedisStore(redis.url, 3600, lease=60), step=0.01) as two,
    ):
        update, healed = one.store.update_message, asyncio.Event()

        async def deaf(tenant: str, sid: str, message: Message) -> None:
            if trouble == "dead" and not healed.is_set():
                return
            await update(tenant, sid, message)
            if trouble == "late" and message.status != "running":
                await healed.wait()
            elif trouble == "lost" and not healed.is_set():
                raise StoreError("The reply is lost.")

        one.store.update_message = deaf  # type: ignore[method-assign]
        sid = await one.session()
        old = await begin(one, sid, until=5, max_tokens=4000 if trouble == "dead" else 20)
        if trouble == "dead":
            two.store._dead = _anybody  # type: ignore[attr-defined]
            await two.read(sid)
            del two.store._dead  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            while (await stored(two, sid))["status"] == "running":
                await asyncio.sleep(0.02)
            while (turn := one.turns.running(("", sid))) is not None and turn.readers:
                await asyncio.sleep(0.01)
        assert turn is not None and turn.id == old.turn_id
        try:
            yield Stale(one, two, sid, old, healed.set)
        finally:
            healed.set()


async def _anybody(owner: str) -> bool:
    return True


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_joining_finds_the_turn_that_runs_elsewhere(redis_server: RedisServer, trouble: str) -> None:
    async with stale(redis_server, trouble) as s:
        new = await begin(s.two, s.sid, until=5, max_tokens=4000)
        more = await join(s.one, s.sid, new.ids[-1], until=50)
        again = await join(s.one, s.sid, until=30)  # as a page does that has been loaded anew
        assert more is not None and again is not None
        assert more.turn_id == again.turn_id == new.turn_id != s.old.turn_id
        assert seen(more) > seen(new)
        old = await join(s.one, s.sid, s.old.ids[-1], until=20)  # whoever reads the old one has it to its end
        assert old is not None and old.turn_id == s.old.turn_id
        await s.rest()
        messages = (await s.one.read(s.sid))["messages"]
        assert messages[3]["content"].startswith(new.text + more.text)
        assert messages[3]["content"].startswith(again.text)
        if trouble != "dead":
            assert messages[1]["content"] == s.old.text + old.text


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_every_server_shows_what_the_store_has(redis_server: RedisServer, trouble: str) -> None:
    ended = "interrupted" if trouble == "dead" else "done"
    async with stale(redis_server, trouble) as s:
        assert await s.statuses(s.one) == [ended]
        assert await join(s.one, s.sid) is None
        assert await join(s.one, s.sid, "msg_another:0:5") is None
        await begin(s.two, s.sid, until=5, max_tokens=4000)
        assert await s.statuses(s.one) == await s.statuses(s.two) == [ended, "running"]
        patched = await s.one.http.patch(f"/v1/sessions/{s.sid}", json={"title": "t"})
        assert [m["status"] for m in patched.json()["messages"][1::2]] == [ended, "running"]
        await s.rest()


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_cancelling_ends_the_turn_that_runs_elsewhere(redis_server: RedisServer, trouble: str) -> None:
    async with stale(redis_server, trouble) as s:
        new = await begin(s.two, s.sid, until=5, max_tokens=4000)
        cancelled = await s.one.http.post(f"/v1/sessions/{s.sid}/cancel")
        assert cancelled.json() == {"id": s.sid, "turn_id": new.turn_id, "cancelled": True}
        await s.two.idle()
        assert (await s.statuses(s.two))[1] == "cancelled"
        await s.one.idle()  # the old one is not made any further either


async def test_deleting_ends_the_turn_that_runs_elsewhere(redis_server: RedisServer) -> None:
    async with stale(redis_server, "late") as s:
        await begin(s.two, s.sid, until=5, max_tokens=4000)
        assert (await s.one.http.delete(f"/v1/sessions/{s.sid}")).status_code == 200
        await s.two.idle()


@pytest.mark.parametrize("trouble", ["late", "dead"])
async def test_a_new_turn_waits_for_the_end_of_the_old_one(redis_server: RedisServer, trouble: str) -> None:
    """A server has one turn of a session at a time, so that it forgets none when it stops."""
    async with stale(redis_server, trouble) as s:
        appended, append = asyncio.Event(), s.one.store.append
        asked, get = asyncio.Event(), s.one.store.get

        async def watched_append(*args: Any) -> None:
            appended.set()
            await append(*args)

        async def watched_get(tenant: str, sid: str) -> Session | None:
            asked.set()
            return await get(tenant, sid)

        s.one.store.append, s.one.store.get = watched_append, watched_get  # type: ignore[method-assign]
        new = asyncio.create_task(s.one.turn(s.sid, "next", max_tokens=5))
        await asyncio.wait_for(asked.wait(), 20)
        await asyncio.sleep(0.3)
        assert trouble == "dead" or not appended.is_set()
        s.heal()
        assert (await new).done
        await s.one.settled(s.sid)
        assert not s.one.turns._turns
        await s.one.idle()


async def test_a_store_that_is_away_is_no_reason_to_tell_another_turn(own_redis: MakeRedis) -> None:
    redis = own_redis("--appendonly", "yes", "--appendfsync", "always")
    redis.start()
    async with serving(RedisStore(redis.url, 3600), step=0.01) as app:
        sid = await app.session()
        part = await begin(app, sid, until=5, max_tokens=4000)
        redis.stop()
        away = await app.http.get(f"/v1/sessions/{sid}/stream", headers={"Last-Event-ID": "msg_another:0:5"})
        assert away.status_code == 503 and away.headers["retry-after"]
        more = await join(app, sid, part.ids[-1], until=50)  # what this server has is told, store or not
        again = await join(app, sid, until=20)
        assert more is not None and again is not None
        assert more.turn_id == again.turn_id == part.turn_id and seen(more) > seen(part)
        redis.start()
        async with asyncio.timeout(20):
            while (await app.http.post(f"/v1/sessions/{sid}/cancel")).status_code == 503:
                await asyncio.sleep(0.05)
        content = (await app.read(sid))["messages"][1]["content"]
        assert content.startswith(part.text + more.text) and content.startswith(again.text)


async def test_a_cancel_ends_the_turn_here_when_the_store_is_away(redis_server: RedisServer) -> None:
    async with serving(RedisStore(redis_server.url, 3600), step=0.01) as app:
        sid = await app.session()
        await begin(app, sid, until=5, max_tokens=4000)
        get = app.store.get

        async def away(*args: Any) -> None:
            raise StoreError("The store is away.")

        app.store.get = away  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await app.turns.cancel(("", sid))
        await app.idle()
        app.store.get = get  # type: ignore[method-assign]
        assert (await stored(app, sid))["status"] in ("running", "cancelled")
