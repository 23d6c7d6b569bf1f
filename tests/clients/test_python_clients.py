"""Python clients, unmodified: chat, stream, abort, error, usage. Installed by ``make clients``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from clientserver import MODEL, Clients

# Other people's packages may warn.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

ASKED: list[Any] = [{"role": "user", "content": "Name a colour."}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
LONG = {"ignore_eos": True}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: make clients")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxies, no keys, and no look-ups outside."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


def test_openai(server: Clients) -> None:
    import openai

    with openai.OpenAI(base_url=server.base, api_key="-", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0)
        said = answer.choices[0].message.content
        assert said and answer.usage is not None and answer.usage.completion_tokens <= 8
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=ASKED,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        before = server.aborted()
        with client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=4000, stream=True, extra_body=LONG
        ) as stream:
            next(iter(stream))
        server.expect_abort(before)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=ASKED)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=ASKED, temperature=9)
        assert caught.value.param == "temperature"
        response = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=8, temperature=0)
        assert response.output_text == said


@needs("langchain_openai")
def test_langchain(server: Clients) -> None:
    import openai
    from langchain_core.messages import AIMessageChunk
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {
        "base_url": server.base,
        "api_key": "-",
        "model": MODEL,
        "temperature": 0,
        "max_retries": 0,
    }
    model = ChatOpenAI(**options, max_tokens=8, stream_usage=True)
    answer = model.invoke("Name a colour.")
    assert answer.content and answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] <= 8
    whole = AIMessageChunk(content="")
    for chunk in model.stream("Name a colour."):
        whole = whole + chunk
    assert whole.content == answer.content and whole.usage_metadata == answer.usage_metadata
    called = model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False).invoke(
        "Oslo?", max_tokens=100
    )
    assert all(c["name"] == "weather" for c in called.tool_calls)
    before = server.aborted()
    stream = ChatOpenAI(**options, max_tokens=4000, extra_body=LONG).stream("Name a colour.")
    next(stream)
    stream.close()
    server.expect_abort(before)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**options, "model": "other"}).invoke("x")


@needs("litellm")
def test_litellm(server: Clients) -> None:
    import litellm

    def ask(**fields: Any) -> Any:
        fields = {"model": f"openai/{MODEL}", "max_tokens": 8, "temperature": 0, **fields}
        return litellm.completion(api_base=server.base, api_key="-", messages=ASKED, max_retries=0, **fields)

    answer = ask()
    said = answer.choices[0].message.content
    assert said and answer.usage.completion_tokens <= 8
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [answer.usage.completion_tokens]
    before = server.aborted()
    stream = ask(stream=True, max_tokens=4000, extra_body=LONG)
    next(iter(stream))
    stream.completion_stream.close()
    server.expect_abort(before)
    with pytest.raises(litellm.NotFoundError):
        ask(model="openai/other")
    with pytest.raises(litellm.BadRequestError):
        ask(temperature=9)


def test_huggingface_hub(server: Clients) -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    client = InferenceClient(base_url=server.base, api_key="-")
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0.0)
    said = answer.choices[0].message.content
    assert said and answer.usage.completion_tokens <= 8
    chunks = list(
        client.chat_completion(
            ASKED, model=MODEL, max_tokens=8, temperature=0.0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    before = server.aborted()
    stream = client.chat_completion(ASKED, model=MODEL, max_tokens=4000, stream=True, extra_body=LONG)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    server.expect_abort(before)
    with pytest.raises(HfHubHTTPError) as caught:
        client.chat_completion(ASKED, model="other")
    assert caught.value.response.status_code == 404


@needs("llm")
def test_llm(server: Clients, tmp_path: Path) -> None:
    config = [
        f"- {{model_id: here, model_name: {MODEL}, api_base: '{server.base}', api_key_name: none}}",
        f"- {{model_id: other, model_name: other, api_base: '{server.base}', api_key_name: none}}",
    ]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(config))
    (tmp_path / "keys.json").write_text('{"none": "-"}')
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "llm", "prompt", "-m", *words, "Name a colour."]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(*words), env=env, capture_output=True, text=True, timeout=60)

    short = ("-o", "max_tokens", "8", "-o", "temperature", "0")
    whole, streamed = run("here", "--no-stream", "--usage", *short), run("here", *short)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.strip() and whole.stdout.strip() == streamed.stdout.strip()
    assert "output" in whole.stderr  # the usage
    before = server.aborted()
    long = command(
        "here", "-o", "max_tokens", "4000", "-o", "temperature", "1", "-o", "logit_bias", '{"2": -100, "0": -100}'
    )
    with subprocess.Popen(long, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
    server.expect_abort(before)
    wrong = run("other", *short)
    assert wrong.returncode != 0 and MODEL in wrong.stderr
