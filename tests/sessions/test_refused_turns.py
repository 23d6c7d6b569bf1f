"""A request that is refused for what it says ends nothing: the turn that nobody reads at the moment goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redisserver import RedisServer
from sessionserver import Running, read_answer, serving

from chatsvc.sessions import codec
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.redis import RedisStore

LONG = 3000  # tokens: at 5 ms each it cannot end by itself meanwhile
PARAMETERS: list[dict[str, Any]] = [
    {"max_tokens": 99999},
    {"max_completion_tokens": 99999},
    {"logit_bias": {"999999": 1}},
    {"stop_token_ids": [999999]},
    {"min_tokens": 20, "max_tokens": 10},
]


@pytest.fixture
async def slow() -> AsyncIterator[Running]:
    async with serving(MemoryStore(3600), step=0.005) as running:
        yield running


async def left(app: Running, sid: str, **fields: Any) -> str:
    """The id of a running turn that nobody reads; it has some text."""
    body = {"content": "c", "max_tokens": LONG, "ignore_eos": True, **fields}
    async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        turn_id = (await read_answer(r, until=3)).turn_id
    turn = app.turns.running(("", sid))
    async with asyncio.timeout(10):
        while turn is None or turn.readers:
            await asyncio.sleep(0.01)
    return turn_id


async def refused(app: Running, sid: str, path: str, body: Any, headers: Any = None) -> dict[str, Any]:
    """Refused with 4xx, and the turn still runs; the error."""
    answer = await app.http.post(f"/v1/sessions/{sid}/{path}", json=body, headers=headers)
    assert answer.status_code in (400, 404), (body, answer.text[:300])
    now = (await app.read(sid))["messages"]
    assert [m["status"] for m in now] == ["done", "running"], (body, answer.text[:300])
    return dict(answer.json()["error"])


async def test_a_refused_message_ends_no_turn(slow: Running) -> None:
    sid = await slow.session()
    turn_id = await left(slow, sid)
    user = (await slow.read(sid))["messages"][0]["id"]
    for fields in (*PARAMETERS, {"parent_id": user}, {"parent_id": "nothing"}, {"content": "word " * 9000}):
        await refused(slow, sid, "messages", {"content": "x", **fields})
    await refused(slow, sid, "messages", {"content": "x"}, {"X-Request-Timeout": "soon"})
    generation = slow.turns.running(("", sid)).generation  # type: ignore[union-attr]
    assert not generation.finished and generation.request_id.endswith(turn_id)
    # One that is in order still makes its own way, and its prompt has the text that was interrupted.
    answer = await slow.turn(sid, "and?")
    messages = (await slow.read(sid))["messages"]
    assert answer.done and [m["status"] for m in messages] == ["done", "interrupted", "done", "done"]
    assert messages[2]["parent_id"] == turn_id
    tokens = messages[1]["usage"]["completion_tokens"]
    assert answer.usage is not None and answer.usage["prompt_tokens"] > tokens


async def test_a_refused_regeneration_ends_no_turn(slow: Running) -> None:
    sid = await slow.session()
    turn_id = await left(slow, sid)
    user = (await slow.read(sid))["messages"][0]["id"]
    for mid in (user, turn_id):
        for fields in PARAMETERS:
            await refused(slow, sid, f"messages/{mid}/regenerate", fields)
    await refused(slow, sid, f"messages/{user}/regenerate", {"continue_final_message": True})
    await refused(slow, sid, "messages/nothing/regenerate", {})
    body = {"continue_final_message": True, "max_tokens": 4}
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages/{turn_id}/regenerate", json=body) as r:
        assert r.status_code == 200 and (await read_answer(r)).done
    messages = (await slow.read(sid))["messages"]
    assert [m["status"] for m in messages] == ["done", "interrupted", "done"]
    assert messages[2]["content"].startswith(messages[1]["content"])


async def test_a_message_that_a_full_session_has_no_room_for_ends_no_turn(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    sid = await slow.session()
    await left(slow, sid)
    monkeypatch.setattr(codec, "MAX_SESSION_MESSAGES", 3)
    assert (await refused(slow, sid, "messages", {"content": "x"}))["code"] == "session_full"
    monkeypatch.setattr(codec, "MAX_SESSION_MESSAGES", 4096)
    monkeypatch.setattr(codec, "MAX_SESSION_BYTES", 8000)
    assert (await refused(slow, sid, "messages", {"content": "x" * 8000}))["code"] == "session_full"


async def test_a_refused_message_ends_no_turn_of_another_process(redis_server: RedisServer) -> None:
    async with (
        serving(RedisStore(redis_server.url, 3600), step=0.005) as one,
        serving(RedisStore(redis_server.url, 3600)) as two,
    ):
        sid = await one.session()
        await left(one, sid)
        for fields in PARAMETERS:
            await refused(two, sid, "messages", {"content": "x", **fields})
        assert (await two.turn(sid, "y")).done
        assert [m["status"] for m in (await two.read(sid))["messages"]] == ["done", "interrupted", "done", "done"]
