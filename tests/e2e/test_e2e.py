"""The main job: a real server process, the real model, real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG_SYSTEM = "You are the clerk of a shop. " + " ".join(
    f"Rule {i}: item {i * 7} costs {i * 3} euros and stays {i + 2} days." for i in range(56)
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("e2e"))
    try:
        yield served.wait()
    finally:
        assert served.stop() == 0, served.text
        assert "Traceback" not in served.text, served.text


def body(content: str, **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16, **extra}


def chat(server: Served, messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    response = httpx.post(
        server.url + "/v1/chat/completions",
        json={"messages": messages, "temperature": 0, "max_tokens": 24, **extra},
        timeout=300,
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_second_turn_finds_the_first_one_in_the_cache(server: Served) -> None:
    messages = [
        {"role": "system", "content": "You answer in full sentences."},
        {"role": "user", "content": "Who are you?"},
    ]
    first = chat(server, messages)
    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And what can you do?"},
    ]
    second = chat(server, messages)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The last token of an answer is never computed, and an end token is followed by what the template writes.
    assert cached >= (known - 1) // 16 * 16


def test_a_session_turn_always_finds_all_full_blocks_of_the_turn_before(server: Served) -> None:
    with httpx.Client(base_url=server.url, timeout=300) as http:
        session = http.post("/v1/sessions", json={"system": "You like lighthouses."}).raise_for_status().json()
        known = 0
        for i, content in enumerate(("Tell me about the sea.", "Et l'été à Genève? 🚀", "Once more, please.")):
            usage = {}
            with http.stream(
                "POST",
                f"/v1/sessions/{session['id']}/messages",
                json={"content": content, "max_tokens": 30, "temperature": 1.0, "seed": i},
            ) as response:
                assert response.status_code == 200
                response.read()
            for message in http.get(f"/v1/sessions/{session['id']}").json()["messages"]:
                usage = message["usage"] or usage
            assert usage["prompt_tokens_details"]["cached_tokens"] >= known // 16 * 16, (i, usage)
            known = usage["prompt_tokens"] + usage["completion_tokens"] - 1


async def test_sixteen_equal_system_prompts_in_one_instant_are_computed_once(server: Served) -> None:
    before = server.idle()
    async with httpx.AsyncClient(timeout=300) as http:
        system = {"role": "system", "content": LONG_SYSTEM}
        requests = [
            http.post(
                server.url + "/v1/chat/completions",
                json={"messages": [system, {"role": "user", "content": f"Question {i}?"}], "max_tokens": 4},
            )
            for i in range(16)
        ]
        usages = [r.json()["usage"] for r in await asyncio.gather(*requests)]
    after = server.idle()
    prompt = usages[0]["prompt_tokens"]
    assert prompt > 1000
    computed = after["computed_tokens_total"] - before["computed_tokens_total"]
    # once the shared part; then for each request its own end (under three blocks) and three more tokens
    assert computed < prompt + 16 * (3 * 16 + 4), (prompt, computed)
    assert sum(u["prompt_tokens_details"]["cached_tokens"] > 900 for u in usages) >= 15


def test_a_prompt_of_exactly_k_blocks(server: Served) -> None:
    # token ids, so that the length is exact
    ids = [(i * 37) % 40000 + 1000 for i in range(64)]
    answers, computed = [], []
    for _ in range(3):
        before = server.idle()["computed_tokens_total"]
        r = httpx.post(
            server.url + "/v1/completions",
            json={"prompt": ids, "max_tokens": 5, "temperature": 0, "ignore_eos": True},
            timeout=300,
        )
        answers.append(r.json()["choices"][0]["text"])
        computed.append(server.idle()["computed_tokens_total"] - before)
    assert answers[0] == answers[1] == answers[2]
    assert computed == [64 + 4, 1 + 4, 1 + 4]


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def send(sock: socket.socket, payload: dict[str, Any]) -> None:
    data = json.dumps(payload).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def test_st01_two_hundred_cut_connections_leave_nothing(server: Served) -> None:
    before = server.idle()
    for wave in range(10):
        socks = []
        for i in range(20):
            sock = connect(server)
            # streamed and not, running and queued, read a little and not at all
            send(sock, body(f"Tell a long story, number {wave}-{i}.", max_tokens=2000, stream=i % 4 != 0))
            socks.append(sock)
        for i, sock in enumerate(socks):
            if i % 4 in (1, 2):
                sock.recv(400)
            if i % 2:  # by RST
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
    after = server.idle()
    ended = after['requests_finished_total{reason="abort"}'] - before['requests_finished_total{reason="abort"}']
    assert ended == 200, "every one of them is counted"
    assert httpx.post(server.url + "/v1/chat/completions", json=body("Hi"), timeout=60).status_code == 200


def test_keep_alive_connections_serve_one_request_after_another(server: Served) -> None:
    sock = connect(server)
    file = sock.makefile("rb")
    for i in range(4):
        send(sock, body("Hi", max_tokens=3, stream=bool(i % 2)) if i != 2 else {"messages": "wrong"})
        status = file.readline().split()[1]
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        assert status == (b"400" if i == 2 else b"200") and headers.get("connection") != "close"
        if "content-length" in headers:
            file.read(int(headers["content-length"]))
        else:
            while (size := int(file.readline(), 16)) > 0:
                file.read(size + 2)
            file.readline()
    sock.close()


def test_sh04_sigterm_lets_streams_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    server = Served(tmp_path).wait()
    texts: list[str] = []
    with httpx.Client(timeout=120) as http, httpx.Client(timeout=120) as other:
        payload = body("Tell me a story.", max_tokens=60, stream=True, ignore_eos=True)
        with http.stream("POST", server.url + "/v1/chat/completions", json=payload) as response:
            for line in response.iter_lines():
                texts.append(line)
                if len(texts) == 4:
                    server.process.send_signal(signal.SIGTERM)
                    until = time.monotonic() + 30
                    while other.get(server.url + "/ready").status_code != 503 and time.monotonic() < until:
                        time.sleep(0.05)
                    refused = other.post(server.url + "/v1/chat/completions", json=body("Hi"))
                    assert refused.status_code == 503 and "retry-after" in refused.headers
                    assert other.get(server.url + "/health").status_code == 200
    assert "data: [DONE]" in texts and any('"finish_reason":"length"' in t for t in texts)
    assert server.process.wait(60) == 0, server.text
    server.out.close()


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_me01_what_cannot_fit_is_refused_at_start_with_the_numbers(tmp_path: Path, engine: str) -> None:
    server = Served(tmp_path, num_kv_blocks=10, max_model_len=2048, engine=engine)
    assert server.process.wait(120) == 1
    assert "128 blocks" in server.text and "has 10" in server.text and "Traceback" not in server.text
    server.out.close()


def test_an_engine_in_a_process_of_its_own_gives_the_same_answers(server: Served, tmp_path: Path) -> None:
    """Streamed and not, and the same numbers afterwards; the process that serves the sockets has no torch in it."""
    other = Served(tmp_path, engine="process").wait()
    try:
        for payload in (body("Name three colours.", max_tokens=40), body("Hi", n=2, temperature=1.0, seed=3)):
            url = "/v1/chat/completions"
            here, there = (httpx.post(s.url + url, json=payload, timeout=60).json() for s in (server, other))
            assert here["choices"] == there["choices"]
            streamed = httpx.post(other.url + url, json={**payload, "stream": True}, timeout=60).text
            assert streamed.endswith("data: [DONE]\n\n")
        assert other.idle()["generation_tokens_total"] > 40
        assert "libtorch" not in Path(f"/proc/{other.process.pid}/maps").read_text()
    finally:
        assert other.stop() == 0, other.text


def test_a_pool_of_ten_blocks_serves_and_refuses_what_never_fits(tmp_path: Path) -> None:
    server = Served(tmp_path, num_kv_blocks=10).wait()
    try:
        assert "lowered" in server.text
        url = server.url + "/v1/completions"
        for payload in ({"prompt": [5] * 160}, {"prompt": [5] * 100, "max_tokens": 61}):
            r = httpx.post(url, json=payload, timeout=60)
            assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded"
            assert "160" in r.json()["error"]["message"]
        r = httpx.post(url, json={"prompt": [5] * 100, "ignore_eos": True}, timeout=60)
        assert r.json()["usage"]["completion_tokens"] == 60 and r.json()["choices"][0]["finish_reason"] == "length"
    finally:
        assert server.stop() == 0
