"""The openai package, unmodified."""

from __future__ import annotations

import httpx
import openai
import pytest
from scripted import ScriptedEngine, Server, text_script
from wire import CHAT


def test_sync(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = text_script("שלום 👩‍👦")
    answer = sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, n=2)
    assert [c.message.content for c in answer.choices] == ["שלום 👩‍👦"] * 2
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25
    assert answer._request_id


def test_sync_stream_and_helper(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(**CHAT, stream=True) as chunks:
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello 0"
    with sdk.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hi"}], n=2) as run:
        kinds = [event.type for event in run]
        final = run.get_final_completion()
    assert [c.message.content for c in final.choices] == ["Hello 0", "Hello 1"]
    assert kinds.count("content.done") == 2


def test_leaving_a_stream_early(sdk: openai.OpenAI, server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script("x" * 900)
    for _ in range(5):
        with sdk.chat.completions.create(**CHAT, stream=True) as chunks:
            for _, chunk in zip(range(3), chunks):
                server.call(engine.gate.clear)
                assert chunk.choices
        server.until(lambda e: not e.running)
        server.call(engine.gate.set)
    assert sdk.chat.completions.create(**CHAT, max_tokens=2).choices[0].finish_reason == "length"


def test_raw_response(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers["x-request-id"] == raw.request_id
    assert raw.parse().choices[0].message.content == "Hello 0"
    with sdk.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_completions_models_and_extra_fields(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = sdk.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, extra_body={"top_k": 3, "min_p": 0.1})
    assert [c.text for c in answer.choices] == ["Hello 0"] * 2
    assert {(p.params.top_k, p.params.min_p) for p in engine.plays} == {(3, 0.1)}
    chunks = list(sdk.completions.create(model="tiny", prompt="a", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "Hello 0"
    assert [m.id for m in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"


async def test_async(server: Server, engine: ScriptedEngine) -> None:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(trust_env=False)
    ) as sdk:
        assert (await sdk.chat.completions.create(**CHAT)).choices[0].message.content == "Hello 0"
        stream = await sdk.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [c async for c in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 0"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError):
            await sdk.chat.completions.create(model="tiny", messages=[], stream=True)
        engine.script = text_script("x" * 900)
        stream = await sdk.chat.completions.create(**CHAT, stream=True)
        async for _ in stream:
            server.call(engine.gate.clear)
            break
        await stream.close()
        server.until(lambda e: not e.running)
