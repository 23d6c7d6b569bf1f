"""Two servers on one Redis: an answer that one writes is read, joined again and cancelled through the other."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as aioredis
from redisserver import MakeRedis, RedisServer
from sessionserver import Answer, Running, read_answer, serving, text_side

import chatsvc.api.neighbours as neighbours
import chatsvc.api.replica as replica
from chatsvc.runtime.simulated import hashed_token
from chatsvc.sessions.redis import RedisStore


@asynccontextmanager
async def pair(server: RedisServer, **kwargs: Any) -> AsyncIterator[tuple[Running, Running]]:
    """The first one writes slowly, about 100 tokens a second."""
    lease = kwargs.pop("lease", 5.0)
    length = kwargs.pop("log_length", 1000)
    kwargs.setdefault("step", 0.01)
    async with (
        serving(RedisStore(server.url, 3600, lease=lease, log_length=length), **kwargs) as one,
        serving(RedisStore(server.url, 3600, lease=lease, log_length=length)) as two,
    ):
        yield one, two


async def begin(app: Running, sid: str, until: int = 1, **fields: Any) -> Answer:
    """A turn that its reader leaves after some tokens."""
    body = {"content": "x", "max_tokens": 200, "temperature": 1.0, **fields}
    async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        assert r.status_code == 200, await r.aread()
        return await read_answer(r, until=until)


async def join(app: Running, sid: str, last: str = "", until: int | None = None) -> Answer | None:
    headers = {"Last-Event-ID": last} if last else {}
    async with app.http.stream("GET", f"/v1/sessions/{sid}/stream", headers=headers) as r:
        if r.status_code == 204:
            return None
        assert r.status_code == 200, await r.aread()
        return await read_answer(r, until=until)


def seen(answer: Answer) -> int:
    return int(answer.ids[-1].rsplit(":", 1)[1])


async def stored(app: Running, sid: str) -> dict[str, Any]:
    return dict((await app.read(sid))["messages"][-1])


@pytest.mark.parametrize("seed", range(2))
async def test_joining_through_changing_processes_gives_every_character_once(
    redis_server: RedisServer, seed: int
) -> None:
    rng = random.Random(seed)
    async with pair(redis_server) as apps:
        sid = await apps[0].session()
        parts = [await begin(apps[0], sid, until=3, seed=seed)]
        for app in itertools.cycle((apps[1], apps[0])):
            part = await join(app, sid, parts[-1].ids[-1], until=seen(parts[-1]) + rng.randrange(1, 60))
            if part is None:
                break
            assert part.error is None
            if part.ids:
                assert part.turn_id == parts[0].turn_id and seen(part) > seen(parts[-1])
                parts.append(part)
            if part.done:
                assert part.usage == (await stored(app, sid))["usage"]
                break
        await apps[0].settled(sid)
        whole = (await stored(apps[1], sid))["content"]
        text = "".join(p.text for p in parts)
        assert text == whole if parts[-1].done else whole.startswith(text)
        assert len(parts) >= 3
        assert await join(apps[1], sid) is None
        assert not apps[1].turns._neighbours._joined, "what nobody reads is not followed"  # type: ignore[union-attr]
        async with asyncio.timeout(10):  # a log lives as long as its turn and its readers
            while apps[0].turns._neighbours._own or apps[0].turns._turns:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)


async def test_readers_in_both_processes_see_the_same(redis_server: RedisServer) -> None:
    random_token = hashed_token(17, text_side()[0].vocab_size)
    gate, sampled = threading.Event(), itertools.count()

    def gated(context: Any, row: Any) -> int:
        assert next(sampled) < 30 or gate.wait(20)
        return random_token(context, row)

    async with pair(redis_server, step=0.0, token_fn=gated) as (one, two):
        sid = await one.session()
        first = asyncio.create_task(one.turn(sid, max_tokens=80))
        async with asyncio.timeout(20):
            while (turn := one.turns.running(("", sid))) is None or len(turn.generation.logs[0].tokens) < 30:
                await asyncio.sleep(0.005)
            joining = [asyncio.create_task(join(two, sid)) for _ in range(3)]
            while not turn.elsewhere:
                await asyncio.sleep(0.005)
        gate.set()
        answers = [await first, *await asyncio.gather(*joining)]
        assert all(a is not None and a.done for a in answers)
        assert len({(a.text, a.finish, a.ids[-1], str(a.usage)) for a in answers if a is not None}) == 1


async def test_an_answer_that_goes_on_is_whole_elsewhere_too(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        await one.turn(sid, "x", max_tokens=20)
        cut = await stored(one, sid)
        url = f"/v1/sessions/{sid}/messages/{cut['id']}/regenerate"
        body = {"max_tokens": 150, "continue_final_message": True}
        async with one.http.stream("POST", url, json=body) as r:
            part = await read_answer(r, until=5)
        joined = await join(two, sid)
        assert joined is not None and joined.done and part.text.startswith(cut["content"])
        assert joined.text == (await stored(two, sid))["content"] and joined.text.startswith(part.text)


async def test_cancel_reaches_the_owner(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        part = await begin(one, sid, max_tokens=4000)
        cancelled = await two.http.post(f"/v1/sessions/{sid}/cancel")
        assert cancelled.json() == {"id": sid, "turn_id": part.turn_id, "cancelled": True}
        assert (await stored(two, sid))["status"] == "cancelled"
        await one.idle()
        assert (await two.http.post(f"/v1/sessions/{sid}/cancel")).json()["cancelled"] is False


async def test_a_turn_elsewhere_that_is_read_stays_and_one_that_is_not_makes_way(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        part = await begin(one, sid, max_tokens=4000)
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:  # read through the second
            await read_answer(r, until=3)
            async with asyncio.timeout(10):
                while not one.turns.running(("", sid)).elsewhere:  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
            for app in (one, two):
                refused = await app.http.post(f"/v1/sessions/{sid}/messages", json={"content": "y"})
                assert refused.status_code == 409 and refused.json()["error"]["turn_id"] == part.turn_id
        async with asyncio.timeout(10):
            while one.turns.running(("", sid)).elsewhere:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
        assert (await two.turn(sid, "next", max_tokens=5)).done
        statuses = [(m["role"], m["status"]) for m in (await two.read(sid))["messages"]]
        assert statuses == [("user", "done"), ("assistant", "interrupted"), ("user", "done"), ("assistant", "done")]


async def test_a_reader_elsewhere_holds_off_the_grace_time(redis_server: RedisServer) -> None:
    async with pair(redis_server, grace=1.5) as (one, two):
        sid = await one.session()
        await begin(one, sid, max_tokens=4000)
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
            part = await read_answer(r, until=300)  # over two seconds
            assert part.error is None and seen(part) >= 300
        await one.idle()  # and with nobody left it ends
        async with asyncio.timeout(10):
            while (await stored(two, sid))["status"] == "running":
                await asyncio.sleep(0.02)
        assert (await stored(two, sid))["status"] == "cancelled"


async def test_deleting_elsewhere_ends_the_turn(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        await begin(one, sid, max_tokens=4000)
        assert (await two.http.delete(f"/v1/sessions/{sid}")).status_code == 200
        await one.idle()
        assert (await one.http.get(f"/v1/sessions/{sid}")).status_code == 404


async def test_rd_01_forty_turns_at_once_through_two_processes(redis_server: RedisServer) -> None:
    async with pair(redis_server, step=0.002) as apps:
        sid = await apps[0].session()

        async def post(i: int) -> int:
            body = {"content": f"q{i}", "max_tokens": 10}
            async with apps[i % 2].http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
                await r.aread()
                return r.status_code

        statuses = await asyncio.gather(*(post(i) for i in range(40)))
        messages = (await apps[1].read(sid))["messages"]
        assert set(statuses) <= {200, 409} and statuses.count(200) == len(messages) // 2 >= 1
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m["status"] == "done" for m in messages)


async def test_a_trimmed_log_sends_a_snapshot_first(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log keeps 100 batches or a few more; whoever comes with an older id gets the whole text in one event."""
    monkeypatch.setattr(neighbours, "PUBLISH_EVERY", 0.001)
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 20)
    async with pair(redis_server, step=0.004, log_length=100) as (one, two):
        sid = await one.session()
        early = await begin(one, sid, until=5, max_tokens=1200)
        late = await join(one, sid, early.ids[-1], until=700)
        assert late is not None
        for last in (early.ids[-1], ""):
            headers = {"Last-Event-ID": last} if last else {}
            async with two.http.stream("GET", f"/v1/sessions/{sid}/stream", headers=headers) as r:
                lines = r.extensions["lines"] = r.aiter_lines()
                assert await anext(lines) == "event: snapshot"
                part = await read_answer(r, until=900)
            assert seen(part) >= 900 and part.error is None
            assert part.text.startswith(early.text + late.text)
        rest = await join(two, sid, part.ids[-1])
        assert rest is not None and rest.done
        assert part.text + rest.text == (await stored(two, sid))["content"]


async def test_an_owner_that_dies_ends_its_readers_elsewhere_and_its_turn(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "PRESENCE_EVERY", 0.2)
    monkeypatch.setattr(neighbours, "QUIET", 0.5)
    async with pair(redis_server, lease=1.0) as (one, two):
        sid = await one.session()
        await begin(one, sid, max_tokens=4000)
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
            await read_answer(r, until=150)
            one.store._heart.cancel()  # type: ignore[attr-defined]  # stands still: no lease, no writing
            one.turns._neighbours._tasks[0].cancel()  # type: ignore[union-attr]
            turn = one.turns.running(("", sid))
            assert turn is not None and turn.task is not None
            turn.task.cancel()
            rest = await read_answer(r)
        assert not rest.done and rest.error is not None
        message = await stored(two, sid)
        assert message["status"] == "interrupted" and message["content"]
        assert (await two.turn(sid, "next", max_tokens=5)).done
        one.turns._turns.clear()  # dead
        turn.generation.cancel()


async def test_an_owner_that_stops_in_order_tells_readers_elsewhere_all_it_has(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        await begin(one, sid, max_tokens=4000)
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
            part = await read_answer(r, until=50)
            await one.engine.stop()
            await one.turns.close()
            rest = await read_answer(r)
        assert not rest.done and rest.error is not None  # no cut answer looks whole
        message = await stored(two, sid)
        assert (message["status"], message["content"]) == ("interrupted", part.text + rest.text)


async def test_an_owner_that_was_given_up_says_so_to_its_readers(redis_server: RedisServer) -> None:
    async with pair(redis_server, lease=1.0) as (one, two):
        sid = await one.session()
        body = {"content": "x", "max_tokens": 4000}
        async with one.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            await read_answer(r, until=5)
            update = one.store.update_message
            one.store.update_message = _never  # type: ignore[method-assign]
            one.store._heart.cancel()  # type: ignore[attr-defined]
            async with asyncio.timeout(20):
                while (await stored(two, sid))["status"] == "running":
                    await asyncio.sleep(0.05)
            one.store.update_message = update  # type: ignore[method-assign]  # and now it wakes up
            rest = await read_answer(r)
        assert not rest.done and rest.error is not None and rest.error["code"] == "turn_over"
        await one.idle()
        assert (await stored(two, sid))["status"] == "interrupted"


async def _never(*args: Any) -> None:
    return None


async def test_se_08_another_tenant_joins_nothing(redis_server: RedisServer) -> None:
    """Knowing the id of a turn or a session that runs elsewhere is not enough."""
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        part = await begin(one, sid, max_tokens=4000)
        assert await two.store.get("them", sid) is None
        for key in (("them", sid), ("them", part.turn_id)):
            for ask in (two.turns.find, two.turns.cancel, two.turns.make_way):
                with pytest.raises(Exception, match="no such session"):
                    await ask(key)
        await one.http.post(f"/v1/sessions/{sid}/cancel")


async def test_every_command_stays_in_one_slot_of_a_cluster(own_redis: MakeRedis) -> None:
    """A server in cluster mode refuses a command or script whose keys lie in several."""
    server = own_redis("--cluster-enabled", "yes")
    server.start()
    async with aioredis.Redis.from_url(server.url) as client:
        await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        async with asyncio.timeout(20):
            while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                await asyncio.sleep(0.05)
    async with pair(server) as (one, two):
        sids = [await one.session() for _ in range(3)]
        parts = [await begin(one, sid, max_tokens=4000) for sid in sids]
        joined = await asyncio.gather(*(join(two, sid, until=30) for sid in sids))  # one blocking read for all
        assert all(a is not None and a.error is None and seen(a) >= 30 for a in joined)
        for sid, part in zip(sids, parts, strict=True):
            cancelled = await two.http.post(f"/v1/sessions/{sid}/cancel")
            assert cancelled.json()["turn_id"] == part.turn_id
        assert len((await two.http.get("/v1/sessions")).json()["data"]) == 3
        assert (await one.http.patch(f"/v1/sessions/{sids[0]}", json={"title": "t"})).status_code == 200
        assert (await two.http.delete(f"/v1/sessions/{sids[0]}")).status_code == 200
        assert await two.store.interrupt_running() == 0


async def test_a_process_that_stops_sends_its_readers_to_the_owner(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        sid = await one.session()
        await begin(one, sid, max_tokens=300)
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
            part = await read_answer(r, until=5)
            two.turns.let_go()
            rest = await read_answer(r)
        assert rest.error is not None and rest.error["code"] == "rejoin" and not rest.done
        refused = await two.http.get(f"/v1/sessions/{sid}/stream")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        last = await join(one, sid, (rest.ids or part.ids)[-1])
        assert last is not None and last.done
        assert part.text + rest.text + last.text == (await stored(one, sid))["content"]
