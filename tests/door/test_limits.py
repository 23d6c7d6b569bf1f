"""Quotas over HTTP: what is counted, what is given back, and what is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from doorserver import CHAT, MESSAGES, Running, digest_of, secret_of, serving

from chatsvc.engine.config import EngineConfig
from chatsvc.errors import Overloaded
from chatsvc.sessions.base import Session

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHORT = {"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True}
ENDLESS = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}
TRACE = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
PER_MINUTE = "requests_per_minute"
KEYS: dict[str, dict[str, Any]] = {
    "slow": {PER_MINUTE: 2},
    "batch": {PER_MINUTE: 2},
    "small": {"tokens_per_minute": 600},
    "left": {"tokens_per_minute": 100_000},
    "refused": {PER_MINUTE: 5, "tokens_per_minute": 1000, "max_concurrent": 1},
    "two": {"max_concurrent": 2},
    "three": {"max_concurrent": 2},
    "four": {"max_concurrent": 2},
    "heavy": {"max_concurrent": 4},
    "one": {"max_concurrent": 1},
    "free": {},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door() -> AsyncIterator[Running]:
    async with serving(
        step=0.002, blocks=4096, config=EngineConfig(cache_secret=b"s", max_queue=400), **KEYS
    ) as running:
        yield running


@asynccontextmanager
async def streamed(http: httpx.AsyncClient, path: str = CHAT, body: Any = None) -> AsyncIterator[str]:
    """A stream whose first token has come; leaves it by closing the connection."""
    async with http.stream("POST", path, json=body or {**ENDLESS, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield str(json.loads(line[6:])["id"])
                return


def remaining(answer: httpx.Response, of: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{of}"])


async def test_SH_06_requests_a_minute(door: Running) -> None:
    http = door["slow"]
    first, second = await http.post(CHAT, json=SHORT), await http.post(CHAT, json=SHORT)
    assert (first.status_code, remaining(first, "requests")) == (200, 1)
    assert (second.status_code, remaining(second, "requests")) == (200, 0)
    assert second.headers["x-ratelimit-limit-requests"] == "2" and "x-ratelimit-limit-tokens" not in second.headers
    for _ in range(3):  # asking does not make it longer
        answer = await http.post(CHAT, json=SHORT)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert answer.headers["retry-after"] == "30" and answer.headers["x-ratelimit-reset-requests"] == "1m0s"
    door.clock.forward(29)
    assert (await http.post(CHAT, json={**SHORT, "stream": True})).headers["retry-after"] == "1"
    door.clock.forward(1)
    async with http.stream("POST", CHAT, json={**SHORT, "stream": True}) as stream:
        assert stream.status_code == 200 and stream.headers["x-ratelimit-remaining-requests"] == "0"
    # What starts no answer is not counted, nor what is wrong.
    assert (await http.get("/v1/models")).status_code == 200
    assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200
    assert (await http.post(CHAT, json={**SHORT, "n": 0})).status_code == 400
    assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 429
    assert (await http.post("/v1/responses", json={"input": "x"})).status_code == 429
    made = (await http.post("/v1/sessions", json={})).json()["id"]
    assert (await http.post(f"/v1/sessions/{made}/messages", json={"content": "x"})).status_code == 429
    assert (await http.get(f"/v1/sessions/{made}")).json()["messages"] == []  # and leaves nothing behind


async def test_openais_client_waits_as_it_is_told(door: Running) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=door.url + "/v1", api_key=secret_of("slow"), max_retries=0, http_client=http
    ) as sdk:
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        assert caught.value.code == "rate_limit_exceeded" and int(caught.value.response.headers["retry-after"]) > 0


async def test_several_prompts_are_one_request(door: Running) -> None:
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2}
    answer = await door["batch"].post("/v1/completions", json=body)
    assert (answer.status_code, remaining(answer, "requests"), len(answer.json()["choices"])) == (200, 1, 6)
    await door.until(lambda: door.running("batch") == 0)


async def test_tokens_are_prompt_and_answer(door: Running) -> None:
    http = door["small"]
    answer = await http.post(CHAT, json={**SHORT, "max_tokens": 50, "n": 2})
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 100
    assert remaining(answer, "tokens") == 600 - usage["prompt_tokens"]  # when it began
    again = await http.post(CHAT, json={**SHORT, "max_tokens": 700})
    prompt = again.json()["usage"]["prompt_tokens"]
    assert remaining(again, "tokens") == 600 - usage["total_tokens"] - prompt  # the answer settled at its end
    used = usage["total_tokens"] + again.json()["usage"]["total_tokens"]
    assert used > 800  # more than there were: the next one waits until that is paid
    refused = await http.post(CHAT, json=SHORT)
    assert refused.status_code == 429 and remaining(refused, "tokens") == 0
    wait = int(refused.headers["retry-after"])
    assert wait == -(-(used + prompt - 600) * 60 // 600)
    door.clock.forward(wait - 1)
    assert (await http.post(CHAT, json=SHORT)).status_code == 429
    door.clock.forward(1)
    assert (await http.post(CHAT, json=SHORT)).status_code == 200


async def left(door: Running) -> int:
    """Tokens that the key "left" has, as a new answer of one token says: prompt and token of that are put back."""
    account = door.services.quotas._accounts[digest_of("left")]
    return account.tokens.remaining()


async def test_ST_03_who_leaves_gives_the_place_back_and_pays_what_was_made(door: Running) -> None:
    http = door["left"]
    async with streamed(http):
        pass
    await door.until(lambda: door.running("left") == 0)
    await door.idle()
    used = 100_000 - await left(door)
    assert 20 < used < 3000  # the prompt and what was generated until then, not 4,000
    task = asyncio.create_task(http.post(CHAT, json=ENDLESS))  # not streamed
    await door.until(lambda: door.running("left") == 1 and door.engine.num_requests == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await door.until(lambda: door.running("left") == 0)
    await door.idle()  # a step that is in flight has to end first


async def test_what_the_engine_refuses_costs_nothing(door: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    http = door["refused"]

    def full(**_: Any) -> Any:
        raise Overloaded("the queue is full", retry_after=2)

    with monkeypatch.context() as m:
        m.setattr(door.engine, "generate", full)
        for path, body in ((CHAT, SHORT), ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})):
            for _ in range(7):
                answer = await http.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["message"]) == (429, "the queue is full")
                assert (remaining(answer, "requests"), remaining(answer, "tokens")) == (5, 1000)
    assert door.running("refused") == 0
    # The second prompt of two does not fit: the first is taken back, too.
    answer = await http.post("/v1/completions", json={"prompt": [[1] * 600, [2] * 600], "max_tokens": 1})
    assert answer.status_code == 429 and "600" in answer.json()["error"]["message"]
    await door.until(lambda: door.running("refused") == 0)
    await door.idle()
    door.clock.forward(60)
    good = await http.post(CHAT, json=SHORT)
    assert good.status_code == 200 and remaining(good, "requests") == 4

    def broken(**_: Any) -> Any:
        raise RuntimeError("not one of ours")

    with monkeypatch.context() as m:
        m.setattr(door.engine, "generate", broken)
        assert (await http.post(CHAT, json=SHORT)).status_code == 500
    assert door.running("refused") == 0


async def test_a_place_is_taken_until_the_answer_ends_however_it_ends(door: Running) -> None:
    http = door["two"]
    async with streamed(http) as first, streamed(http):
        third = await http.post(CHAT, json=SHORT)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "2 requests" in third.json()["error"]["message"] and third.headers["retry-after"] == "1"
        assert (await door["free"].post(CHAT, json=SHORT)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post(f"/v1/chat/completions/{first}/cancel")).status_code == 200  # cancelled
        await door.until(lambda: door.running("two") == 1)
        assert (await http.post(CHAT, json=SHORT)).status_code == 200  # came to its end
    await door.until(lambda: door.running("two") == 0)  # left
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10**6}
    assert (await http.post(CHAT, json=body)).status_code == 400  # never began
    assert door.running("two") == 0


async def test_an_answer_of_a_session_keeps_its_place_without_a_reader(door: Running) -> None:
    """Or whoever leaves at once could start as many as he likes."""
    http = door["three"]
    bodies = {"content": "x", "max_tokens": 4000, "ignore_eos": True}
    made = [(await http.post("/v1/sessions", json={})).json()["id"] for _ in range(3)]
    for session in made[:2]:
        async with streamed(http, f"/v1/sessions/{session}/messages", bodies):
            pass
    assert door.running("three") == 2
    refused = await http.post(f"/v1/sessions/{made[2]}/messages", json=bodies)
    assert refused.status_code == 429
    for session in made[:2]:
        assert (await http.post(f"/v1/sessions/{session}/cancel")).status_code == 200
    await door.until(lambda: door.running("three") == 0)
    async with streamed(http, f"/v1/sessions/{made[2]}/messages", bodies):
        assert door.running("three") == 1
    assert (await http.delete(f"/v1/sessions/{made[2]}")).status_code == 200
    await door.until(lambda: door.running("three") == 0)


async def test_a_turn_that_the_store_refuses_gives_its_place_back(
    door: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatsvc.errors import StoreError

    http, store = door["four"], door.services.store
    assert store is not None
    made = (await http.post("/v1/sessions", json={})).json()["id"]

    async def broken(*_: Any, **__: Any) -> Session:
        raise StoreError("the store is away")

    with monkeypatch.context() as m:
        m.setattr(store, "append", broken)
        answer = await http.post(f"/v1/sessions/{made}/messages", json={"content": "x", "max_tokens": 4000})
        assert answer.status_code == 503
    await door.until(lambda: door.running("four") == 0)


async def test_SF_05_a_batch_job_does_not_keep_others_waiting(door: Running) -> None:
    body = {**SHORT, "max_tokens": 30}
    jobs = [asyncio.create_task(door["heavy"].post(CHAT, json=body)) for _ in range(200)]
    await door.until(lambda: door.running("heavy") == 4)
    other = await door["free"].post(CHAT, json=SHORT)
    assert other.status_code == 200
    statuses = [answer.status_code for answer in await asyncio.gather(*jobs)]
    assert set(statuses) == {200, 429} and door.running("heavy") == 0
    assert statuses.count(200) >= 4


async def test_OB_04_every_end_has_its_id_and_its_line(door: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Over quota, too late before and after the first byte, left: no prompt in it, and whose it was."""
    caplog.set_level("INFO", "chatsvc.access")
    http = door["one"]
    late = {"X-Request-Timeout": "0.1"}
    async with http.stream(
        "POST", CHAT, json={**ENDLESS, "stream": True}, headers={"X-Request-Id": "ob-left"}
    ) as response:
        await anext(response.aiter_lines())
        over = await http.post(CHAT, json=SHORT, headers={"X-Request-Id": "ob-over"})
        assert (over.status_code, over.headers["x-request-id"]) == (429, "ob-over")
    await door.until(lambda: door.running("one") == 0)
    answer = await http.post(CHAT, json=ENDLESS, headers={"X-Request-Id": "ob-late", **late})
    assert (answer.status_code, answer.headers["x-request-id"]) == (408, "ob-late")
    body = {**ENDLESS, "stream": True}
    answer = await http.post(CHAT, json=body, headers={"X-Request-Id": "ob-cut", **late, "traceparent": TRACE})
    assert "event: error" in answer.text and answer.headers["x-request-id"] == "ob-cut"

    def lines() -> dict[str, dict[str, Any]]:
        found = [json.loads(r.getMessage()) for r in caplog.records if '"ob-' in r.getMessage()]
        return {line["request_id"]: line for line in found}

    await door.until(lambda: len(lines()) == 4)
    told = {name: (x["status"], x["outcome"], x.get("finish")) for name, x in lines().items()}
    assert told == {
        "ob-over": (429, "refused", None),
        "ob-left": (200, "client_gone", ["abort"]),
        "ob-late": (408, "refused", ["error"]),
        "ob-cut": (200, "error", ["error"]),
    }
    assert all(x["key"] == "one" for x in lines().values()) and lines()["ob-cut"]["trace_id"] == TRACE.split("-")[1]
    assert MESSAGES[0]["content"] not in {str(v) for x in lines().values() for v in x.values()}
