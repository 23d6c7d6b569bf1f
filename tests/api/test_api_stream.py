"""Server-sent events, by their bytes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from scripted import EOS, ScriptedEngine, Server, text_script
from wire import CHAT, Connection, counts, events, stream, texts

from chatsvc.api.answers_schema import ChatChunk, PlainCompletion

PLAIN = {"model": "tiny", "prompt": "hi"}
FAMILY = "שלום, 世界 — naïve 👩‍👩‍👧‍👦\u2028end\x85."


@pytest.mark.parametrize("case", ["end token", "length", "stop", "three choices", "one token", "nothing"])
@pytest.mark.parametrize("burst", [1, 3, 100])
def test_ST_08_each_choice_ends_once_and_done_comes_last(
    server: Server, engine: ScriptedEngine, case: str, burst: int
) -> None:
    engine.burst = burst
    extra: dict[str, Any] = {}
    finish = "stop"
    if case == "length":
        extra, finish = {"max_tokens": 3}, "length"
    elif case == "one token":
        extra, finish = {"max_tokens": 1}, "length"
    elif case == "stop":
        extra = {"stop": "lo"}
    elif case == "three choices":
        extra = {"n": 3}
    elif case == "nothing":
        engine.script = text_script("")
    with Connection(server.port) as c:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
            c.post(path, {**body, **extra, "stream": True})
            status, _, raw = c.answer()
            assert status == 200
            seen = events(raw)
            assert seen[-1] == "[DONE]" and seen.count("[DONE]") == 1
            for index in range(extra.get("n", 1)):
                reasons = [ch["finish_reason"] for e in seen[:-1] for ch in e["choices"] if ch["index"] == index]
                assert [r for r in reasons if r is not None] == [finish] and reasons[-1] == finish
            c.send("GET", "/v1/models")  # the connection lives on
            assert c.answer()[0] == 200


def test_ST_11_ST_13_headers_and_framing(server: Server) -> None:
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True}, **{"Accept-Encoding": "gzip, br"})
        _, headers, raw = c.answer()
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in headers
    assert b"\r" not in raw and len(events(raw)) > 3


@pytest.mark.parametrize("burst", [1, 2, 7, 1000])
def test_ST_04_no_character_is_split_and_no_line_reader_is_fooled(
    server: Server, engine: ScriptedEngine, burst: int
) -> None:
    engine.script, engine.burst = text_script(FAMILY), burst
    seen = stream(server.port, CHAT)
    assert texts(seen) == {0: FAMILY}
    assert all("\ufffd" not in str(e) for e in seen)
    engine.script = text_script(FAMILY)
    assert texts(stream(server.port, PLAIN, "/v1/completions")) == {0: FAMILY}


def test_ST_05_cut_inside_a_character_is_the_same_streamed_and_whole(
    server: Server, engine: ScriptedEngine, http: Any
) -> None:
    engine.script = text_script("a👩é")
    for cut in range(1, 8):
        whole = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": cut}).json()
        seen = stream(server.port, {**CHAT, "max_tokens": cut, "stream_options": {"include_usage": True}})
        assert texts(seen)[0] == whole["choices"][0]["message"]["content"]
        assert counts(seen[-2]["usage"]) == counts(whole["usage"])
        assert whole["usage"]["completion_tokens"] == cut


def test_ST_06_nothing_of_a_stop_string_is_sent(server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script("brown fox, own foz")
    seen = stream(server.port, {**CHAT, "stop": ["own foz", "zzz"]})
    assert texts(seen) == {0: "brown fox, "}
    assert seen[-2]["choices"][0]["finish_reason"] == "stop"


def test_OA_07_three_choices_have_their_own_index_and_role(server: Server) -> None:
    seen = stream(server.port, {**CHAT, "n": 3})
    assert texts(seen) == {0: "Hello 0", 1: "Hello 1", 2: "Hello 2"}
    for index in range(3):
        deltas = [c["delta"] for e in seen[:-1] for c in e["choices"] if c["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in d for d in deltas[1:])
        assert deltas[-1] == {}


def test_several_prompts_times_choices_are_numbered_through(server: Server, engine: ScriptedEngine) -> None:
    engine.script = lambda prompt, params, choice: [*prompt, 48 + choice, EOS]
    body = {"model": "tiny", "prompt": [[97], [98], [99]], "n": 2}
    assert texts(stream(server.port, body, "/v1/completions")) == {
        0: "a0", 1: "a1", 2: "b0", 3: "b1", 4: "c0", 5: "c1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "asked"),
    [(None, False), ({}, False), ({"include_usage": None}, False), ({"include_usage": False}, False),
     ({"include_usage": True}, True)],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_OA_05_usage_only_when_asked(server: Server, options: Any, asked: bool, path: str) -> None:
    body = {**(CHAT if "chat" in path else PLAIN), "stream_options": options}
    seen = stream(server.port, body, path)[:-1]
    if asked:
        assert seen[-1]["choices"] == [] and seen[-1]["usage"]["completion_tokens"] == 8
        assert all(e["usage"] is None and e["choices"] for e in seen[:-1])
    else:
        assert all("usage" not in e and e["choices"] for e in seen)


def test_every_event_has_the_documented_shape(server: Server) -> None:
    extra = {"n": 2, "stream_options": {"include_usage": True}}
    for e in stream(server.port, {**CHAT, **extra, "logprobs": True, "top_logprobs": 2})[:-1]:
        ChatChunk.model_validate(e)
    for e in stream(server.port, {**PLAIN, **extra, "logprobs": 2}, "/v1/completions")[:-1]:
        PlainCompletion.model_validate(e)


def test_LT_01_the_role_waits_for_the_first_token(server: Server, engine: ScriptedEngine) -> None:
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert c.head()[0] == 200  # the headers come at once
        assert c.piece() == b": ping\n\n"
        server.call(engine.gate.set)
        while (piece := c.piece()) == b": ping\n\n":
            pass
        first = events(piece)
        assert [e["choices"][0]["delta"] for e in first] == [{"role": "assistant", "content": ""}, {"content": "H"}]


def test_ST_10_pings_while_silent_and_never_inside_an_event(server: Server, engine: ScriptedEngine) -> None:
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True})
        c.head()
        assert [c.piece() for _ in range(3)] == [b": ping\n\n"] * 3
        server.call(engine.gate.set)
        rest = b""
        while piece := c.piece():
            rest += piece
        assert texts(events(rest)) == {0: "Hello 0"}


def test_ST_10_no_ping_while_tokens_flow(server: Server, engine: ScriptedEngine) -> None:
    """Tokens come every 0.02 s for five ping intervals. Where a loaded machine stretches a gap, a ping is right."""

    async def drip() -> None:
        engine.gate.set()
        await asyncio.sleep(0)
        engine.gate.clear()

    engine.script = text_script("x" * 50)
    server.call(engine.gate.clear)
    gaps, pings = 0, 0
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True})
        c.head()
        last = time.monotonic()
        while True:
            time.sleep(0.02)
            server.wait(drip())
            piece = c.piece()
            now = time.monotonic()
            gaps += int((now - last) / 0.2)
            last = now
            if not piece:
                break
            pings += piece == b": ping\n\n"
    assert pings <= gaps + 1


def test_a_fault_in_the_middle_is_one_error_event_and_the_end(server: Server, engine: ScriptedEngine) -> None:
    engine.fail_at = 3
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})
        status, _, raw = c.answer()
        assert status == 200
        seen = events(raw)
        assert raw.count(b"event: error\n") == 1 and "[DONE]" not in seen
        assert seen[-1] == {
            "error": {"message": "NaN in the logits", "type": "server_error", "param": None, "code": "engine_error"}
        }
        assert sum("error" in e for e in seen) == 1
        server.until(lambda e: not e.running)
        engine.fail_at = None
        c.post("/v1/chat/completions", CHAT)
        assert c.answer()[0] == 200


def test_a_bug_of_ours_in_the_middle_tells_nothing_about_the_inside(
    server: Server, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("secret detail")

    def script(prompt: list[int], params: Any, choice: int) -> list[int]:
        engine.plays[-1].generation.logs[0].pieces.append(Broken())  # type: ignore[arg-type]
        return [65]

    engine.script = script
    several = {"model": "tiny", "prompt": ["a", "b", "c"]}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", several)):
        caplog.clear()
        seen = stream(server.port, body, path)
        assert seen[-1]["error"]["code"] == "internal_error" and "secret" not in str(seen)
        assert [r.levelname for r in caplog.records if "stream of request" in r.message] == ["ERROR"]
        server.until(lambda e: not e.running)


def test_a_cancelled_answer_ends_in_order(server: Server, engine: ScriptedEngine, http: Any) -> None:
    engine.script = text_script("x" * 100)
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", {**CHAT, "stream": True})
        c.head()
        server.until(lambda e: e.plays)
        cancelled = http.post(f"/v1/chat/completions/{engine.plays[0].request_id}/cancel")
        assert cancelled.status_code == 200 and cancelled.json()["cancelled"] is True
        raw = b""
        while piece := c.piece():
            raw += piece
        last = events(raw)[-2]["choices"][0]
        assert last["finish_reason"] == "stop" and last["cancelled"] is True
    again = http.post(f"/v1/chat/completions/{engine.plays[0].request_id}/cancel")
    assert again.status_code == 404 and again.json()["error"]["param"] == "id"


def test_streams_of_two_servers_in_one_process(server: Server) -> None:
    with Server() as other:
        assert texts(stream(other.port, CHAT)) == {0: "Hello 0"}
        assert texts(stream(server.port, CHAT)) == {0: "Hello 0"}
    assert texts(stream(server.port, CHAT)) == {0: "Hello 0"}


def test_a_slow_reader_gets_everything_in_few_pieces(server: Server, engine: ScriptedEngine) -> None:
    """The engine does not wait for a reader, and a reader that comes late takes all at once."""
    engine.script = text_script("y" * 900)
    engine.burst = 1000
    seen = stream(server.port, CHAT)
    assert texts(seen) == {0: "y" * 900}
    assert len(seen) == 4  # role, text, finish, [DONE]


def test_ST_shutdown_flag_of_the_sse_library_cuts_no_stream(server: Server, engine: ScriptedEngine) -> None:
    """sse-starlette sets a process-wide flag on SIGTERM; our streams end by the engine's drain, not by that."""
    from sse_starlette.sse import AppStatus

    AppStatus.should_exit = True
    try:
        server.call(engine.gate.clear)
        with Connection(server.port) as c:
            c.post("/v1/chat/completions", {**CHAT, "stream": True})
            c.head()
            assert c.piece() == b": ping\n\n"
            server.call(engine.gate.set)
            raw = b""
            while piece := c.piece():
                raw += piece
            assert texts(events(raw)) == {0: "Hello 0"}
    finally:
        AppStatus.should_exit = False
