"""Turns over a real socket: acceptance, leaving, rejoining, ending, and the prefix they share."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sessionserver import Answer, Running, read_answer, serving, text_side

from chatsvc.errors import Overloaded, StoreError
from chatsvc.runtime.simulated import hashed_token
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.memory import MemoryStore

BLOCK = 16


@pytest.fixture
async def app() -> AsyncIterator[Running]:
    async with serving(MemoryStore(3600)) as running:
        yield running


@pytest.fixture
async def slow() -> AsyncIterator[Running]:
    """About 200 tokens a second: there is time to leave and come back."""
    async with serving(MemoryStore(3600), step=0.005) as running:
        yield running


def last(session: dict[str, Any]) -> dict[str, Any]:
    return dict(session["messages"][-1])


async def test_a_session_from_birth_to_death(app: Running) -> None:
    sid = await app.session(title="T", system="S")
    listed = (await app.http.get("/v1/sessions")).json()
    assert [(s["id"], s["title"]) for s in listed["data"]] == [(sid, "T")] and "messages" not in listed["data"][0]
    patched = (await app.http.patch(f"/v1/sessions/{sid}", json={"title": "U", "system": None})).json()
    assert (patched["title"], patched["system"], patched["messages"]) == ("U", "S", [])
    answer = await app.turn(sid, "hello")
    session = await app.read(sid)
    user, reply = session["messages"]
    assert (user["role"], user["content"], user["parent_id"], user["status"]) == ("user", "hello", None, "done")
    assert (reply["role"], reply["content"], reply["parent_id"]) == ("assistant", answer.text, user["id"])
    assert (reply["status"], reply["usage"]) == ("done", answer.usage)
    assert answer.done and answer.finish == "length" and reply["usage"]["completion_tokens"] == 12
    assert (user["finish_reason"], user["timing"], reply["finish_reason"]) == (None, None, "length")
    assert 0 <= reply["timing"]["first_token_seconds"] < 20 and reply["timing"]["tokens_per_second"] > 0
    assert answer.turn_id == reply["id"]
    assert "token_ids" not in reply
    assert (await app.http.delete(f"/v1/sessions/{sid}")).json()["deleted"] is True
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/stream"), ("POST", "/cancel")]:
        response = await app.http.request(method, f"/v1/sessions/{sid}{path}")
        assert response.status_code == 404 and response.json()["error"]["code"] == "session_not_found"


async def test_ids_count_tokens(app: Running) -> None:
    sid = await app.session()
    answer = await app.turn(sid, max_tokens=30)
    turn, choice, _ = answer.ids[0].split(":")
    counts = [int(i.rsplit(":", 1)[1]) for i in answer.ids]
    assert choice == "0" and all(i.startswith(f"{turn}:0:") for i in answer.ids)
    assert counts == sorted(counts) and counts[-1] in (30, 31)


async def test_a_turn_finds_the_whole_turn_before_it_in_the_cache(app: Running) -> None:
    """Random text, invalid bytes and all: the ids are stored, so the prefix is exact."""
    sid = await app.session(system="You are a helpful AI assistant. " * 5)
    before = 0
    for i in range(4):
        answer = await app.turn(sid, f"question {i}: naïve 漢字", max_tokens=50, temperature=1.0)
        assert answer.usage is not None
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        # Every full block of the first turn's prompt and answer; the last token's KV is never written.
        assert cached >= (before - 1) // BLOCK * BLOCK, (i, cached, before)
        before = answer.usage["total_tokens"]


async def test_stored_ids_make_the_prompt_the_engine_gets(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []
    generate = app.engine.generate

    def spy(**kwargs: Any) -> Any:
        prompts.append(kwargs["prompt_token_ids"])
        return generate(**kwargs)

    monkeypatch.setattr(app.engine, "generate", spy)
    sid = await app.session(system="S")
    await app.turn(sid, "one", max_tokens=20)
    stored = (await app.store.get("", sid)).messages[1].token_ids  # type: ignore[union-attr]
    assert len(stored) == 20
    await app.turn(sid, "two", max_tokens=5)
    first, second = prompts
    assert second[: len(first) + 20] == first + stored
    rest = app.engine.tokenizer.decode(second[len(first) + 20 :], skip_special=False)
    assert rest == "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"


async def test_the_end_token_is_not_stored_and_the_prefix_still_exact() -> None:
    tokenizer, _ = text_side()
    end = tokenizer.added["<|im_end|>"].id
    random_token = hashed_token(17, tokenizer.vocab_size)
    prompts: list[list[int]] = []

    def seventh_is_the_end(context: Any, row: Any) -> int:
        return end if row.sampling.position % 7 == 6 else random_token(context, row)

    async with serving(MemoryStore(3600), token_fn=seventh_is_the_end) as app:
        generate = app.engine.generate
        app.engine.generate = lambda **kw: prompts.append(kw["prompt_token_ids"]) or generate(**kw)  # type: ignore
        sid = await app.session()
        answer = await app.turn(sid, max_tokens=100)
        assert answer.finish == "stop" and answer.usage is not None
        stored = (await app.store.get("", sid)).messages[1].token_ids  # type: ignore[union-attr]
        assert len(stored) == answer.usage["completion_tokens"] - 1 and end not in stored
        await app.turn(sid, "more")
        assert prompts[1][: len(prompts[0]) + len(stored) + 1] == [*prompts[0], *stored, end]


async def test_text_that_a_stop_string_cut_off_stays_out_of_later_prompts(app: Running) -> None:
    sid = await app.session()
    whole = await app.turn(sid, max_tokens=20, temperature=0)
    stop = whole.text[len(whole.text) // 2 :][:4]
    cut = await app.turn(sid, max_tokens=20, temperature=0, parent_id="root", stop=stop)
    assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    message = (await app.store.get("", sid)).messages[-1]  # type: ignore[union-attr]
    assert message.content == cut.text and message.token_ids == []


async def test_leaving_does_not_stop_the_answer(slow: Running) -> None:
    sid = await slow.session()
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json={"content": "x", "max_tokens": 250}) as r:
        part = await read_answer(r, until=3)
    assert len(part.text) > 0
    running = last(await slow.read(sid))
    assert running["status"] == "running"
    await slow.settled(sid)
    ended = last(await slow.read(sid))
    assert ended["status"] == "done" and ended["usage"]["completion_tokens"] == 250
    assert ended["content"].startswith(part.text)


@pytest.mark.parametrize("seed", range(3))
async def test_rejoining_gives_every_character_once(slow: Running, seed: int) -> None:
    rng = random.Random(seed)
    sid = await slow.session()
    body = {"content": "x", "max_tokens": 80, "temperature": 1.0, "seed": seed}
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        parts = [await read_answer(r, until=rng.randrange(1, 30))]
    while not parts[-1].done:
        headers = {"Last-Event-ID": parts[-1].ids[-1]}
        async with slow.http.stream("GET", f"/v1/sessions/{sid}/stream", headers=headers) as r:
            if r.status_code == 204:  # it ended while nobody looked: the session has the rest
                break
            assert r.status_code == 200
            seen = int(parts[-1].ids[-1].rsplit(":", 1)[1])
            parts.append(await read_answer(r, until=seen + rng.randrange(1, 40)))
            if not parts[-1].ids:
                parts[-1].ids = parts[-2].ids
    stored = last(await slow.read(sid))
    text = "".join(p.text for p in parts)
    assert text == stored["content"] if parts[-1].done else stored["content"].startswith(text)
    assert len(parts) >= 2


async def test_several_readers_see_the_same_text() -> None:
    random_token = hashed_token(17, text_side()[0].vocab_size)
    gate = threading.Event()
    sampled = itertools.count()

    def gated(context: Any, row: Any) -> int:
        assert next(sampled) < 20 or gate.wait(20)
        return random_token(context, row)

    async with serving(MemoryStore(3600), token_fn=gated) as app:
        sid = await app.session()

        async def join() -> Answer:
            async with app.http.stream("GET", f"/v1/sessions/{sid}/stream") as r:
                return await read_answer(r)

        first = asyncio.create_task(app.turn(sid, max_tokens=60))
        async with asyncio.timeout(20):
            while (turn := app.turns.running(("", sid))) is None or len(turn.generation.logs[0].tokens) < 20:
                await asyncio.sleep(0.005)
            joining = [asyncio.create_task(join()) for _ in range(2)]
            while turn.readers < 3:
                await asyncio.sleep(0.005)
        gate.set()
        answers = await asyncio.gather(first, *joining)
        assert len({a.text for a in answers}) == 1 and all(a.done for a in answers)
        assert (await app.http.get(f"/v1/sessions/{sid}/stream")).status_code == 204


async def test_nothing_running_is_204_whatever_the_last_event_id_says(app: Running) -> None:
    sid = await app.session()
    answer = await app.turn(sid, max_tokens=9)
    for event_id in (*answer.ids, "", "nonsense", f"{answer.turn_id}:0:x", f"{answer.turn_id}:1:1", "msg_0:0:3"):
        response = await app.http.get(f"/v1/sessions/{sid}/stream", headers={"Last-Event-ID": event_id})
        assert response.status_code == 204 and response.content == b""
    assert app.turns.running(("", sid)) is None and not app.turns._turns, "an ended turn is not kept"


async def test_a_second_turn_while_one_is_read_is_409_with_its_id(slow: Running) -> None:
    sid = await slow.session()
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json={"content": "x", "max_tokens": 300}) as r:
        part = await read_answer(r, until=2)
        refused = await slow.http.post(f"/v1/sessions/{sid}/messages", json={"content": "y"})
        again = await slow.http.post(f"/v1/sessions/{sid}/messages/{part.turn_id}/regenerate", json={})
    for response in (refused, again):
        assert response.status_code == 409
        assert response.json()["error"]["turn_id"] == part.turn_id
        assert response.json()["error"]["code"] == "turn_running"
    assert len((await slow.read(sid))["messages"]) == 2


async def test_rd_06_dropped_and_asked_again_at_once(slow: Running) -> None:
    """50 times: the partial text is kept, marked interrupted, and part of the next prompt."""
    sid = await slow.session()
    for i in range(50):
        body = {"content": f"q{i}", "max_tokens": 2000}
        async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            assert r.status_code == 200, await r.aread()
            await read_answer(r, until=1)
        while (turn := slow.turns.running(("", sid))) is not None and turn.readers:
            await asyncio.sleep(0.001)
    answer = await slow.turn(sid, "end", max_tokens=5)
    messages = (await slow.read(sid))["messages"]
    assert [m["content"] for m in messages[::2]] == [*(f"q{i}" for i in range(50)), "end"]
    assert [m["status"] for m in messages[1::2]] == ["interrupted"] * 50 + ["done"]
    assert all(m["usage"]["completion_tokens"] >= 1 for m in messages[1::2])
    assert all(b["parent_id"] == a["id"] for a, b in itertools.pairwise(messages))
    assert answer.usage is not None and answer.usage["prompt_tokens_details"]["cached_tokens"] > 0
    await slow.idle()
    assert slow.engine.scheduler.manager.pool.num_used == 0


async def test_rd_01_twenty_turns_at_once(slow: Running) -> None:
    """One is taken, the others are told so, nothing is lost or mixed."""
    sid = await slow.session()

    async def post(i: int) -> int:
        async with slow.http.stream(
            "POST", f"/v1/sessions/{sid}/messages", json={"content": f"q{i}", "max_tokens": 20}
        ) as r:
            await r.aread()
            return r.status_code

    statuses = await asyncio.gather(*(post(i) for i in range(20)))
    messages = (await slow.read(sid))["messages"]
    assert set(statuses) <= {200, 409} and statuses.count(200) == len(messages) // 2 >= 1
    assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert all(m["status"] == "done" for m in messages)


async def test_cancel_stops_the_engine_and_keeps_the_text(slow: Running) -> None:
    """UI-03."""
    sid = await slow.session()
    body = {"content": "x", "max_tokens": 2000}
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        part = await read_answer(r, until=3)
        cancelled = await slow.http.post(f"/v1/sessions/{sid}/cancel")
        assert cancelled.json() == {"id": sid, "turn_id": part.turn_id, "cancelled": True}
        rest = await read_answer(r)
    assert rest.done and rest.finish == "stop"
    await slow.idle()
    stored = last(await slow.read(sid))
    assert stored["status"] == "cancelled" and stored["content"].startswith(part.text) and stored["content"]
    assert (await slow.http.post(f"/v1/sessions/{sid}/cancel")).json()["cancelled"] is False
    assert (await slow.turn(sid, "next", max_tokens=3)).done


async def test_cancel_waits_for_a_turn_that_is_being_accepted(slow: Running) -> None:
    """UI-03: Stop before the first token, while the request is still on its way."""
    sid = await slow.session()
    posting = asyncio.create_task(slow.turn(sid, max_tokens=2000))
    while not slow.engine.num_requests:
        await asyncio.sleep(0)
    answer = await slow.http.post(f"/v1/sessions/{sid}/cancel")
    assert answer.json()["cancelled"] is True
    assert (await posting).done
    assert last(await slow.read(sid))["status"] == "cancelled"


async def test_st_01_with_no_reader_the_grace_time_ends_the_turn() -> None:
    async with serving(MemoryStore(3600), step=0.005, grace=0.1) as app:
        sid = await app.session()
        body = {"content": "x", "max_tokens": 4000}
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            await read_answer(r, until=2)
        await app.idle()
        async with asyncio.timeout(5):
            while app.turns.running(("", sid)) is not None:
                await asyncio.sleep(0.02)
        stored = last(await app.read(sid))
        assert stored["status"] == "cancelled" and 2 <= stored["usage"]["completion_tokens"] < 4000


async def test_branches_edits_regeneration_and_forks(app: Running) -> None:
    sid = await app.session(system="S")
    await app.turn(sid, "one")
    await app.turn(sid, "two")
    one, a1, two, a2 = (await app.read(sid))["messages"]
    await app.turn(sid, "two, edited", parent_id=a1["id"])
    edited = (await app.read(sid))["messages"][4]
    assert edited["parent_id"] == a1["id"]
    async with app.http.stream(
        "POST", f"/v1/sessions/{sid}/messages/{a2['id']}/regenerate", json={"max_tokens": 5, "seed": 9}
    ) as r:
        again = await read_answer(r)
    assert again.done
    assert last(await app.read(sid))["parent_id"] == two["id"]
    await app.turn(sid, "fresh start", parent_id="root")
    assert (await app.read(sid))["messages"][-2]["parent_id"] is None
    forked = (await app.http.post(f"/v1/sessions/{sid}/fork", json={"message_id": a1["id"]})).json()
    assert forked["id"] != sid and forked["system"] == "S"
    assert [m["content"] for m in forked["messages"]] == [one["content"], a1["content"]]
    assert forked["messages"][1]["parent_id"] == forked["messages"][0]["id"] != one["id"]
    answer = await app.turn(forked["id"], "goes on")
    assert answer.usage is not None
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= (a1["usage"]["total_tokens"] - 1) // BLOCK * BLOCK
    assert len((await app.read(sid))["messages"]) == 9


async def test_a_cut_answer_goes_on(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text and ids stand at the begin of the new one, which is a branch beside it; the cache has its prefix."""
    prompts: list[list[int]] = []
    generate = app.engine.generate

    def spy(**kwargs: Any) -> Any:
        prompts.append(kwargs["prompt_token_ids"])
        return generate(**kwargs)

    monkeypatch.setattr(app.engine, "generate", spy)
    sid = await app.session()
    await app.turn(sid, "tell me", max_tokens=40)
    user, cut = (await app.read(sid))["messages"]
    ids = (await app.store.get("", sid)).messages[1].token_ids  # type: ignore[union-attr]
    url = f"/v1/sessions/{sid}/messages/{cut['id']}/regenerate"
    async with app.http.stream("POST", url, json={"max_tokens": 10, "continue_final_message": True}) as r:
        assert r.status_code == 200, await r.aread()
        more = await read_answer(r)
    message = last(await app.read(sid))
    assert message["parent_id"] == user["id"] and message["id"] == more.turn_id != cut["id"]
    assert message["content"] == more.text and more.text.startswith(cut["content"]) and more.text != cut["content"]
    assert message["usage"]["completion_tokens"] == 10
    exact = app.engine.tokenizer.decode(ids, skip_special=False) == cut["content"]
    stored = (await app.store.get("", sid)).messages[-1].token_ids  # type: ignore[union-attr]
    if exact:  # else it was cut inside a character, and goes on from its text
        assert prompts[1] == prompts[0] + ids and stored[: len(ids)] == ids and len(stored) == len(ids) + 10
        assert message["usage"]["prompt_tokens_details"]["cached_tokens"] >= (len(prompts[1]) - 1) // BLOCK * BLOCK
    else:
        assert stored == []
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert (await app.turn(sid, "and then?")).done


async def test_what_cannot_go_on_is_refused(app: Running) -> None:
    sid = await app.session()
    whole = await app.turn(sid, max_tokens=20, temperature=0)
    await app.turn(sid, max_tokens=20, temperature=0, parent_id="root", stop=whole.text[10:14])
    messages = (await app.read(sid))["messages"]
    assert messages[3]["finish_reason"] == "stop"
    for mid in (messages[0]["id"], messages[3]["id"]):  # a user's message, and an answer that ended
        url = f"/v1/sessions/{sid}/messages/{mid}/regenerate"
        response = await app.http.post(url, json={"continue_final_message": True})
        assert response.status_code == 400 and response.json()["error"]["param"] == "continue_final_message"
    assert len((await app.read(sid))["messages"]) == 4


async def test_a_message_that_is_not_there_is_a_404_that_names_it(app: Running) -> None:
    sid = await app.session()
    response = await app.http.post(f"/v1/sessions/{sid}/messages/nope/regenerate", json={})
    assert response.status_code == 404 and response.json()["error"]["param"] == "id"


async def test_users_and_answers_take_turns(app: Running) -> None:
    """One rule for a message's parent, given or not, and for a fork's last message: it is an answer."""
    sid = await app.session()
    await app.turn(sid, "one")
    user, _ = (await app.read(sid))["messages"]
    for path, body, param in (
        ("messages", {"content": "x", "parent_id": user["id"]}, "parent_id"),
        ("fork", {"message_id": user["id"]}, "message_id"),
    ):
        response = await app.http.post(f"/v1/sessions/{sid}/{path}", json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    # such a session may be in the store from an older version
    old = Session("sess_old", "", "", "", time.time(), time.time(), [Message("msg_u", None, "user", "hush")])
    await app.store.create(old)
    response = await app.http.post("/v1/sessions/sess_old/messages", json={"content": "x"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "parent_id"
    url = "/v1/sessions/sess_old/messages/msg_u/regenerate"
    async with app.http.stream("POST", url, json={"max_tokens": 3}) as r:
        assert (await read_answer(r)).done
    assert (await app.turn("sess_old", "goes on")).done
    assert [m["role"] for m in (await app.read("sess_old"))["messages"]] == ["user", "assistant"] * 2


SWALLOWED: list[tuple[dict[str, Any], int]] = [
    ({"model": "another"}, 404),
    ({"stream": False}, 400),
    ({"role": "system"}, 400),
    ({"messages": [{"role": "user", "content": "x"}]}, 400),
    ({"logprobs": True}, 400),
    ({"best_of": 2}, 400),
    ({"use_beam_search": True}, 400),
    ({"continue_final_message": True}, 400),
    ({"system": "S"}, 400),
    ({"prompt": "x"}, 400),
    ({"tools": [{}]}, 400),
]


@pytest.mark.parametrize(("field", "status"), SWALLOWED)
async def test_a_turn_swallows_no_field(slow: Running, field: dict[str, Any], status: int) -> None:
    sid = await slow.session()
    await slow.turn(sid, "one", max_tokens=2)
    mid = last(await slow.read(sid))["id"]
    body = {"content": "x", "max_tokens": 500}
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        await read_answer(r, until=1)
    for path, own in (("messages", {"content": "x"}), (f"messages/{mid}/regenerate", {})):
        if not own and "continue_final_message" in field:
            continue  # regenerate has it
        response = await slow.http.post(f"/v1/sessions/{sid}/{path}", json={**own, **field})
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == next(iter(field))
    assert slow.turns.running(("", sid)) is not None, "a wrong request does not end the running turn"


async def test_fields_that_ask_for_nothing_are_taken(app: Running) -> None:
    sid = await app.session()
    fields = {"model": "tiny", "stream": True, "role": "user", "logprobs": False, "messages": None, "best_of": 1}
    assert (await app.turn(sid, **fields)).done
    refused = [
        ("", {"messages": []}),
        (f"/{sid}/fork", {"message_id": last(await app.read(sid))["id"], "content": "x"}),
    ]
    for path, body in refused:
        assert (await app.http.post(f"/v1/sessions{path}", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "content"),
        ({"content": ""}, "content"),
        ({"content": 1}, "content"),
        ({"content": "x", "parent_id": "nothing"}, "parent_id"),
        ({"content": "x", "n": 2}, "n"),
        ({"content": "x", "max_tokens": 100_000}, "max_tokens"),
        ({"content": "x", "temperature": 3}, "temperature"),
        ({"content": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"content": "word " * 9000}, "content"),
    ],
)
async def test_what_is_refused_leaves_no_trace(app: Running, body: dict[str, Any], param: str) -> None:
    sid = await app.session()
    response = await app.http.post(f"/v1/sessions/{sid}/messages", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert (await app.read(sid))["messages"] == []
    assert (await app.http.post("/v1/sessions/sess_0/messages", json={"content": "x"})).status_code == 404


async def test_null_fields_are_absent(app: Running) -> None:
    sid = await app.session(title=None, system=None)
    assert (await app.turn(sid, parent_id=None, temperature=None, n=None, seed=None)).done


async def test_a_full_queue_leaves_no_trace(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sid = await app.session()

    def full(**kwargs: Any) -> Any:
        raise Overloaded("the queue is full", status=429, retry_after=2)

    monkeypatch.setattr(app.engine, "generate", full)
    response = await app.http.post(f"/v1/sessions/{sid}/messages", json={"content": "x"})
    assert response.status_code == 429 and response.headers["retry-after"] == "2"
    assert (await app.read(sid))["messages"] == []


class FlakyStore(MemoryStore):
    """Fails when told to."""

    broken = False

    async def append(self, *args: Any) -> None:
        self._check()
        await super().append(*args)

    async def update_message(self, *args: Any) -> None:
        self._check()
        await super().update_message(*args)

    def _check(self) -> None:
        if self.broken:
            raise StoreError("away")


async def test_a_store_that_is_away_refuses_turns_and_stops_no_running_one() -> None:
    store = FlakyStore(3600)
    async with serving(store, step=0.005) as app:
        sid, other = await app.session(), await app.session()
        body = {"content": "x", "max_tokens": 40}
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            await read_answer(r, until=2)
            store.broken = True
            refused = await app.http.post(f"/v1/sessions/{other}/messages", json={"content": "y"})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            reading = asyncio.create_task(read_answer(r))
            await app.idle()
            await asyncio.sleep(0.3)
            store.broken = False
            rest = await reading
        assert rest.done
        stored = last(await app.read(sid))
        assert stored["status"] == "done" and stored["usage"]["completion_tokens"] == 40
        assert (await app.read(other))["messages"] == []


async def test_an_append_that_came_late_does_not_lock_the_session() -> None:
    """The store took the turn after its caller had been told 503, and was away when that was to be set right."""
    store = FlakyStore(3600)
    async with serving(store) as app:
        sid = await app.session()
        late = [Message("msg_u", None, "user", "x"), Message("msg_a", "msg_u", "assistant", "", "running")]
        await MemoryStore.append(store, "", sid, late)
        assert (await app.turn(sid, "next", max_tokens=3)).done
        statuses = [m["status"] for m in (await app.read(sid))["messages"]]
        assert statuses == ["done", "interrupted", "done", "done"]


async def test_running_text_is_written_down_and_stays_after_a_crash(tmp_path: Any) -> None:
    from chatsvc.sessions.sqlite import SqliteStore

    store = SqliteStore(tmp_path / "s.db", 3600)
    async with serving(store, step=0.01) as app:
        sid = await app.session()
        body = {"content": "x", "max_tokens": 400}
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            await read_answer(r, until=150)
            written = (await store.get("", sid)).messages[1]  # type: ignore[union-attr]
            assert written.status == "running" and len(written.token_ids) > 20 and written.content
            app.turns._try = None  # type: ignore[assignment, method-assign]  # as if killed now: nothing more is written
            for turn in app.turns._turns.values():
                assert turn.task is not None
                turn.task.cancel()
                turn.saved.set()
    again = SqliteStore(tmp_path / "s.db", 3600)
    async with serving(again) as app:
        stored = last(await app.read(sid))
        assert stored["status"] == "interrupted" and stored["content"].startswith(written.content)
        assert (await app.turn(sid, "go on")).done


async def test_stopping_the_server_interrupts_and_stores(tmp_path: Any) -> None:
    from chatsvc.sessions.sqlite import SqliteStore

    async with serving(SqliteStore(tmp_path / "s.db", 3600), step=0.01) as app:
        sid = await app.session()
        body = {"content": "x", "max_tokens": 4000}
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
            part = await read_answer(r, until=5)
            await app.engine.stop()
            rest = await read_answer(r)
        assert not rest.done and rest.error is not None  # no cut answer looks whole
    store = SqliteStore(tmp_path / "s.db", 3600)
    await store.open()
    stored = (await store.get("", sid)).messages[1]  # type: ignore[union-attr]
    await store.close()
    assert stored.status == "interrupted" and stored.content == part.text + rest.text


async def test_a_deleted_session_ends_its_turn(slow: Running) -> None:
    sid = await slow.session()
    body = {"content": "x", "max_tokens": 4000}
    async with slow.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
        await read_answer(r, until=2)
        assert (await slow.http.delete(f"/v1/sessions/{sid}")).status_code == 200
        assert (await read_answer(r)).done
    await slow.idle()
    assert (await slow.http.get(f"/v1/sessions/{sid}")).status_code == 404


async def test_se_08_another_tenant_finds_nothing(app: Running) -> None:
    """Tenants come with API keys; here the session is put into the store by hand."""
    await app.store.create(Session("sess_theirs", "them", "secret", "", 1, 1, [Message("msg_1", None, "user", "hush")]))
    calls = [
        ("GET", "", None),
        ("PATCH", "", {"title": "mine"}),
        ("DELETE", "", None),
        ("POST", "/messages", {"content": "x"}),
        ("POST", "/messages/msg_1/regenerate", {}),
        ("POST", "/fork", {"message_id": "msg_1"}),
        ("POST", "/cancel", None),
        ("GET", "/stream", None),
    ]
    for method, path, body in calls:
        response = await app.http.request(method, f"/v1/sessions/sess_theirs{path}", json=body)
        assert response.status_code == 404, path
    assert (await app.http.get("/v1/sessions")).json()["data"] == []
