"""/v1/responses: the openai package against a scripted model and a real store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from scripted import EOS, ScriptedEngine, Server, text_script
from test_api_fields import prompt_of, refused
from wire import Connection

from chatsvc.api.openapi_responses import ResponseEvent, ResponseObject
from chatsvc.api.services import ApiSettings
from chatsvc.sessions.memory import MemoryStore

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": False,
}
CALL = 'Let me look. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def _server() -> Iterator[Server]:
    with Server(ApiSettings(ping_interval=0.2, resume_grace=0.3), store=MemoryStore(3600)) as server:
        yield server


@pytest.fixture
def api(sdk: openai.OpenAI) -> Any:
    return sdk.responses


def events_of(port: int, path: str, body: Any = None) -> list[dict[str, Any]]:
    """Raw events, each with the name of its type, numbered without a gap."""
    with Connection(port) as c:
        c.send("GET" if body is None else "POST", path, body)
        status, headers, raw = c.answer()
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
    out = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            out.append(event)
    first = out[0]["sequence_number"]
    assert [e["sequence_number"] for e in out] == list(range(first, first + len(out)))
    return out


def test_text_in_and_out(api: Any, engine: ScriptedEngine, server: Server) -> None:
    answer = api.create(model="tiny", input="hi", instructions="Be short.", temperature=0, max_output_tokens=50)
    assert answer.output_text == "Hello 0" and answer.status == "completed" and answer.error is None
    assert prompt_of(server.engine) == "system: Be short.user: hiassistant: "
    assert answer.usage.output_tokens == 8 and answer.usage.total_tokens == answer.usage.input_tokens + 8
    assert answer.instructions == "Be short." and answer.max_output_tokens == 50 and answer.temperature == 0
    again = api.retrieve(answer.id)
    assert again.model_dump() == answer.model_dump()
    ResponseObject.model_validate(httpx.get(f"{server.url}/v1/responses/{answer.id}", trust_env=False).json())


def test_the_next_one_goes_on_with_the_session(api: Any, server: Server, http: httpx.Client) -> None:
    first = api.create(input="one", instructions="I")
    second = api.create(input="two", previous_response_id=first.id)
    assert prompt_of(server.engine) == "user: oneassistant: Hello 0user: twoassistant: "  # instructions do not go on
    third = api.create(input=[{"role": "user", "content": "other"}], previous_response_id=first.id, instructions="J")
    assert prompt_of(server.engine) == "system: Juser: oneassistant: Hello 0user: otherassistant: "
    assert second.previous_response_id == first.id
    ids = {r.id[5:37] for r in (first, second, third)}
    assert len(ids) == 1  # one session, two branches
    session = http.get(f"/v1/sessions/sess_{ids.pop()}").json()
    assert [m["content"] for m in session["messages"]] == ["one", "Hello 0", "two", "Hello 0", "other", "Hello 0"]
    assert session["messages"][4]["parent_id"] == session["messages"][1]["id"] and session["title"] == "one"


@pytest.mark.parametrize("length", [600, 500_000])  # counted, and hopeless before that
def test_the_longer_one_of_input_and_instructions_is_what_is_too_long(http: httpx.Client, length: int) -> None:
    for short, long in (("input", "instructions"), ("instructions", "input")):
        answer = http.post("/v1/responses", json={short: "hi", long: "ab " * length})
        assert answer.json()["error"]["code"] == "context_length_exceeded" and refused(answer, long)


def test_two_branches_at_once(api: Any, server: Server) -> None:
    first = api.create(input="one")
    server.call(server.engine.gate.clear)
    a = api.create(input="a", previous_response_id=first.id, background=True)
    b = api.create(input="b", previous_response_id=first.id, background=True)
    assert {a.status, b.status} == {"in_progress"}
    with pytest.raises(openai.ConflictError):
        api.create(input="c", previous_response_id=a.id)
    server.call(server.engine.gate.set)
    server.until(lambda e: not e.running)
    for made, asked in ((a, "a"), (b, "b")):
        server.wait(settled(api, made.id))
        assert api.retrieve(made.id).output_text == "Hello 0"
        assert api.create(input="d", previous_response_id=made.id).output_text == "Hello 0"
        assert (
            prompt_of(server.engine) == f"user: oneassistant: Hello 0user: {asked}assistant: Hello 0user: dassistant: "
        )


async def settled(api: Any, response_id: str) -> None:
    import asyncio

    for _ in range(500):
        found = await asyncio.to_thread(api.retrieve, response_id)
        if found.status not in ("in_progress", "queued"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("burst", [1, 5, 1000])
def test_events_are_openais_and_say_what_the_whole_answer_says(
    api: Any, server: Server, engine: ScriptedEngine, burst: int, store: bool
) -> None:
    server.engine.script, server.engine.burst = text_script(CALL + "\nDone \u2028 é"), burst
    whole = api.create(input="x", tools=[WEATHER], store=store)
    assert [item.type for item in whole.output] == ["message", "function_call", "message"]
    assert whole.output[1].name == "weather" and whole.output[1].arguments == '{"city": "Oslo"}'
    assert [item.status for item in whole.output] == ["completed"] * 3
    with api.stream(model="tiny", input="x", tools=[WEATHER], store=store) as stream:  # the SDK checks the order itself
        kinds = [e.type for e in stream]
        final = stream.get_final_response()
    assert final.output_text == "Let me look.Done \u2028 é" == whole.output_text
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed" and "response.function_call_arguments.done" in kinds
    raw = events_of(server.port, "/v1/responses", {"input": "x", "tools": [WEATHER], "stream": True, "store": store})
    last = raw[-1]["response"]
    Response.model_validate(last)
    for event in raw:
        ResponseEvent.model_validate(event)
    texts: dict[str, str] = {}
    for event in raw:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert texts == {
        item["id"]: item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
        for item in last["output"]
    }
    assert [e["item"] for e in raw if e["type"] == "response.output_item.done"] == last["output"]
    if store:
        assert api.retrieve(last["id"]).model_dump() == Response.model_validate(last).model_dump()
    else:
        with pytest.raises(openai.NotFoundError):
            api.retrieve(last["id"])


def test_two_calls_have_two_ids_and_the_past_is_told_in_the_tokens_it_had(api: Any, server: Server) -> None:
    server.engine.script, server.engine.burst = text_script(f"{CALL}\n{CALL}"), 1000
    first = api.create(input="x", tools=[WEATHER])
    calls = [item for item in first.output if item.type == "function_call"]
    assert len({c.call_id for c in calls}) == len({c.id for c in calls}) == 2
    outputs: list[Any] = [{"type": "function_call_output", "call_id": c.call_id, "output": c.call_id} for c in calls]
    server.engine.script = text_script("Cold.")
    api.create(input=outputs, previous_response_id=first.id, tools=[WEATHER], instructions="I")
    shown = prompt_of(server.engine)
    assert shown.startswith("system: I") and "You can call functions" in shown
    assert shown.endswith(
        f"user: xassistant: {CALL}\n{CALL}tool: {calls[0].call_id}tool: {calls[1].call_id}assistant: "
    )


def test_a_tool_loop(api: Any, server: Server) -> None:
    server.engine.script = text_script(CALL)
    first = api.create(input="weather?", tools=[WEATHER])
    call = first.output[1]
    server.engine.script = text_script("Cold.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    second = api.create(input=[output], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "Cold."
    assert prompt_of(server.engine).endswith(f"user: weather?assistant: {CALL}tool: 4 degreesassistant: ")
    # The same without the server's memory: everything is sent again.
    items: list[Any] = [{"role": "user", "content": "weather?"}, *[i.model_dump() for i in first.output], output]
    third = api.create(input=items, tools=[WEATHER], store=False)
    assert third.output_text == "Cold." and "tool: 4 degreesassistant: " in prompt_of(server.engine)
    with pytest.raises(openai.BadRequestError, match="call_id"):
        api.create(input=[{**output, "call_id": "call_nope"}], previous_response_id=first.id)
    forced = api.create(input="x", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert prompt_of(server.engine).endswith('<tool_call>[{"name": "weather", "arguments":') and forced.output


@pytest.mark.parametrize("end", ["]</tool_call>", "]", ""])
def test_a_forced_call_in_the_history(api: Any, server: Server, end: str) -> None:
    server.engine.script = text_script(' {"city": "Rome"}}' + end)
    first = api.create(input="x", tools=[WEATHER], tool_choice="required")
    assert [(i.type, i.arguments) for i in first.output] == [("function_call", '{"city": "Rome"}')]
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "hot"}
    api.create(input=[output], previous_response_id=first.id)
    written = '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_call>'
    assert prompt_of(server.engine) == f"user: xassistant: {written}tool: hotassistant: "


def test_a_broken_call(api: Any, server: Server) -> None:
    server.engine.script = text_script('<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>')
    answer = api.create(input="x", tools=[WEATHER])
    call, rest = answer.output
    assert (call.status, call.arguments, rest.status) == ("incomplete", '{"city": ', "completed")
    assert answer.status == "completed" and rest.content[0].text == "oops}}</tool_call>"
    with api.stream(model="tiny", input="x", tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    for item in (streamed.output[0], api.retrieve(streamed.id).output[0]):
        assert (item.status, item.arguments) == (call.status, call.arguments)
    assert streamed.output_text == answer.output_text
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "r"}
    with pytest.raises(openai.BadRequestError, match="call_id"):  # it was never a call
        api.create(input=[output], previous_response_id=answer.id)


def test_the_cap(api: Any, server: Server) -> None:
    answer = api.create(input="x", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Hel" and answer.output[0].status == "incomplete"
    assert api.retrieve(answer.id).model_dump() == answer.model_dump()
    with api.stream(model="tiny", input="x", max_output_tokens=3) as stream:
        assert [e.type for e in stream][-1] == "response.incomplete"


def test_a_failed_generation(api: Any, server: Server, http: httpx.Client) -> None:
    server.engine.fail_at = 3
    assert http.post("/v1/responses", json={"input": "x"}).status_code == 500
    raw = events_of(server.port, "/v1/responses", {"input": "x", "stream": True})
    assert raw[-1]["type"] == "response.failed" and raw[-1]["response"]["error"]["code"] == "server_error"
    assert raw[-1]["response"]["status"] == "failed"
    assert api.retrieve(raw[-1]["response"]["id"]).status == "failed"


# -- in the background ---------------------------------------------------------------------------------------------


def test_a_background_response_outlives_the_grace_time_and_can_be_cancelled(api: Any, server: Server) -> None:
    server.call(server.engine.gate.clear)
    made = api.create(input="x", background=True)
    assert made.status == "in_progress" and made.background and made.output == []
    server.wait(wait(0.6))  # twice the grace time
    assert api.retrieve(made.id).status == "in_progress" and server.call(lambda: len(server.engine.running)) == 1
    ended = api.cancel(made.id)
    assert ended.status == "cancelled" and server.call(lambda: server.engine.running) == []
    assert api.cancel(made.id).status == api.retrieve(made.id).status == "cancelled"
    server.call(server.engine.gate.set)
    done = api.create(input="x")
    with pytest.raises(openai.BadRequestError, match="background"):
        api.cancel(done.id)


async def wait(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


def test_a_background_stream_can_be_left_and_joined_again_without_a_gap(api: Any, server: Server) -> None:
    server.engine.script = text_script(CALL)
    uncut = events_of(server.port, "/v1/responses", {"input": "x", "tools": [WEATHER], "stream": True})
    server.call(server.engine.gate.clear)
    with Connection(server.port) as c:
        c.post("/v1/responses", {"input": "x", "tools": [WEATHER], "stream": True, "background": True})
        c.head()
        created = json.loads(c.piece().decode().split("\n")[1].removeprefix("data: "))
    identity = created["response"]["id"]
    with Connection(server.port) as c:
        c.send("GET", f"/v1/responses/{identity}?stream=true&starting_after=1")
        assert c.head()[0] == 200
        server.call(server.engine.gate.set)
        raw = b""
        while piece := c.piece():
            raw += piece
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert [e["sequence_number"] for e in events] == list(range(2, len(uncut)))
    assert [e["type"] for e in events] == [e["type"] for e in uncut[2:]]
    refused(httpx.get(f"{server.url}/v1/responses/{identity}?stream=true", trust_env=False), "stream")


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """Without a reader a turn goes on for a minute here, if nobody ends it."""
    with Server(store=MemoryStore(3600)) as server:
        yield server


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_ST_01_leaving_ends_it(patient: Server, stream: bool, store: bool) -> None:
    server = patient
    server.reset()
    server.engine.script = text_script("x" * 900)
    server.call(server.engine.gate.clear)
    with Connection(server.port) as c:
        c.post("/v1/responses", {"input": "x", "stream": stream, "store": store})
        if stream:
            c.head()
            c.piece()
        server.until(lambda e: e.running)
    server.until(lambda e: not e.running)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_not_offered_is_refused_by_name(http: httpx.Client, server: Server) -> None:
    def post(**fields: Any) -> httpx.Response:
        return http.post("/v1/responses", json={"input": "x", **fields})

    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**WEATHER, "strict": True}]}, "tools.0.strict"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_nope"}, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 64}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": "x" * 20000}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output"),
        ({"input": [{"role": "user", "content": "refuse me"}]}, "input"),
        ({"model": "other"}, "model"),
    ):
        answer = post(**fields)
        refused(answer, param, 404 if param == "model" else 400)
    for path in ("/v1/responses/resp_nope", "/v1/responses/resp_" + "0" * 64):
        assert http.get(path).status_code == http.post(path + "/cancel").status_code == 404
    assert http.get("/v1/sessions").json()["data"][0]["title"] != "refuse me"
    nothing = {"include": [], "reasoning": None, "truncation": "disabled", "text": {"format": {"type": "text"}}}
    nothing |= {"service_tier": "auto", "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "top_p": None}
    wrong = post(metadata={"b": "c", "a": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "metadata.a"
    ok = post(**nothing, metadata={"a": "b"}, store=None)
    assert ok.status_code == 200 and ok.json()["metadata"] == {"a": "b"}


def test_a_refused_turn_leaves_no_session(http: httpx.Client, server: Server) -> None:
    from scripted import overloaded

    before = len(http.get("/v1/sessions?limit=200").json()["data"])
    server.engine.refuse = overloaded()
    assert http.post("/v1/responses", json={"input": "x"}).status_code == 429
    assert len(http.get("/v1/sessions?limit=200").json()["data"]) == before


def test_without_a_store_nothing_is_kept() -> None:
    with Server() as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        answer = http.post("/v1/responses", json={"input": "hi"}).json()
        assert answer["output"][0]["content"][0]["text"] == "Hello 0" and answer["store"] is False
        assert http.get(f"/v1/responses/{answer['id']}").status_code == 404
        refused(http.post("/v1/responses", json={"input": "hi", "store": True}), "store")
        refused(
            http.post("/v1/responses", json={"input": "hi", "previous_response_id": answer["id"]}),
            "previous_response_id",
        )


def test_the_end_token_is_not_said_twice(api: Any, server: Server) -> None:
    first = api.create(input="a")
    api.create(input="b", previous_response_id=first.id)
    assert server.engine.plays[-1].prompt.count(EOS) == 3  # after each message of the history, once
