"""Every refusal: status, shape, and a server that goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, Server, overloaded, text_script
from wire import CHAT, Connection, events, texts

from chatsvc.api.errors import seconds
from chatsvc.api.services import ApiSettings
from chatsvc.errors import EngineDead, StoreError

CHAT_PATH = "/v1/chat/completions"


def shape(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object; never HTML, never a traceback."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and "Traceback" not in answer.text and "<" not in answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


def bodies() -> list[tuple[str, bytes | str, dict[str, str], int]]:
    """(name, body, headers, status) of requests that are refused."""
    chat = json.dumps(CHAT)
    return [
        ("empty", b"", {}, 400),
        ("not json", b"{", {}, 400),
        ("html", b"<a>", {}, 400),
        ("trailing", chat + "}", {}, 400),
        ("array", b"[]", {}, 400),
        ("null", b"null", {}, 400),
        ("number", b"5", {}, 400),
        ("deep", b'{"model":"tiny","messages":' + b"[" * 100_000, {}, 400),
        ("deep extra", json.dumps({**CHAT, "x": 0})[:-2].encode() + b"[" * 5000 + b"]" * 5000 + b"}", {}, 400),
        ("long number", json.dumps(CHAT)[:-1] + ',"seed":' + "9" * 10_000 + "}", {}, 400),
        ("half a character", b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', {}, 400),
        ("bad utf-8", b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', {}, 400),
        ("no messages", b'{"model":"tiny"}', {}, 400),
        ("form", b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("text", chat, {"content-type": "text/plain"}, 415),
        ("empty type", chat, {"content-type": ""}, 415),
        ("gzip", chat, {"content-encoding": "gzip"}, 415),
        ("unknown model", json.dumps({**CHAT, "model": "gpt-9"}), {}, 404),
        ("model of another type", json.dumps({**CHAT, "model": ["tiny"]}), {}, 400),
        ("streamed", json.dumps({**CHAT, "stream": True, "n": 0}), {}, 400),
    ]


BODIES = bodies()


@pytest.mark.parametrize("case", BODIES, ids=[b[0] for b in BODIES])
def test_OA_13_bad_bodies(http: httpx.Client, case: tuple[str, bytes | str, dict[str, str], int]) -> None:
    _, content, headers, status = case
    answer = http.post(CHAT_PATH, content=content, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status, answer.text
    assert shape(answer)["type"] == "invalid_request_error"
    assert http.post(CHAT_PATH, json=CHAT).status_code == 200


def test_OA_13_json_types_that_are_fine(http: httpx.Client) -> None:
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        assert http.post(CHAT_PATH, content=json.dumps(CHAT), headers={"content-type": kind}).status_code == 200
    request = http.build_request("POST", CHAT_PATH, content=json.dumps(CHAT))
    assert "content-type" not in request.headers
    assert http.send(request).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT_PATH, 405), ("DELETE", "/v1/models", 405), ("PUT", "/v1/completions", 405),
        ("PATCH", "/health", 405), ("POST", "/metrics", 405), ("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/responses/x", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/models/", 404),
        ("POST", CHAT_PATH + "/", 404), ("GET", "/V1/models", 404),
        ("GET", "/v1/models/gpt-9", 404), ("GET", "/v1/models/a/b", 404), ("POST", CHAT_PATH + "/nobody/cancel", 404),
        ("GET", "/{x}", 404), ("GET", "/%3Cscript%3E", 404),
    ],
)  # fmt: skip
def test_OA_13_wrong_method_and_path(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    if "%3C" not in path:
        shape(answer)
    if status == 405:
        assert answer.headers["allow"]


def test_OA_13_odd_spellings_of_a_path(server: Server) -> None:
    with Connection(server.port) as c:
        for target in ("//health", "/health/", "/./health", "/v1/../health", "/HEALTH", "/health%2f", "/v1//models"):
            c.send("GET", target)
            status, _, raw = c.answer()
            assert status == 404 and json.loads(raw)["error"]["code"] == "not_found", target


def test_OA_13_the_unknown_model_message_has_the_served_name(http: httpx.Client) -> None:
    error = shape(http.post(CHAT_PATH, json={**CHAT, "model": "gpt-9"}))
    assert "tiny" in error["message"] and error["param"] == "model" and error["code"] == "model_not_found"


def test_OA_13_the_sdk_raises_its_own_exceptions(sdk: openai.OpenAI, engine: ScriptedEngine, server: Server) -> None:
    create = sdk.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=[], stream=True)
    assert bad.value.param == "messages" and bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", messages=CHAT["messages"])
    assert missing.value.code == "model_not_found"
    server.call(lambda: setattr(engine, "refuse", overloaded()))
    with pytest.raises(openai.RateLimitError):
        create(**CHAT)
    server.call(lambda: setattr(engine, "refuse", None))
    server.call(lambda: setattr(engine, "ready", False))
    with pytest.raises(openai.InternalServerError):
        create(**CHAT)
    server.call(lambda: setattr(engine, "ready", True))
    engine.fail_at = 2
    with pytest.raises(openai.APIError, match="NaN in the logits"):
        list(create(**CHAT, stream=True))
    with pytest.raises(openai.InternalServerError, match="NaN in the logits"):
        create(**CHAT)


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_OA_12_lengths_to_the_token(http: httpx.Client, engine: ScriptedEngine, streamed: bool) -> None:
    def ask(length: int, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": [65] * length, "stream": streamed, **fields}
        return http.post("/v1/completions", json=body)

    limit = engine.limit
    for answer, param, numbers in (
        (ask(limit), "prompt", {limit}),
        (ask(limit + 1), "prompt", {limit, limit + 1}),
        (ask(10 * limit), "prompt", {limit, 10 * limit}),
        (ask(limit - 10, max_tokens=11), "max_tokens", {limit, limit - 10, 11, limit + 1}),
        (ask(1, max_tokens=2**70), "max_tokens", {limit, 1, 2**70}),
    ):
        assert answer.status_code == 400
        error = shape(answer)
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert numbers <= {int(n) for n in re.findall(r"\d+", error["message"])}
    assert ask(limit - 1).status_code == 200
    assert engine.plays[-1].params.max_tokens == 1
    assert ask(limit - 10, max_tokens=10).status_code == 200
    assert ask(1).status_code == 200 and engine.plays[-1].params.max_tokens == limit - 1


def test_OA_12_the_cap_that_does_not_fit_is_named_as_it_was_sent(http: httpx.Client) -> None:
    error = shape(http.post(CHAT_PATH, json={**CHAT, "max_completion_tokens": 1000}))
    assert error["param"] == "max_completion_tokens" and error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT_PATH, {"messages": [{"role": "user", "content": "ab " * 2_000_000}]}, "messages"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": ""}] * 1000}, "messages"),
        ("/v1/completions", {"prompt": "ab " * 2_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "ab " * 2_000_000]}, "prompt"),
        ("/tokenize", {"prompt": "ab " * 2_000_000}, "prompt"),
    ],
)
def test_SF_03_a_hopeless_text_is_refused_before_it_is_encoded(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    tokenizer = type(server.services.tokenizer)
    encoded = tokenizer.encode

    def encode(self: Any, text: str, **kwargs: Any) -> list[int]:
        assert len(text) < 1_000_000
        return encoded(self, text, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", encode)
    error = shape(http.post(path, json={"model": "tiny", **body}))
    assert error["code"] == "context_length_exceeded" and error["param"] == param


def test_SF_03_long_texts_are_encoded_off_the_loop_and_short_ones_on_it(
    http: httpx.Client, server: Server, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = type(server.services.tokenizer)
    encoded = tokenizer.encode
    in_loop: list[tuple[int, bool]] = []

    def encode(self: Any, text: str, **kwargs: Any) -> list[int]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            in_loop.append((len(text), False))
        else:
            in_loop.append((len(text), True))
        return encoded(self, text, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", encode)
    engine.limit = 100_000
    for n in (10, 50_000):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * n}]}
        assert http.post(CHAT_PATH, json=body).status_code == 200
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * n}).status_code == 200
        assert http.post("/tokenize", json={"model": "tiny", "prompt": "x" * n}).status_code == 200
    assert all(inside == (n < 20_000) for n, inside in in_loop if n > 20)
    assert {n > 20_000 for n, _ in in_loop} == {True, False}


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_OA_13_too_large_bodies_and_the_connection_lives_on() -> None:
    with Server(ApiSettings(max_body_bytes=10_000)) as server, Connection(server.port) as c:
        # 11,000 bytes arrive in one piece, also as the last one; 200,000 in many.
        for chunked, size in itertools.product((False, True), (11_000, 200_000)):
            raw = json.dumps({**CHAT, "x": "y" * size}).encode()
            if chunked:
                c.send("POST", CHAT_PATH, None, {"Content-Length": "", "Transfer-Encoding": "chunked"})
                c.sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw))
            else:
                c.post(CHAT_PATH, raw)
            status, headers, body = c.answer()
            assert status == 413 and json.loads(body)["error"]["code"] == "request_too_large"
            assert "close" not in headers.get("connection", "")
            c.post(CHAT_PATH, CHAT)
            assert c.answer()[0] == 200
        c.send("POST", CHAT_PATH, None, {"Content-Length": "20000", "Expect": "100-continue"})
        status, headers, _ = c.answer()
        assert status == 413 and headers["connection"].lower() == "close"  # nobody knows whether the body still comes
        assert c.sock.recv(1) == b""


def test_too_many_values(http: httpx.Client) -> None:
    for raw in (b"[" + b"1," * 50_000 + b"1]", b"[" + b'{"a":[]},' * 10_000 + b"0]", b'"' + b"a, " * 30_000 + b'"'):
        answer = http.post("/v1/completions", content=b'{"model":"tiny","prompt":' + raw + b"}")
        assert answer.status_code == 400 and shape(answer)["code"] == "context_length_exceeded"
        assert shape(answer)["param"] == "prompt"
    messages = [{"role": "user", "content": "a"}] * 40_000
    answer = http.post(CHAT_PATH, json={"messages": messages})
    assert answer.status_code == 400 and shape(answer)["param"] == "messages"
    answer = http.post("/detokenize", json={"tokens": [1] * 50_000})
    assert answer.status_code == 400 and shape(answer)["param"] == "tokens"


# -- the server's own trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_SH_06_refusals_of_the_engine_come_before_the_stream(
    http: httpx.Client, server: Server, engine: ScriptedEngine, streamed: bool
) -> None:
    for exc, status, after in (
        (overloaded(), 429, "3"),
        (EngineDead("the engine died"), 503, "5"),
        (StoreError("store away"), 503, "5"),
    ):
        server.call(lambda exc=exc: setattr(engine, "refuse", exc))
        for path, body in ((CHAT_PATH, CHAT), ("/v1/completions", {"model": "tiny", "prompt": "x"})):
            answer = http.post(path, json={**body, "stream": streamed})
            assert answer.status_code == status and answer.headers["retry-after"] == after
            assert shape(answer)["message"]
    server.call(lambda: setattr(engine, "refuse", None))
    server.call(lambda: setattr(engine, "ready", False))
    for path in (CHAT_PATH, "/v1/completions", "/tokenize", "/detokenize"):
        answer = http.post(path, json={**CHAT, "stream": streamed})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        shape(answer)


def test_a_bug_of_ours_is_a_plain_500(
    http: httpx.Client, server: Server, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server.call(lambda: setattr(engine, "refuse", ZeroDivisionError("secret detail")))
    answer = http.post(CHAT_PATH, json=CHAT, headers={"x-request-id": "abc-1"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "abc-1"
    assert shape(answer)["code"] == "internal_error" and "secret" not in answer.text
    assert any(r.levelno == logging.ERROR and "abc-1" in r.getMessage() for r in caplog.records)
    server.call(lambda: setattr(engine, "refuse", None))
    assert http.post(CHAT_PATH, json=CHAT).status_code == 200


def test_a_choice_that_fails_is_500_or_503_by_its_own_status(
    http: httpx.Client, server: Server, engine: ScriptedEngine
) -> None:
    engine.fail_at = 1
    assert shape(http.post(CHAT_PATH, json={**CHAT, "n": 3}))["message"] == "NaN in the logits"
    engine.fail_at = None
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post(CHAT_PATH, CHAT)
        server.until(lambda e: len(e.plays) == 2)

        def expire() -> None:
            generation = engine.plays[1].generation
            log = generation.logs[0]
            log.finish_reason, log.error, log.error_status = "error", "waited too long", 503
            generation.notify()

        server.call(expire)
        status, headers, raw = c.answer()
        assert status == 503 and headers["retry-after"] and b"waited too long" in raw


def test_SH_01_good_streams_finish_whatever_else_is_asked(server: Server, engine: ScriptedEngine, http: Any) -> None:
    engine.script = text_script("g" * 30)
    server.call(engine.gate.clear)
    good = [Connection(server.port) for _ in range(4)]
    for c in good:
        c.post(CHAT_PATH, {**CHAT, "stream": True})
        assert c.head()[0] == 200
    for _, content, headers, status in BODIES:
        answer = http.post(CHAT_PATH, content=content, headers={"content-type": "application/json", **headers})
        assert answer.status_code == status
    server.call(engine.gate.set)
    for c in good:
        raw = b""
        while piece := c.piece():
            raw += piece
        assert texts(events(raw)) == {0: "g" * 30}
        c.close()


def test_one_second_is_no_plural() -> None:
    assert [seconds(n) for n in (1, 1.0, 0.5, 2, 30.0)] == [
        "1 second", "1 second", "0.5 seconds", "2 seconds", "30 seconds"
    ]  # fmt: skip
