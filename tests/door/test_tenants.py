"""What one key's user can see of another's: nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from doorserver import CHAT, MESSAGES, Running, digest_of, secret_of, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "Once upon a time there was a careful librarian who counted every book in the house. " * 12
NEW = 40  # cached tokens: no more than what the template puts before every message of this tenant
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door() -> AsyncIterator[Running]:
    keys: dict[str, Any] = {"ann": {}, "bob": {}, "team1": {"tenant": "t"}, "team2": {"tenant": "t"}}
    async with serving(step=0.002, blocks=2048, **keys, old={"tenant": ""}) as running:
        yield running


async def cached(http: httpx.AsyncClient, prompt: str, **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2, **fields}
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_PC_12_prefixes_are_shared_inside_a_tenant_only(door: Running) -> None:
    assert await cached(door["ann"], LONG) == 0
    assert (again := await cached(door["ann"], LONG)) > 100
    assert await cached(door["bob"], LONG) == 0
    assert await cached(door["team1"], LONG) == 0
    assert await cached(door["team2"], LONG) == again  # of the same tenant
    assert await cached(door["bob"], LONG) == again  # its own by now


async def test_PC_12_a_salt_only_narrows(door: Running) -> None:
    prompt = "Salted. " + LONG
    assert await cached(door["ann"], prompt) < NEW
    ann_tenant = next(k.tenant for k in door.keys[0].keys if k.name == "ann")
    for salt in (
        "ann",
        ann_tenant,
        digest_of("ann"),
        secret_of("ann"),
        f"tenant={ann_tenant}",
        "\0",
        "tenant\0" + ann_tenant,
    ):
        assert await cached(door["bob"], prompt, cache_salt=salt) == 0, salt
        assert await cached(door["old"], prompt, cache_salt=salt) == 0, salt
    assert await cached(door["ann"], prompt, cache_salt="mine") == 0
    assert await cached(door["ann"], prompt, cache_salt="mine") > 100
    assert await cached(door["ann"], prompt) > 100


async def test_PC_12_also_by_completions_and_sessions(door: Running) -> None:
    async def completion(name: str) -> int:
        answer = await door[name].post("/v1/completions", json={"prompt": "Plain. " + LONG, "max_tokens": 2})
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert max([await completion(n) for n in ("ann", "bob")]) < NEW and await completion("ann") > 100

    async def turn(name: str) -> int:
        made = (await door[name].post("/v1/sessions", json={})).json()["id"]
        body = {"content": "Spoken. " + LONG, "max_tokens": 2}
        answer = await door[name].post(f"/v1/sessions/{made}/messages", json=body)
        usage = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")][-1]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert max([await turn(n) for n in ("ann", "bob")]) < NEW and await turn("ann") > 100


@asynccontextmanager
async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
    """A stream that has begun: the id of its completion, and its lines."""
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: {"):
                yield str(json.loads(line[6:])["id"]), lines
                return


def routes_of(session: str, message: str) -> list[tuple[str, str, Any]]:
    """Every route of a session but the two that list and make."""
    one = f"/v1/sessions/{session}"
    return [
        ("GET", one, None),
        ("PATCH", one, {"title": "mine now"}),
        ("GET", f"{one}/stream", None),
        ("POST", f"{one}/messages", {"content": "and now?"}),
        ("POST", f"{one}/messages", {"content": "and now?", "parent_id": message}),
        ("POST", f"{one}/messages/{message}/regenerate", {}),
        ("POST", f"{one}/fork", {"message_id": message}),
        ("POST", f"{one}/cancel", None),
        ("DELETE", one, None),
    ]


async def test_SE_08_another_keys_session_does_not_exist(door: Running) -> None:
    ann, bob = door["ann"], door["bob"]
    session = (await ann.post("/v1/sessions", json={"title": "Ann's", "system": "be kind"})).json()["id"]
    path = f"/v1/sessions/{session}/messages"
    await ann.post(path, json={"content": "hello", "max_tokens": 3})
    before = (await ann.get(f"/v1/sessions/{session}")).json()
    answer_id = before["messages"][-1]["id"]
    known = {r.path for r in door.app.routes if getattr(r, "path", "").startswith("/v1/sessions/")}
    assert len(known) <= len({p.split("/", 4)[-1] for _, p, _ in routes_of(session, answer_id)}) + 1

    async def looks(name: str) -> None:
        for method, target, body in routes_of(session, answer_id):
            answer = await door[name].request(method, target, json=body)
            assert answer.status_code == 404, (name, method, target, answer.text)
            missing = await door[name].request(method, target.replace(session, "sess_" + "0" * 32), json=body)
            assert answer.json() == missing.json()  # not even that it is there

    for name in ("bob", "team1", "old"):
        await looks(name)
    assert (await ann.get(f"/v1/sessions/{session}")).json() == before
    assert session in (await ann.get("/v1/sessions")).text
    for name in ("bob", "team1", "old"):
        assert session not in (await door[name].get("/v1/sessions?limit=200")).text

    # The same while an answer runs, which bob can neither read nor stop nor push aside.
    async with streamed(ann, path, {"content": "go on", **ENDLESS}) as (completion, lines):
        await looks("bob")
        assert (await bob.post(f"/v1/chat/completions/{completion}/cancel")).status_code == 404
        assert await anext(lines) is not None
        assert (await ann.post(f"/v1/sessions/{session}/cancel")).json()["cancelled"]
    assert (await ann.delete(f"/v1/sessions/{session}")).status_code == 200


async def test_SE_08_keys_of_one_tenant_share_their_sessions(door: Running) -> None:
    session = (await door["team1"].post("/v1/sessions", json={"title": "ours"})).json()["id"]
    assert (await door["team2"].get(f"/v1/sessions/{session}")).json()["title"] == "ours"
    assert session in (await door["team2"].get("/v1/sessions")).text


async def test_SE_08_ids_cannot_be_guessed(door: Running) -> None:
    ids = [(await door["ann"].post("/v1/sessions", json={})).json()["id"] for _ in range(3)]
    assert all(len(i) >= 32 for i in ids) and len(set(ids)) == 3


async def test_SE_08_cancel_by_id_is_for_ones_own(door: Running) -> None:
    body = {"messages": MESSAGES, "stream": True, **ENDLESS}
    async with streamed(door["ann"], CHAT, body) as (completion, lines):
        target = f"/v1/chat/completions/{completion}/cancel"
        refused = await door["bob"].post(target)
        unknown = await door["bob"].post(target.replace(completion, "chatcmpl-0"))
        assert (refused.status_code, unknown.status_code) == (404, 404)
        assert (
            refused.json()["error"]["message"].replace(completion, "chatcmpl-0") == unknown.json()["error"]["message"]
        )
        assert (await door["ann"].post(target)).json()["cancelled"] is True
        rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in rest
    await door.idle()
    assert (await door["ann"].post(target)).status_code == 404  # over


async def test_SE_08_another_keys_response_does_not_exist(door: Running) -> None:
    ann, bob = door["ann"], door["bob"]
    body = {"input": "hello", "max_output_tokens": 4}
    made = (await ann.post("/v1/responses", json=body)).json()["id"]
    missing = made[:-8] + "0" * 8
    for method, target in (
        ("GET", "/v1/responses/{}"),
        ("POST", "/v1/responses/{}/cancel"),
        ("DELETE", "/v1/responses/{}"),
        ("GET", "/v1/responses/{}/input_items"),
    ):
        answers = [await bob.request(method, target.format(i)) for i in (made, missing)]
        assert answers[0].status_code == answers[1].status_code in (404, 405), target
        assert answers[0].text.replace(made, missing) == answers[1].text
    for i in (made, missing):
        stolen = await bob.post("/v1/responses", json={**body, "previous_response_id": i})
        assert stolen.status_code in (400, 404) and "previous_response_id" in stolen.text
    assert (await ann.get(f"/v1/responses/{made}")).json()["id"] == made
    assert (await ann.post("/v1/responses", json={**body, "previous_response_id": made})).status_code == 200


async def test_the_same_request_id_of_two_tenants_is_no_conflict(door: Running) -> None:
    """The caller's id is for logs; a 409 would tell that somebody else uses it."""
    body = {"messages": MESSAGES, "max_tokens": 30}

    async def ask(name: str) -> int:
        return (await door[name].post(CHAT, json=body, headers={"X-Request-Id": "same"})).status_code

    assert await asyncio.gather(*(ask(n) for n in ("ann", "bob", "ann", "team1"))) == [200] * 4


async def test_the_block_map_names_nobody_else(door: Running) -> None:
    body = {"messages": [{"role": "user", "content": "Map. " + LONG}], "stream": True, **ENDLESS}
    async with streamed(door["ann"], CHAT, body) as (hers, _), streamed(door["bob"], CHAT, body) as (his, _):
        for name, own, other in (("ann", hers, his), ("bob", his, hers), ("team1", None, None)):
            text = (await door[name].get("/debug/kv")).text
            view = json.loads(text)
            assert [s["id"].rsplit(":", 1)[0] for s in view["sequences"]] == ([own] if own else [])
            assert other is None or other not in text
            assert {o for b in view["blocks"] for o in b["owners"]} == {"other", *([f"{own}:0"] if own else [])}
            assert all(len(b["owners"]) == b["ref_count"] for b in view["blocks"])
        async with door["bob"].stream("GET", "/debug/kv/stream") as changes:
            seen, ended = "", False
            async for line in changes.aiter_lines():
                seen += line
                if his in line and '"change"' in line and not ended:
                    ended = True
                    await door["bob"].post(f"/v1/chat/completions/{his}/cancel")
                    await door["ann"].post(f"/v1/chat/completions/{hers}/cancel")
                if ended and f'"gone":["{his}:0"]' in line:
                    break
            assert hers not in seen
    await door.idle()


async def test_a_key_may_take_over_the_sessions_of_the_time_without_keys(door: Running) -> None:
    from chatsvc.sessions.base import Session

    assert door.services.store is not None
    await door.services.store.create(Session("sess_old", "", "from before", "", 1.0, 1.0))
    assert (await door["old"].get("/v1/sessions/sess_old")).json()["title"] == "from before"
    assert (await door["ann"].get("/v1/sessions/sess_old")).status_code == 404


async def test_every_generation_goes_over_the_desk() -> None:
    """Nobody else starts one, so none is without its tenant and quotas."""
    from pathlib import Path

    import chatsvc.api

    folder = Path(chatsvc.api.__file__).parent
    found = [p.name for p in folder.rglob("*.py") if "engine.generate(" in p.read_text()]
    assert found == ["desk.py"]
