"""How ``chatsvc serve`` ends: by which signals, how fast, and without a word that looks like a fault."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import httpx
import pytest
from serve_process import Serve, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HUNG = """
import time
from chatsvc.runtime.simulated import SimulatedExecutor
SimulatedExecutor.run = lambda self, plan: time.sleep(900)  # no signal, no stop() reaches it
"""
SLOW_START = """
import time
from chatsvc.cli import serve
build = serve.build
serve.build = lambda config: (print("building", flush=True), time.sleep(900))
"""


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_first_signal_waits_for_answers_and_not_for_half_a_body(
    tmp_path: Path, started: list[Serve], engine: str
) -> None:
    server = Serve(tmp_path, "", "--simulated-step-ms", "20", "--engine", engine)
    started.append(server)
    with server.connect() as stream, server.connect() as half, server.connect():
        children = server.children()
        assert len(children) == (engine == "process")
        ask(stream, "/v1/completions", {"prompt": "hi", "max_tokens": 60, "ignore_eos": True, "stream": True})
        assert stream.recv(300).startswith(b"HTTP/1.1 200")
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{")
        server.process.send_signal(signal.SIGTERM)
        refused = half.recv(2000)
        refused += half.recv(2000)
        assert refused.startswith(b"HTTP/1.1 503") and b'"error"' in refused
        text = b""
        while piece := stream.recv(65536):
            text += piece
        assert b"[DONE]" in text
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.text and "ERROR" not in server.text, server.text
    assert "server process" not in server.text and "ended" in server.text
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_second_signal_ends_at_once_and_keeps_what_was_said(
    tmp_path: Path, started: list[Serve], engine: str
) -> None:
    server = Serve(tmp_path, "", "--simulated-step-ms", "50", "--drain-timeout", "600", "--engine", engine)
    started.append(server)
    with server.connect() as stream, server.connect() as half:
        url = f"http://127.0.0.1:{stream.getpeername()[1]}/v1/sessions"
        session = httpx.post(url, json={}, trust_env=False).json()["id"]
        ask(stream, f"/v1/sessions/{session}/messages", {"content": "hi", "ignore_eos": True})
        assert stream.recv(300).startswith(b"HTTP/1.1 200")
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{")
        assert server.ends(signal.SIGINT, signal.SIGINT) == 128 + signal.SIGINT
    with contextlib.closing(sqlite3.connect(tmp_path / "chatsvc.db")) as db:
        assert [row[0] for row in db.execute("SELECT status FROM messages ORDER BY seq")] == ["done", "interrupted"]


def test_a_hung_step_does_not_hold_the_second_signal(tmp_path: Path, started: list[Serve]) -> None:
    server = Serve(tmp_path, HUNG, "--drain-timeout", "600")
    started.append(server)
    with server.connect() as sock:
        ask(sock, "/v1/completions", {"prompt": "hi", "stream": True})
        assert sock.recv(300).startswith(b"HTTP/1.1 200")
        assert server.ends(signal.SIGTERM, signal.SIGTERM) == 128 + signal.SIGTERM
    assert "did not stop" not in server.text, "that would be the first signal's patience"


def test_a_signal_while_it_loads(tmp_path: Path, started: list[Serve]) -> None:
    server = Serve(tmp_path, SLOW_START)
    started.append(server)
    server.until("building")
    assert server.ends(signal.SIGTERM) == 0
    assert "SIGTERM while the model is loading" in server.text


HANGUP_KILLS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # also where the tests run below nohup


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_hangup_is_no_end_where_there_is_nothing_to_read_again(
    tmp_path: Path, started: list[Serve], engine: str
) -> None:
    server = Serve(tmp_path, HANGUP_KILLS, "--engine", engine)
    started.append(server)
    with server.connect() as sock:
        for pid in (server.process.pid, *server.children()):
            os.kill(pid, signal.SIGHUP)
        ask(sock, "/v1/completions", {"prompt": "hi", "max_tokens": 3})
        assert sock.recv(300).startswith(b"HTTP/1.1 200")
    assert server.ends(signal.SIGTERM) == 0
