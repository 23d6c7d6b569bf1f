"""What goes wrong around a turn: bad neighbours, a stuck engine, a full queue, odd text, long silence."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import pytest
from sessionserver import read_answer, serving, text_side

from chatsvc.runtime.simulated import hashed_token
from chatsvc.sessions.memory import MemoryStore

BAD: list[dict[str, Any]] = [
    {},
    {"content": 1},
    {"content": "x", "n": 2**40},
    {"content": "x", "n": -1},
    {"content": "x", "max_tokens": -1},
    {"content": "x", "temperature": float("1e308")},
    {"content": "x", "top_logprobs": 10**6},
    {"content": "x", "logit_bias": {"a": 1}},
    {"content": "x", "stop": [""] * 5000},
    {"content": "x", "parent_id": "nothing"},
    {"content": "word " * 9000},
    {"content": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": "(((("}}},
]


async def test_sh_01_se_01_se_02_bad_requests_harm_no_running_turn() -> None:
    """Only the guilty are refused; those who stream beside them hear nothing of it."""
    async with serving(MemoryStore(3600), step=0.005) as app:
        good = [asyncio.create_task(app.turn(await app.session(), max_tokens=200)) for _ in range(4)]
        sid = await app.session()
        for body in BAD:
            refused = await app.http.post(f"/v1/sessions/{sid}/messages", json=body)
            assert refused.status_code == 400, (body, refused.text[:200])
        raw = await app.http.post(
            f"/v1/sessions/{sid}/messages", content=b'{"content":', headers={"Content-Type": "application/json"}
        )
        assert raw.status_code == 400
        answers = await asyncio.gather(*good)
        assert all(a.done and a.usage is not None and a.usage["completion_tokens"] == 200 for a in answers)
        assert (await app.read(sid))["messages"] == []
        assert (await app.http.get("/health")).status_code == 200
        await app.idle()
        assert app.engine.scheduler.manager.pool.num_used == 0


async def test_sh_01_a_row_that_fails_ends_its_turn_alone() -> None:
    random_token = hashed_token(17, text_side()[0].vocab_size)

    def cursed(context: Any, row: Any) -> int:
        if row.sampling.params.seed == 666 and row.sampling.position > 60:
            raise ValueError("the sampler broke")
        return random_token(context, row)

    async with serving(MemoryStore(3600), token_fn=cursed) as app:
        sids = [await app.session() for _ in range(5)]
        turns = [app.turn(sid, max_tokens=150, seed=666 if i == 2 else i) for i, sid in enumerate(sids)]
        answers = await asyncio.gather(*turns)
        assert [a.done for a in answers] == [True, True, False, True, True]
        assert answers[2].error is not None
        message = (await app.read(sids[2]))["messages"][1]
        assert message["status"] == "failed" and message["content"] == answers[2].text
        assert (await app.turn(sids[2], "again", max_tokens=5, seed=1)).done


async def test_sh_02_a_stuck_engine_is_seen_and_its_turns_get_an_error() -> None:
    gate = threading.Event()
    random_token = hashed_token(17, text_side()[0].vocab_size)
    sampled = itertools.count()

    def stuck(context: Any, row: Any) -> int:
        assert next(sampled) < 5 or gate.wait(30)
        return random_token(context, row)

    async with serving(MemoryStore(3600), token_fn=stuck, stuck_after=0.3, give_up_after=1.0) as app:
        sid, other = await app.session(), await app.session()
        turn = asyncio.create_task(app.turn(sid, max_tokens=50))
        async with asyncio.timeout(20):
            while (await app.http.get("/ready")).status_code == 200:
                await asyncio.sleep(0.02)
        assert (await app.http.get("/health")).status_code == 503
        refused = await app.http.post(f"/v1/sessions/{other}/messages", json={"content": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        answer = await turn
        assert answer.error is not None and not answer.done
        message = (await app.read(sid))["messages"][1]
        assert message["status"] in ("failed", "interrupted") and message["content"] == answer.text
        gate.set()


async def test_sh_06_a_full_queue_says_so_at_once_and_leaves_no_trace() -> None:
    async with serving(MemoryStore(3600), step=0.01, max_queue=4, max_num_seqs=2) as app:
        sids = [await app.session() for _ in range(20)]

        async def post(sid: str) -> tuple[int, bool]:
            body = {"content": "x", "max_tokens": 30}
            async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as r:
                if r.status_code != 200:
                    assert r.headers["retry-after"]
                    return r.status_code, json.loads(await r.aread())["error"]["type"] == "rate_limit_error"
                return r.status_code, (await read_answer(r)).done

        results = await asyncio.gather(*(post(sid) for sid in sids))
        assert {status for status, _ in results} == {200, 429} and all(well for _, well in results)
        for sid, (status, _) in zip(sids, results, strict=True):
            assert len((await app.read(sid))["messages"]) == (2 if status == 200 else 0)
        assert (await app.turn(sids[-1], max_tokens=3)).done  # and it recovers by itself


async def test_st_04_st_05_odd_text_is_streamed_as_it_is_stored() -> None:
    """Emoji of several parts, CJK, accents, right-to-left, token by token; cut inside a character at every place."""
    tokenizer, _ = text_side()
    text = "naïve 漢字 👩‍👩‍👧 שלום ﷽ é 🏴󠁧󠁢󠁥󠁮󠁧󠁿!"
    ids = tokenizer.encode(text)

    def scripted(context: Any, row: Any) -> int:
        return ids[(row.sampling.position - base[0]) % len(ids)]

    base = [0]
    async with serving(MemoryStore(3600), token_fn=scripted) as app:
        sid = await app.session()
        probe = await app.turn(sid, max_tokens=1)
        assert probe.usage is not None
        base[0] = probe.usage["prompt_tokens"]
        for cut in range(1, len(ids) + 1):
            answer = await app.turn(sid, "hi", parent_id="root", max_tokens=cut)
            message = (await app.read(sid))["messages"][-1]
            assert answer.text == message["content"] and answer.usage is not None
            assert answer.usage["completion_tokens"] == cut
            assert text.startswith(answer.text.rstrip("�"))
        assert answer.text == text and "�" not in text


async def test_st_08_the_end_of_a_turns_stream_byte_for_byte() -> None:
    """ST-11 and ST-13 too: headers, LF only, one finish reason, usage, [DONE] last."""
    async with serving(MemoryStore(3600)) as app:
        for limit in (1, 7):
            sid = await app.session()
            url = f"/v1/sessions/{sid}/messages"
            headers = {"Accept-Encoding": "gzip"}
            async with app.http.stream("POST", url, json={"content": "x", "max_tokens": limit}, headers=headers) as r:
                raw = await r.aread()
            assert r.headers["content-type"].startswith("text/event-stream")
            assert r.headers["cache-control"] == "no-cache" and r.headers["x-accel-buffering"] == "no"
            assert "content-encoding" not in r.headers
            assert b"\r" not in raw and raw.endswith(b"\n\ndata: [DONE]\n\n")
            events = [e for e in raw.decode().split("\n\n") if e and not e.startswith(":")]
            chunks = [json.loads(e.split("data: ", 1)[1]) for e in events[:-1]]
            assert all(e.count("data: ") == 1 for e in events)
            choices = [c["choices"][0] for c in chunks if c["choices"]]
            reasons = [c["finish_reason"] for c in choices]
            assert reasons[-1] == "length" and set(reasons[:-1]) <= {None} and all("delta" in c for c in choices)
            assert choices[0]["delta"]["role"] == "assistant"
            assert [c["usage"] is not None for c in chunks] == [False] * len(choices) + [True]


async def test_st_10_a_turn_that_waits_is_kept_alive_by_comments() -> None:
    gate = threading.Event()
    random_token = hashed_token(17, text_side()[0].vocab_size)

    def gated(context: Any, row: Any) -> int:
        assert gate.wait(20)
        return random_token(context, row)

    async with serving(MemoryStore(3600), token_fn=gated, ping=0.05) as app:
        sid = await app.session()
        async with app.http.stream("POST", f"/v1/sessions/{sid}/messages", json={"content": "x", "max_tokens": 3}) as r:
            lines = r.extensions["lines"] = r.aiter_lines()
            comments = 0
            while comments < 3:
                line = await anext(lines)
                assert line in (": ping", ""), line
                comments += line == ": ping"
            gate.set()
            assert (await read_answer(r)).done


@pytest.mark.parametrize("n", [129, 10**6, 2**40, -1, 0, "3", 1.5])
async def test_se_01_a_turn_has_one_answer(n: Any) -> None:
    async with serving(MemoryStore(3600)) as app:
        sid = await app.session()
        refused = await app.http.post(f"/v1/sessions/{sid}/messages", json={"content": "x", "n": n})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


async def test_se_06_a_turn_ends_at_the_end_of_the_context() -> None:
    async with serving(MemoryStore(3600), blocks=20) as app:
        sid = await app.session()
        answer = await app.turn(sid, max_tokens=None)
        assert answer.finish == "length" and answer.usage is not None
        assert answer.usage["total_tokens"] in (319, 320)
        refused = await app.http.post(f"/v1/sessions/{sid}/messages", json={"content": "and more"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert (await app.turn(sid, "x", parent_id="root", max_tokens=3)).done
