"""An engine that dies takes the server with it, so that whoever watches over it starts it again; nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from pathlib import Path

import httpx
import pytest
from serve_process import Serve, ask

pytestmark = pytest.mark.timeout(120)

LOOP_DIES = """
from pathlib import Path
from chatsvc.engine.async_engine import AsyncEngine
publish = AsyncEngine._publish_news
def dying(self):
    if Path("die").exists():
        raise ZeroDivisionError("the loop itself")
    publish(self)
AsyncEngine._publish_news = dying
"""


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_SH_02_the_server_ends_with_its_engine_and_keeps_what_was_said(
    tmp_path: Path, started: list[Serve], engine: str
) -> None:
    before = LOOP_DIES if engine == "thread" else ""
    server = Serve(tmp_path, before, "--simulated-step-ms", "20", "--engine", engine)
    started.append(server)
    with server.connect() as turn, server.connect() as plain, server.connect() as half, server.connect():
        url = f"http://127.0.0.1:{turn.getpeername()[1]}/v1/sessions"
        session = httpx.post(url, json={}, trust_env=False).json()["id"]
        ask(turn, f"/v1/sessions/{session}/messages", {"content": "hi", "ignore_eos": True})
        ask(plain, "/v1/completions", {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True})
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{")
        told = {}
        for sock in (turn, plain):
            told[sock] = b""
            while told[sock].count(b"data: ") < 5:
                told[sock] += sock.recv(65536)
        if engine == "thread":
            (tmp_path / "die").touch()
        else:
            os.kill(server.children()[0], signal.SIGKILL)
        for sock in (turn, plain):
            while piece := sock.recv(65536):
                told[sock] += piece
            assert told[sock].count(b"event: error") == 1 and b"[DONE]" not in told[sock], told[sock][-500:]
            assert b'"code":"unavailable"' in told[sock].replace(b": ", b":")
        assert server.process.wait(20) == 1
    assert "to be started again" in server.text
    with contextlib.closing(sqlite3.connect(tmp_path / "chatsvc.db")) as db:
        rows = db.execute("SELECT status, body FROM messages ORDER BY seq").fetchall()
    assert [row[0] for row in rows] == ["done", "interrupted"]
    events = [json.loads(data) for data in re.findall(r"^data: (\{.*\})", told[turn].decode(), re.MULTILINE)]
    said = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e.get("choices"))
    assert said and json.loads(rows[1][1])["content"].startswith(said[:20])

    again = Serve(tmp_path, "", "--simulated-step-ms", "1", "--engine", engine)
    started.append(again)
    with again.connect() as sock:
        found = httpx.get(f"http://127.0.0.1:{sock.getpeername()[1]}/v1/sessions/{session}", trust_env=False).json()
    assert found["messages"][1]["status"] == "interrupted" and found["messages"][1]["content"]


def test_an_engine_killed_while_it_loads_ends_the_server(tmp_path: Path, started: list[Serve]) -> None:
    server = Serve(tmp_path, "", "--engine", "process")
    started.append(server)
    end = time.monotonic() + 60
    while not server.children():
        assert time.monotonic() < end and server.process.poll() is None, server.text
        time.sleep(0.01)
    os.kill(server.children()[0], signal.SIGKILL)
    assert server.process.wait(30) != 0
    assert "process has ended" in server.text and "Traceback" not in server.text, server.text
