"""Clients that leave, and connections that stay."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, Server, text_script
from wire import CHAT, Connection, events, texts

CHAT_PATH = "/v1/chat/completions"
PROMPTS = {"model": "tiny", "prompt": ["a", "b", "c"], "n": 2}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions"])
def test_ST_01_ST_03_a_client_that_leaves_aborts_its_request(
    server: Server, engine: ScriptedEngine, how: str, streamed: bool, when: str, path: str
) -> None:
    body = {**(CHAT if path == CHAT_PATH else PROMPTS), "stream": streamed}
    expected = 1 if path == CHAT_PATH else 3
    engine.script = text_script("x" * 900)
    server.call(engine.gate.clear)
    connections = [Connection(server.port) for _ in range(5)]
    for c in connections:
        c.post(path, body)
    server.until(lambda e: len(e.plays) == 5 * expected)
    if when == "running":

        async def some_tokens() -> None:
            import asyncio

            engine.gate.set()
            while min(p.generation.num_output_tokens for p in engine.plays) < 3:
                await asyncio.sleep(0)
            engine.gate.clear()

        server.wait(some_tokens())
        if streamed:
            for c in connections:
                assert c.head()[0] == 200
                c.piece()
    assert len(engine.running) == 5 * expected
    for c in connections:
        c.reset() if how == "reset" else c.close()
    server.until(lambda e: not e.running)  # with the gate closed: only an abort can end them
    assert all(p.cancelled for p in engine.plays)
    assert all(p.generation.num_output_tokens < 900 for p in engine.plays)
    assert server.call(lambda: [len(p.generation._watchers) for p in engine.plays]) == [0] * 5 * expected


def test_ST_01_two_hundred_connections_cut(server: Server, engine: ScriptedEngine, http: httpx.Client) -> None:
    engine.script = text_script("x" * 900)
    server.call(engine.gate.clear)
    connections = [Connection(server.port) for _ in range(200)]
    for c in connections:
        c.post(CHAT_PATH, {**CHAT, "stream": True})
    server.until(lambda e: len(e.plays) == 200)
    for c, how in zip(connections, itertools.cycle(["close", "reset"])):
        c.reset() if how == "reset" else c.close()
    server.until(lambda e: not e.running)
    assert all(p.cancelled for p in engine.plays)
    server.call(engine.gate.set)
    assert http.post(CHAT_PATH, json=CHAT).status_code == 200


def test_OB_01_OB_04_an_abort_leaves_a_log_line(
    server: Server, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "chatsvc.access")
    server.call(engine.gate.clear)
    for streamed in (True, False):
        c = Connection(server.port)
        c.post(CHAT_PATH, {**CHAT, "stream": streamed}, **{"X-Request-Id": f"gone-{streamed}"})
        server.until(lambda e: e.running)
        c.close()
        server.until(lambda e: not e.running)
    server.until(lambda e: sum("gone-" in r.getMessage() for r in caplog.records) == 2)
    lines = [json.loads(r.getMessage()) for r in caplog.records if "gone-" in r.getMessage()]
    assert [line["outcome"] for line in lines] == ["client_gone"] * 2
    assert all(line["finish"] == ["abort"] and line["prompt_tokens"] > 0 for line in lines)


def test_a_client_that_leaves_while_it_sends(server: Server, engine: ScriptedEngine, http: httpx.Client) -> None:
    for how in ("close", "reset"):
        c = Connection(server.port)
        c.send("POST", CHAT_PATH, None, {"Content-Length": "500"})
        c.sock.sendall(b'{"model":')
        c.reset() if how == "reset" else c.close()
    assert http.post(CHAT_PATH, json=CHAT).status_code == 200
    assert len(engine.plays) == 1


def test_a_completed_stream_is_no_disconnect(server: Server, engine: ScriptedEngine) -> None:
    with Connection(server.port) as c:
        for _ in range(5):
            c.post(CHAT_PATH, {**CHAT, "stream": True})
            assert texts(events(c.answer()[2])) == {0: "Hello 0"}
    assert not any(p.cancelled for p in engine.plays)


def test_keep_alive_through_every_kind_of_answer(server: Server, engine: ScriptedEngine) -> None:
    """One connection, a hundred requests of all kinds; none is lost, none answers another's question."""
    asks: list[tuple[str, str, Any, int]] = [
        ("POST", CHAT_PATH, CHAT, 200),
        ("POST", CHAT_PATH, {**CHAT, "stream": True}, 200),
        ("POST", CHAT_PATH, {**CHAT, "n": 0}, 400),
        ("POST", CHAT_PATH, b"{", 400),
        ("POST", "/nothing", b"x" * 300_000, 404),  # nobody reads this body
        ("PUT", CHAT_PATH, b"x" * 300_000, 405),
        ("POST", "/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("POST", "/tokenize", {"prompt": "x"}, 200),
        ("GET", "/health", None, 200),
        ("GET", "/metrics", None, 200),
    ]
    with Connection(server.port) as c:
        for i, (method, path, body, status) in enumerate(asks * 10):
            c.send(method, path, body, {"X-Request-Id": f"r{i}"})
            seen, headers, _ = c.answer()
            assert (seen, headers["x-request-id"]) == (status, f"r{i}")


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with Connection(server.port) as c:
        for i in range(5):
            c.send("POST", CHAT_PATH, {**CHAT, "stream": i % 2 == 0}, {"X-Request-Id": f"p{i}"})
        for i in range(5):
            status, headers, _ = c.answer()
            assert (status, headers["x-request-id"]) == (200, f"p{i}")


def test_a_client_that_asks_to_close_is_closed(server: Server) -> None:
    for streamed in (True, False):
        with Connection(server.port) as c:
            c.post(CHAT_PATH, {**CHAT, "stream": streamed}, Connection="close")
            assert c.answer()[0] == 200
            assert c.sock.recv(1) == b""


def test_a_client_that_does_not_read_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    from chatsvc.api.services import ApiSettings

    with Server(ApiSettings(ping_interval=0.2, send_timeout=0.3)) as server:
        engine = server.engine
        server.reset()
        engine.limit = 10**9
        # Far more than the sockets' buffers hold: the writer has to wait for its reader.
        engine.script = lambda prompt, params, choice: [120] * 3_000
        engine.burst = 100
        body = {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 4, "n": 16}
        with Connection(server.port) as c:
            c.post(CHAT_PATH, body)
            server.until(lambda e: e.plays and not e.running)
            server.until(lambda e: any("did not read" in r.getMessage() for r in caplog.records))
