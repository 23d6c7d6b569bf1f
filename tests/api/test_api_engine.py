"""The API on the real engine, here and in a process of its own; only the model is simulated."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import TOKENIZER, VOCAB, Server
from wire import CHAT, Connection, counts, events, stream, texts

from chatsvc.api.answers_schema import KVSnapshot
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.protocol import ServedEngine
from chatsvc.engine.remote import RemoteEngine
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token

CHAT_PATH = "/v1/chat/completions"
BLOCKS, SIZE = 120, 16
LIMIT = 1000


def make_engine() -> AsyncEngine:
    """Letters only: no end token, answers run to their cap. Imported by name in the engine's own process."""
    config = SimulatedConfig(BLOCKS, SIZE, VOCAB, LIMIT, step_seconds=0.001)
    executor = SimulatedExecutor(config, hashed_token(97, 123))
    return AsyncEngine(EngineConfig(SIZE, max_queue=300), executor, TOKENIZER)  # type: ignore[arg-type]


async def make_here() -> ServedEngine:
    return make_engine()


async def make_there() -> ServedEngine:
    return await RemoteEngine.launch("test_api_engine:make_engine")


@pytest.fixture(scope="module", params=[make_here, make_there], ids=["thread", "process"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Server, ServedEngine]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        server = Server(make_engine=request.param)
        with server:
            engine = server.services.engine
            answer = httpx.get(server.url + "/ready", trust_env=False)
            assert answer.status_code == 503
            assert httpx.post(server.url + CHAT_PATH, json=CHAT, trust_env=False).status_code == 503
            server.wait(engine.start())
            yield server, engine
            server.wait(engine.stop())


@pytest.fixture
def api(served: tuple[Server, ServedEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0].url, timeout=30, trust_env=False) as client:
        yield client


def metric(api: httpx.Client, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(api.get("/metrics").text)
    return sum(s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.parametrize(("length", "expected"), [(47, 32), (48, 47), (49, 48)])
def test_PC_09_cached_tokens(
    served: tuple[Server, ServedEngine], api: httpx.Client, length: int, expected: int
) -> None:
    """A multiple of the block size, or the prompt less the one token that is always computed."""
    body = {"model": "tiny", "prompt": [length] * length, "max_tokens": 3, "temperature": 0}
    cold = api.post("/v1/completions", json=body).json()
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    for extra in ({}, {"n": 2}):
        warm = api.post("/v1/completions", json={**body, **extra}).json()
        seen = stream(served[0].port, {**body, **extra, "stream_options": {"include_usage": True}}, "/v1/completions")
        assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": expected}
        assert counts(seen[-2]["usage"]) == counts(warm["usage"])
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"] == texts(seen)[0]


def test_SE_06_the_answer_ends_exactly_at_the_limit(api: httpx.Client) -> None:
    for n in (1, 3):
        answer = api.post("/v1/completions", json={"model": "tiny", "prompt": [65] * (LIMIT - 1), "n": n}).json()
        assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * n
        assert answer["usage"]["total_tokens"] == LIMIT - 1 + n
    assert api.post("/v1/completions", json={"model": "tiny", "prompt": [65] * LIMIT}).status_code == 400


def test_ST_01_OB_01_two_hundred_cut_connections_leave_nothing(
    served: tuple[Server, ServedEngine], api: httpx.Client
) -> None:
    server, engine = served
    before = metric(api, "chatsvc_requests_finished_total", reason="abort")
    connections = [Connection(server.port) for _ in range(200)]
    for i, c in enumerate(connections):
        c.post(CHAT_PATH, {**CHAT, "stream": i % 4 != 0})
    server.until(lambda e: engine.num_requests == 200)
    KVSnapshot.model_validate(api.get("/debug/kv").json())
    for c, how in zip(connections, itertools.cycle(["close", "reset"])):
        c.reset() if how == "reset" else c.close()
    server.until(lambda e: engine.num_requests == 0)
    assert metric(api, "chatsvc_requests_finished_total", reason="abort") - before == 200
    assert metric(api, "chatsvc_kv_blocks", state="used") == 0
    assert metric(api, "chatsvc_kv_blocks") == BLOCKS
    assert all(b["ref_count"] == 0 for b in api.get("/debug/kv").json()["blocks"])
    assert api.post(CHAT_PATH, json={**CHAT, "max_tokens": 5}).status_code == 200


def test_the_block_map_changes(served: tuple[Server, ServedEngine], api: httpx.Client) -> None:
    with Connection(served[0].port) as c:
        c.send("GET", "/debug/kv/stream")
        assert c.head()[0] == 200
        first = events(c.piece())[0]
        assert first["type"] == "snapshot" and len(first["blocks"]) == BLOCKS
        api.post(CHAT_PATH, json={**CHAT, "max_tokens": 5})
        while (piece := c.piece()).startswith(b":"):
            pass
        assert events(piece)[0]["type"] == "change"


def test_a_silent_engine_holds_nobody_who_asks_for_its_block_map(
    served: tuple[Server, ServedEngine], api: httpx.Client
) -> None:
    engine = served[1]
    if not isinstance(engine, RemoteEngine):
        pytest.skip("it is silent only in a process of its own")
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        for path in ("/debug/kv", "/debug/kv/stream"):
            answer = api.get(path)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "2", path
            assert "within 2 seconds" in answer.json()["error"]["message"]
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert len(api.get("/debug/kv").json()["blocks"]) == BLOCKS
    with Connection(served[0].port) as c:
        c.send("GET", "/debug/kv/stream")
        assert c.head()[0] == 200


def test_a_cancel_reaches_the_engine(served: tuple[Server, ServedEngine], api: httpx.Client) -> None:
    with Connection(served[0].port) as c:
        c.post(CHAT_PATH, {**CHAT, "stream": True})
        assert c.head()[0] == 200
        while (piece := c.piece()).startswith(b":"):
            pass
        first = events(piece)[0]
        assert api.post(f"{CHAT_PATH}/{first['id']}/cancel").status_code == 200
        raw = piece
        while piece := c.piece():
            raw += piece
        last = events(raw)[-2]["choices"][0]
        assert last["cancelled"] is True and last["finish_reason"] == "stop"
    served[0].until(lambda e: served[1].num_requests == 0)


def test_one_seed_one_answer(api: httpx.Client) -> None:
    def ask(**fields: Any) -> list[str]:
        body = {**CHAT, "max_tokens": 8, "n": 3, "temperature": 1.5, **fields}
        return [c["message"]["content"] for c in api.post(CHAT_PATH, json=body).json()["choices"]]

    assert ask(seed=7) == ask(seed=7) != ask(seed=8)
    assert ask(seed=-1) == ask(seed=-1)
    assert len(set(ask(seed=7))) == 3
    assert ask() != ask()


@pytest.mark.parametrize("make", [make_here, make_there], ids=["thread", "process"])
def test_SH_04_while_draining_streams_go_on_and_new_requests_are_refused(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Server(make_engine=make) as server, httpx.Client(base_url=server.url, trust_env=False) as api:
        engine = server.services.engine
        server.wait(engine.start())
        with Connection(server.port) as c:
            c.post(CHAT_PATH, {**CHAT, "stream": True, "max_tokens": 300})
            server.until(lambda e: engine.num_requests == 1)
            server.call(engine.begin_drain)
            refused = api.post(CHAT_PATH, json=CHAT)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert (api.get("/health").status_code, api.get("/ready").status_code) == (200, 503)
            seen = events(c.answer()[2])
            assert seen[-1] == "[DONE]" and len(texts(seen)[0]) == 300
        server.wait(engine.stop())


def test_SH_02_streams_of_a_killed_engine_end_with_an_error_event_and_health_is_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with Server(make_engine=make_there) as server, httpx.Client(base_url=server.url, trust_env=False) as api:
        engine = server.services.engine
        assert isinstance(engine, RemoteEngine)
        server.wait(engine.start())
        with Connection(server.port) as c, Connection(server.port) as whole:
            c.post(CHAT_PATH, {**CHAT, "stream": True})
            whole.post(CHAT_PATH, CHAT)
            first = c.head() and c.piece()
            server.until(lambda e: engine.num_requests == 2)
            os.kill(engine.pid, signal.SIGKILL)
            raw = first
            while piece := c.piece():
                raw += piece
            seen = events(raw)
            assert seen[-1]["error"]["type"] == "server_error" and seen[-1]["error"]["message"]
            assert whole.answer()[0] == 503
        assert [api.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert api.post(CHAT_PATH, json=CHAT).status_code == 503
        assert api.get("/metrics").status_code == 200
        server.wait(engine.stop())
