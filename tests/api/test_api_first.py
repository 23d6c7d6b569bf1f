"""The first light: one chat, whole and streamed."""

from __future__ import annotations

import httpx
import openai


def test_chat_whole_and_streamed(http: httpx.Client, sdk: openai.OpenAI) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello 0"
    stream = sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 0"
    assert chunks[-1].usage.total_tokens == answer.json()["usage"]["total_tokens"]
