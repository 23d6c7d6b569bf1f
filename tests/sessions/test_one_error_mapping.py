"""The same fault has the same name, whoever was answered: a chat, a session's turn here or in another process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redisserver import RedisServer
from sessionserver import Running, events, read_answer, serving

from chatsvc.api.replica import Replica
from chatsvc.sessions.base import Message
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.redis import RedisStore

SOON = {"X-Request-Timeout": "0.4"}
WORDS = "The answer was not complete within 0.4 seconds"
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


async def chat_error(app: Running, begun: asyncio.Event, headers: Any = None) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **ENDLESS}
    async with app.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as r:
        async for _, data in events(r):
            begun.set()
            if "error" in json.loads(data):
                return dict(json.loads(data)["error"])
    raise AssertionError("no error")


async def turn_error(app: Running, sid: str, begun: asyncio.Event, headers: Any = None) -> dict[str, Any]:
    body = {"content": "x", **ENDLESS}
    async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body, headers=headers) as r:
        await read_answer(r, until=1)
        begun.set()
        answer = await read_answer(r)
    assert answer.error is not None
    return answer.error


async def test_a_deadline_in_a_chat_and_in_a_turn() -> None:
    async with serving(MemoryStore(3600), step=0.005) as app:
        sid, e = await app.session(), asyncio.Event()
        errors = await asyncio.gather(chat_error(app, e, SOON), turn_error(app, sid, e, SOON))
        wanted = {"message": WORDS, "type": "invalid_request_error", "param": None, "code": "request_timeout"}
        assert errors == [wanted, wanted]
        message = (await app.store.get("", sid)).messages[-1]  # type: ignore[union-attr]
        assert (message.status, message.error) == ("failed", {"message": WORDS, "status": 408})


@pytest.mark.parametrize("end", ["drained", "died"])
async def test_the_end_of_the_engine_in_a_chat_and_in_a_turn(end: str) -> None:
    async with serving(MemoryStore(3600), step=0.005) as app:
        begun = [asyncio.Event(), asyncio.Event()]
        both = asyncio.gather(chat_error(app, begun[0]), turn_error(app, await app.session(), begun[1]))
        await asyncio.gather(*(b.wait() for b in begun))
        if end == "drained":
            await app.engine.stop()
        else:
            app.engine._die("it died")
        chat, turn = await both
        assert chat == turn and (chat["type"], chat["code"]) == ("server_error", "unavailable")


async def test_a_deadline_as_another_process_tells_it(redis_server: RedisServer) -> None:
    async with (
        serving(RedisStore(redis_server.url, 3600), step=0.005) as one,
        serving(RedisStore(redis_server.url, 3600)) as two,
    ):
        sid, begun = await one.session(), asyncio.Event()
        here = asyncio.create_task(turn_error(one, sid, begun, {"X-Request-Timeout": "1"}))
        await begun.wait()
        async with two.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
            there = await read_answer(r)
        assert there.error == await here and there.error["code"] == "request_timeout"
        stored = (await two.store.get("", sid)).messages[-1]  # type: ignore[union-attr]
        replica = Replica(stored.id)  # one that has heard nothing of the end but what the store has
        replica.settle(stored)
        assert (replica.logs[0].error, replica.logs[0].error_status) == (there.error["message"], 408)


def test_a_killed_owners_turn_is_unavailable() -> None:
    replica = Replica("m")
    replica.settle(Message("m", None, "assistant", "", "interrupted"))
    assert replica.logs[0].error_status == 503


async def test_a_response_in_the_background_names_its_deadline_afterwards() -> None:
    async with serving(MemoryStore(3600), step=0.005) as app:
        body = {"input": "x", "max_output_tokens": 4000, "ignore_eos": True}
        made = (await app.http.post("/v1/responses", json={**body, "background": True}, headers=SOON)).json()
        async with app.http.stream("POST", "/v1/responses", json={**body, "stream": True}, headers=SOON) as r:
            failed = [json.loads(data) async for _, data in events(r)][-1]
        error = failed["response"]["error"]
        assert failed["type"] == "response.failed" and error["message"] == WORDS
        async with asyncio.timeout(10):
            while (now := (await app.http.get(f"/v1/responses/{made['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0.02)
        assert (now["status"], now["error"]) == ("failed", error)
        again = (await app.http.get(f"/v1/responses/{failed['response']['id']}")).json()
        assert again["error"] == error
