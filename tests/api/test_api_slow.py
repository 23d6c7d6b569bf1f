"""Clients that send slowly, too much, or not at all; and a server that stops meanwhile."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import Server
from wire import CHAT, Connection, strict

from chatsvc.api.services import ApiSettings

SLOW = ApiSettings(ping_interval=0.2, body_idle_timeout=0.3, body_timeout=1.0)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def impatient() -> Iterator[Server]:
    with Server(SLOW, head_timeout=0.5) as server:
        yield server


def refusal(c: Connection, status: int, code: str | None) -> dict[str, Any]:
    """The answer is an error object, and the connection is closed after it."""
    got, headers, body = c.answer()
    assert got == status, body
    assert headers["content-type"] == "application/json" and headers["connection"] == "close"
    error = strict(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
    assert c.sock.recv(10) == b""
    return dict(error)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_body_that_never_arrives(impatient: Server, path: str) -> None:
    with Connection(impatient.port) as c:
        c.sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n".encode() + b'{"model"')
        assert "0.3 seconds" in refusal(c, 408, "request_timeout")["message"]


def test_a_body_that_trickles(impatient: Server) -> None:
    with Connection(impatient.port) as c:
        c.sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        c.sock.settimeout(0.05)
        for _ in range(120):
            c.sock.sendall(b"1\r\n \r\n")
            try:
                c.buffer += c.sock.recv(65536)
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("a client who sends a byte now and then is waited for without end")
        c.sock.settimeout(20)
        assert refusal(c, 408, "request_timeout")["message"].endswith("within 1 second")


def test_a_body_in_pieces_is_fine(impatient: Server) -> None:
    raw = json.dumps(CHAT).encode()
    with Connection(impatient.port) as c:
        c.sock.sendall(HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode())
        for i in range(0, len(raw), 20):
            c.sock.sendall(raw[i : i + 20])
            time.sleep(0.02)
        assert c.answer()[0] == 200
        c.post("/v1/chat/completions", CHAT)  # and the connection goes on
        assert c.answer()[0] == 200


@pytest.mark.parametrize(
    "head", [b"POST /v1/chat/co", HEAD, HEAD + b"X-A: b", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 100]
)
def test_headers_that_never_end_are_408(impatient: Server, head: bytes) -> None:
    with Connection(impatient.port) as c:
        c.sock.sendall(head)
        refusal(c, 408, "request_timeout")


def test_headers_that_trickle_are_408_on_a_used_connection_too(impatient: Server) -> None:
    with Connection(impatient.port) as c:
        c.post("/v1/chat/completions", CHAT)
        assert c.answer()[0] == 200
        time.sleep(0.7)  # idle is not slow
        c.post("/v1/chat/completions", CHAT)
        assert c.answer()[0] == 200
        c.sock.sendall(b"GET /heal")
        refusal(c, 408, "request_timeout")


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("where", ["one", "many", "path"])
def test_a_head_over_64_kib_is_431(server: Server, where: str, complete: bool) -> None:
    head = {
        "one": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 66_000,
        "many": b"GET /health HTTP/1.1\r\nHost: x" + b"".join(b"\r\nA%d: %s" % (i, b"b" * 100) for i in range(700)),
        "path": b"GET /health?" + b"b" * 66_000 + (b" HTTP/1.1\r\nHost: x" if complete else b""),
    }[where]
    with Connection(server.port) as c:
        c.sock.sendall(head + (b"\r\n\r\n" if complete else b""))
        refusal(c, 431, "headers_too_large")
    with Connection(server.port) as c:
        c.send("GET", "/health", None, {"A": "b" * 60_000})
        assert c.answer()[0] == 200


def test_what_is_no_http_is_an_error_object(server: Server) -> None:
    with Connection(server.port) as c:
        c.sock.sendall(b"hello there\r\n\r\n")
        refusal(c, 400, "invalid_http")


@pytest.mark.parametrize("body", [b"ZZ\r\n", b"3\r\n{ }\r\nQQ\r\n", b"3\r\n{ }XX"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_body_in_broken_chunks_is_an_error_object(server: Server, body: bytes, apart: bool) -> None:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    with Connection(server.port) as c:
        if apart:
            c.sock.sendall(head)
            with Connection(server.port) as other:  # by its answer the head has been read
                other.send("GET", "/health")
                assert other.answer()[0] == 200
            c.sock.sendall(body)
        else:
            c.sock.sendall(head + body)
        refusal(c, 400, "invalid_http")


def test_http_1_1_needs_a_host(server: Server) -> None:
    with Connection(server.port) as c:
        c.sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        status, _, body = c.answer()
        assert status == 400 and strict(body)["error"]["code"] == "invalid_http"
    with Connection(server.port) as c:
        c.sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert c.answer()[0] == 200


def test_a_path_with_two_slashes_is_named_as_it_was_asked(server: Server) -> None:
    with Connection(server.port) as c:
        c.send("GET", "//v1/models")
        status, _, body = c.answer()
        assert status == 404 and "GET //v1/models" in strict(body)["error"]["message"]


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 60_000, b"]" + b"," * 100_000])
def test_broken_json_is_called_broken_however_long(server: Server, raw: bytes) -> None:
    with Connection(server.port) as c:
        c.post("/v1/chat/completions", raw)
        status, _, body = c.answer()
        error = strict(body)["error"]
        assert status == 400 and "not valid JSON" in error["message"] and error["code"] is None


def test_long_json_that_is_valid_is_too_long(server: Server) -> None:
    with Connection(server.port) as c:
        c.post("/v1/completions", {"prompt": [[i] for i in range(60_000)]})
        status, _, body = c.answer()
        assert status == 400 and strict(body)["error"]["code"] == "context_length_exceeded"


def test_a_stop_does_not_wait_for_half_a_body(caplog: pytest.LogCaptureFixture) -> None:
    """SH-04: 503 in the error shape within a second or so, nothing in the log that looks like a fault."""
    caplog.set_level(logging.INFO)
    with (
        Server() as server,
        Connection(server.port) as half,
        Connection(server.port) as none,
        Connection(server.port) as head,
    ):
        half.sock.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
        head.sock.sendall(HEAD)
        with Connection(server.port) as other:  # the server has seen them
            other.post("/v1/chat/completions", CHAT)
            assert other.answer()[0] == 200
        server.call(server.services.uploads.close)
        assert refusal(half, 503, "unavailable")["type"] == "server_error"
        server.server.should_exit = True
        server.thread.join(20)
        for c in (none, head):
            assert c.sock.recv(10) == b""
    assert not [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]


def test_a_request_that_is_cut_by_the_end_is_503_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server:
        server.call(server.engine.gate.clear)  # no answer will ever come
        with Connection(server.port) as whole, Connection(server.port) as stream:
            whole.post("/v1/chat/completions", CHAT)
            stream.post("/v1/chat/completions", {**CHAT, "stream": True})
            server.until(lambda e: len(e.running) == 2)
            server.server.should_exit = True
            refusal(whole, 503, "unavailable")
            with pytest.raises((EOFError, ConnectionError)):
                stream.answer()
    assert not [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]


def test_a_connection_that_says_nothing_is_closed_after_the_keep_alive_time() -> None:
    with Server(keep_alive=0.3) as server, Connection(server.port) as c:
        c.sock.settimeout(10)
        assert c.sock.recv(1) == b""
        with Connection(server.port) as early:  # answered before its body came, and the body never comes
            early.sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
            assert early.answer()[0] == 404
            early.sock.sendall(b" ")
            early.sock.settimeout(10)
            try:
                assert early.sock.recv(1) == b""
            except TimeoutError:
                pytest.fail("the connection stays open for ever")
