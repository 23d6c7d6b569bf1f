"""SH-08: an answer may take so long and no longer, by the caller's header or the server's flag."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from doorserver import CHAT, MESSAGES, Running, secret_of, serving

from chatsvc.api.desk import asked_timeout, shorter
from chatsvc.api.services import ApiSettings
from chatsvc.errors import InvalidRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}
SOON = {"X-Request-Timeout": "0.3"}
WORDS = "The answer was not complete within 0.3 seconds"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door() -> AsyncIterator[Running]:
    async with serving(
        step=0.005, blocks=2048, ann={"max_concurrent": 1, "tokens_per_minute": 10**6}, bob={}
    ) as running:
        yield running


async def nothing_left(door: Running) -> None:
    await door.idle()
    await door.until(lambda: door.running("ann") == 0)
    assert door.engine.scheduler.manager.pool.num_used == 0


async def test_SH_08_before_the_first_byte_it_is_408(door: Running) -> None:
    for path, body in (
        (CHAT, ENDLESS),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4000, "ignore_eos": True}),
    ):
        answer = await door["ann"].post(path, json=body, headers=SOON)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["code"]) == (408, WORDS, "request_timeout")
        assert answer.headers.get("connection") != "close" and answer.headers["x-should-retry"] == "false"
        await nothing_left(door)


async def test_SH_08_later_it_is_an_error_event_and_no_end_that_looks_whole(door: Running) -> None:
    async with door["ann"].stream("POST", CHAT, json={**ENDLESS, "stream": True}, headers=SOON) as stream:
        text = (await stream.aread()).decode()
    events = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert stream.status_code == 200
    assert events[-1].startswith("event: error\n") and "[DONE]" not in text and '"finish_reason":"' not in text
    assert json.loads(events[-1].split("data: ")[1])["error"]["message"] == WORDS
    await nothing_left(door)


async def test_SH_08_in_the_queue_too(door: Running) -> None:
    """The step never comes: other requests have taken every place of the batch."""
    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(door["bob"].post(CHAT, json={**ENDLESS, "max_tokens": 150})) for _ in range(70)]
        await door.until(lambda: door.engine.num_requests == 70)
        late = await door["ann"].post(CHAT, json={**ENDLESS, "max_tokens": 1}, headers={"X-Request-Timeout": "0.02"})
        assert late.status_code == 408
    assert all(job.result().status_code == 200 for job in jobs)
    await nothing_left(door)


async def test_SH_08_a_turn_ends_as_failed_and_keeps_its_text(door: Running) -> None:
    made = (await door["ann"].post("/v1/sessions", json={})).json()["id"]
    body = {"content": "x", "max_tokens": 4000, "ignore_eos": True}
    answer = await door["ann"].post(f"/v1/sessions/{made}/messages", json=body, headers=SOON)
    assert answer.status_code == 200 and "event: error\n" in answer.text and WORDS in answer.text
    message = (await door["ann"].get(f"/v1/sessions/{made}")).json()["messages"][-1]
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c.get("choices"))
    assert (message["status"], message["content"], message["finish_reason"]) == ("failed", told, None)
    await nothing_left(door)


async def test_an_answer_in_time_is_not_touched(door: Running) -> None:
    for headers in ({"X-Request-Timeout": "60"}, {"X-Request-Timeout": "9999999"}, {}):
        answer = await door["ann"].post(CHAT, json={**ENDLESS, "max_tokens": 5}, headers=headers)
        assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_openais_clients_do_not_ask_again(door: Running) -> None:
    """Their own timeout is no deadline: x-stainless-timeout is the longest silence they bear."""
    asked: list[httpx.Request] = []

    async def count(request: httpx.Request) -> None:
        asked.append(request)

    http = openai.DefaultAsyncHttpxClient(trust_env=False, event_hooks={"request": [count]})
    async with openai.AsyncOpenAI(base_url=door.url + "/v1", api_key=secret_of("bob"), http_client=http) as sdk:
        with pytest.raises(openai.APIStatusError) as caught:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, extra_headers=SOON, max_tokens=4000)  # type: ignore[arg-type]
    assert caught.value.status_code == 408 and len(asked) == 1 and "x-stainless-read-timeout" in asked[0].headers


@pytest.mark.parametrize("value", ["", "0", "0.0", "-1", "soon", "1e3", "inf", "nan", "30s", "99999999", "1,5", "٣"])
async def test_a_header_that_is_no_time_is_400(door: Running, value: str) -> None:
    answer = await door["ann"].post(CHAT, json=ENDLESS, headers={"X-Request-Timeout": value.encode()})  # type: ignore[dict-item]
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "X-Request-Timeout")
    assert "above 0 and up to 9999999" in error["message"]
    assert door.running("ann") == 0


async def test_the_shorter_of_header_and_flag_counts() -> None:
    async with serving(step=0.005, settings=ApiSettings(request_timeout=0.3), ann={}) as door:
        for headers in ({}, {"X-Request-Timeout": "60"}):
            assert (await door["ann"].post(CHAT, json=ENDLESS, headers=headers)).json()["error"]["message"] == WORDS
        answer = await door["ann"].post(CHAT, json=ENDLESS, headers={"X-Request-Timeout": "0.05"})
        assert "within 0.05 seconds" in answer.text
    assert (shorter(None, None), shorter(2, None), shorter(None, 3), shorter(2, 3)) == (None, 2, 3, 2)
    assert asked_timeout(" 2.5\t") == 2.5 and asked_timeout("2.3000000000000003") == 2.3000000000000003
    assert asked_timeout(None) is None
    with pytest.raises(InvalidRequest):
        asked_timeout("9999999.5")
