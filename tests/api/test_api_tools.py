"""Tools: what the model is shown, what it says, and what the client gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted import PlainTemplate, ScriptedEngine, Server, text_script
from test_api_fields import prompt_of, refused
from wire import CHAT, stream

from chatsvc.api.answers_schema import ChatChunk, ChatCompletion

Post = Callable[..., httpx.Response]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
OSLO, NONE = '{"city": "Oslo \\u2028 é</tool_call>"}', "{}"
TWO = f"""Let me look. <tool_call>
{{"name": "weather", "arguments": {OSLO}}}
</tool_call>
<tool_call>
{{"name": "clock", "arguments": {NONE}}}
</tool_call>"""


@pytest.fixture
def chat(http: httpx.Client) -> Post:
    return lambda **fields: http.post("/v1/chat/completions", json={**CHAT, "tools": [WEATHER, CLOCK], **fields})


@pytest.fixture(scope="module")
def native_server() -> Iterator[Server]:
    with Server(template=PlainTemplate(knows_tools=True)) as server:
        yield server


def joined(chunks: list[Any], index: int = 0) -> tuple[str, list[dict[str, Any]], str]:
    """(content, calls, finish_reason) of a choice, put together as OpenAI's clients do it."""
    content, finish = "", ""
    calls: list[dict[str, Any]] = []
    for chunk in chunks[:-1]:
        ChatChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            content += choice["delta"].get("content", "")
            finish = choice["finish_reason"] or finish
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls) and call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert call["index"] == len(calls) - 1 and set(call["function"]) == {"arguments"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return content, calls, finish


@pytest.mark.parametrize("burst", [1, 2, 3, 7, 1000])
def test_calls_are_parsed_streamed_and_whole(chat: Post, server: Server, engine: ScriptedEngine, burst: int) -> None:
    engine.script, engine.burst = text_script(TWO), burst
    whole = chat().json()
    ChatCompletion.model_validate(whole)
    message = whole["choices"][0]["message"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look." and message["role"] == "assistant"
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "weather", "arguments": OSLO},
        {"name": "clock", "arguments": NONE},
    ]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    content, calls, finish = joined(stream(server.port, {**CHAT, "tools": [WEATHER, CLOCK]}))
    assert (content, finish) == (message["content"], "tool_calls")
    assert [c["function"] for c in calls] == [c["function"] for c in message["tool_calls"]]


def test_arguments_are_streamed_while_they_are_written(server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script(TWO)
    chunks = stream(server.port, {**CHAT, "tools": [WEATHER, CLOCK]})
    pieces = [c for e in chunks[:-1] for ch in e["choices"] for c in ch["delta"].get("tool_calls", ())]
    assert len(pieces) > 20


def test_only_calls(chat: Post, engine: ScriptedEngine) -> None:
    engine.script = text_script(f'<tool_call>[{{"name": "clock", "arguments": {NONE}}}]</tool_call>')
    message = chat().json()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["function"] == {"name": "clock", "arguments": NONE}


@pytest.mark.parametrize("output", ["<tool_call>{broken}</tool_call>", "a < b, see <tool_call", "Just words.", ""])
def test_what_is_no_call_is_content(chat: Post, server: Server, engine: ScriptedEngine, output: str) -> None:
    engine.script = text_script(output)
    choice = chat().json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": output, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert joined(stream(server.port, {**CHAT, "tools": [WEATHER]})) == (output, [], "stop")


def test_a_call_that_breaks_when_it_was_begun(chat: Post, server: Server, engine: ScriptedEngine) -> None:
    output = '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>'
    engine.script = text_script(output)
    choice = chat().json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": output, "refusal": None}
    content, calls, finish = joined(stream(server.port, {**CHAT, "tools": [WEATHER]}))
    assert [c["function"]["arguments"] for c in calls] == ['{"city": '] and content == "oops}}</tool_call>"
    assert finish == choice["finish_reason"] == "stop"  # nobody is to make that call


def test_a_call_that_the_cap_cuts_off(chat: Post, server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script(TWO)
    for cap in range(1, len(TWO.encode()), 7):
        choice = chat(max_tokens=cap).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert joined(stream(server.port, {**CHAT, "tools": [WEATHER], "max_tokens": cap}))[2] == "length"
        if "tool_calls" not in choice["message"]:
            assert choice["message"]["content"].startswith(TWO[: max(0, cap - 20)])


def test_several_choices_and_logprobs(server: Server, engine: ScriptedEngine) -> None:
    def script(prompt: list[int], params: Any, choice: int) -> list[int]:
        return [*(TWO if choice == 1 else "Words here").encode(), 256]

    engine.script = script
    body = {**CHAT, "tools": [WEATHER, CLOCK], "n": 2, "logprobs": True, "top_logprobs": 1}
    chunks = stream(server.port, body)
    assert joined(chunks, 0) == ("Words here", [], "stop")
    content, calls, finish = joined(chunks, 1)
    assert (content, len(calls), finish) == ("Let me look.", 2, "tool_calls")
    for index, length in ((0, len(b"Words here") + 1), (1, len(TWO.encode()) + 1)):
        entries = [
            entry
            for e in chunks[:-1]
            for c in e["choices"]
            if c["index"] == index and c["logprobs"]
            for entry in c["logprobs"]["content"]
        ]
        assert len(entries) == length  # every token is reported once, also those inside calls


def test_parallel_tool_calls_false(chat: Post, server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script(TWO)
    message = chat(parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]
    body = {**CHAT, "tools": [WEATHER], "parallel_tool_calls": False}
    assert len(joined(stream(server.port, body))[1]) == 1


# -- the prompt ----------------------------------------------------------------------------------------------------


def test_a_template_without_tools_gets_them_as_words(chat: Post, engine: ScriptedEngine) -> None:
    assert chat().status_code == 200
    shown = prompt_of(engine)
    assert shown.startswith("system: You can call functions.") and '"name": "weather"' in shown
    assert shown.endswith("user: hiassistant: ")


def test_a_template_with_tools_gets_them(native_server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]
    url = native_server.url + "/v1/chat/completions"
    body = {"messages": history, "tools": [WEATHER, CLOCK]}
    assert httpx.post(url, json=body, trust_env=False).status_code == 200
    assert prompt_of(native_server.engine) == "weather clock\nuser: qassistant: f{'a': 1}tool: rassistant: "
    forced = {"type": "function", "function": {"name": "clock"}}
    assert httpx.post(url, json={**body, "tool_choice": forced}, trust_env=False).status_code == 200
    assert prompt_of(native_server.engine).endswith('assistant: <tool_call>\n{"name": "clock", "arguments":')


def test_tool_choice_none_shows_no_tools_and_reads_no_calls(chat: Post, engine: ScriptedEngine) -> None:
    engine.script = text_script(TWO)
    choice = chat(tool_choice="none").json()["choices"][0]
    assert prompt_of(engine) == "user: hiassistant: "
    assert choice["message"]["content"] == TWO and choice["finish_reason"] == "stop"


def test_a_named_choice_forces_the_call(chat: Post, server: Server, engine: ScriptedEngine) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    engine.script = text_script(' {"zone": "CET"}}, {"name": "clock"}]</tool_call> And more.')
    answer = chat(tool_choice=named).json()
    assert prompt_of(engine).endswith('assistant: <tool_call>[{"name": "clock", "arguments":')
    assert answer["usage"]["prompt_tokens"] == len(engine.plays[-1].prompt)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"zone": "CET"}'}
    chunks = stream(server.port, {**CHAT, "tools": [WEATHER, CLOCK], "tool_choice": named})
    content, calls, finish = joined(chunks)
    assert (content, finish) == ("", "tool_calls") and calls[0]["function"]["name"] == "clock"
    first = chunks[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": ""}


def test_required_forces_a_call(chat: Post, engine: ScriptedEngine) -> None:
    engine.script = text_script(' "weather", "arguments": {"city": "Rome"}}]</tool_call>')
    choice = chat(tool_choice="required").json()["choices"][0]
    assert prompt_of(engine).endswith('assistant: <tool_call>[{"name":')
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert choice["finish_reason"] == "tool_calls"
    assert chat(tool_choice="required", tools=[CLOCK]).status_code == 200  # no choice: it is the one there is
    assert prompt_of(engine).endswith('assistant: <tool_call>[{"name": "clock", "arguments":')


def test_a_forced_call_that_the_model_spoils_loses_nothing(chat: Post, engine: ScriptedEngine) -> None:
    engine.script = text_script(' "nobody", "arguments": {}}]</tool_call>')
    choice = chat(tool_choice="required").json()["choices"][0]
    assert choice["message"]["content"] == '<tool_call>[{"name": "nobody", "arguments": {}}]'
    engine.script = text_script(" I would rather not.")
    choice = chat(tool_choice="required").json()["choices"][0]
    assert choice["message"]["content"] == '<tool_call>[{"name": I would rather not.'
    assert choice["finish_reason"] == "stop"


def test_bad_tools_are_refused_by_name(chat: Post, http: httpx.Client) -> None:
    def function(**fields: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", **fields}}

    for tools, param in (
        ([function(strict=True)], "tools.0.function.strict"),
        ([CLOCK, function(name="no spaces")], "tools.1.function.name"),
        ([function(name="x" * 65)], "tools.0.function.name"),
        ([function(parameters=[])], "tools.0.function.parameters"),
        ([CLOCK, CLOCK], "tools.1.function.name"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools.0.type"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([{"type": "function"}], "tools.0.function"),
        ("x", "tools"),
        ([CLOCK] * 129, "tools"),
    ):
        refused(chat(tools=tools), param)
    refused(chat(tool_choice="sometimes"), "tool_choice")
    refused(chat(tool_choice={"type": "allowed_tools", "allowed_tools": {}}), "tool_choice.function")
    refused(chat(tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice")
    refused(chat(tools=None, tool_choice="required"), "tool_choice")
    history = [*CHAT["messages"], {"role": "assistant", "content": "I"}]
    body = {"messages": history, "continue_final_message": True, "tool_choice": "required"}
    refused(chat(**body), "continue_final_message")
    refused(chat(functions=[{"name": "f"}]), "functions")  # the old way
    refused(chat(function_call={"name": "f"}), "function_call")
    refused(http.post("/v1/completions", json={"prompt": "x", "tools": [CLOCK]}), "tools")
    deep: Any = {}
    for _ in range(70):
        deep = {"a": deep}
    assert chat(tools=[function(parameters=deep)]).status_code in (200, 400)


def test_tokenize_counts_tools(http: httpx.Client, engine: ScriptedEngine, chat: Post) -> None:
    assert chat().status_code == 200
    counted = http.post("/tokenize", json={"messages": CHAT["messages"], "tools": [WEATHER, CLOCK]}).json()
    assert counted["tokens"] == engine.plays[-1].prompt
    refused(http.post("/tokenize", json={"prompt": "x", "tools": [CLOCK]}), "tools")


def test_openais_client_runs_a_tool_loop(sdk: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.script = text_script(TWO)
    messages: list[Any] = [{"role": "user", "content": "q"}]
    answer = sdk.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER, CLOCK])
    called = answer.choices[0].message
    assert called.tool_calls is not None and len(called.tool_calls) == 2
    messages.append(called.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "4 degrees"} for c in called.tool_calls]
    engine.script = text_script("Cold.")
    with sdk.chat.completions.stream(model="tiny", messages=messages, tools=[WEATHER, CLOCK]) as run:
        kinds = [event.type for event in run]
        assert run.get_final_completion().choices[0].message.content == "Cold."
    assert "content.done" in kinds and "4 degrees" in prompt_of(engine)
    engine.script = text_script(TWO)
    with sdk.chat.completions.stream(model="tiny", messages=messages[:1], tools=[WEATHER, CLOCK]) as run:
        kinds = [event.type for event in run]
        final = run.get_final_completion().choices[0].message.tool_calls
    assert final is not None and [c.function.arguments for c in final] == [OSLO, NONE]
    assert kinds.count("tool_calls.function.arguments.done") == 2
