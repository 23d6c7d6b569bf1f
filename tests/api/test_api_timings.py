"""How long the parts of a request took: in the usage object and in its log line."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, Server
from wire import CHAT, Connection, stream

from chatsvc.api.answers_schema import Usage
from chatsvc.api.timings import timings
from chatsvc.engine.output import Generation, Timings
from chatsvc.scheduler.plan import SampledToken
from chatsvc.sessions.memory import MemoryStore

PATH = "/v1/chat/completions"


def generation(tokens: list[int], *times: float | None) -> Generation:
    g = Generation("r", [1], len(tokens), lambda: None, 0.0)
    g.timings = Timings(*times)  # type: ignore[arg-type]
    for log, count in zip(g.logs, tokens, strict=True):
        log.tokens = [SampledToken(0)] * count
    return g


@pytest.mark.parametrize(
    ("generations", "expected"),
    [
        ([generation([5], 10.0, 10.5, 12.0, 14.0)], (0.5, 1.5, 2.0, 2.0, 4.0, 2.0)),
        ([generation([5, 3], 10.0, 10.5, 12.0, 14.0)], (0.5, 1.5, 2.0, 2.0, 4.0, 3.0)),
        ([generation([1], 10.0, 10.0, 12.0, 12.0)], (0.0, 2.0, 2.0, 0.0, 2.0, None)),
        ([generation([0], 10.0, None, None, 11.0)], (None, None, None, None, 1.0, None)),
        ([generation([4], 10.0, 10.5, 12.0, None)], (0.5, 1.5, 2.0, None, None, None)),
        (
            [generation([5], 10.0, 11.0, 12.0, 14.0), generation([5], 10.5, 10.75, 11.0, 15.0)],
            (0.75, 0.25, 1.0, 4.0, 5.0, 2.0),
        ),
        ([generation([5], 1.0, 1.0, 1.0, 2.0), generation([5], 1.0, 1.0, 1.0, None)], (0, 0, 0, None, None, None)),
    ],
)
def test_timings(generations: list[Generation], expected: tuple[float | None, ...]) -> None:
    assert tuple(timings(generations).values()) == expected


def test_the_last_usage_of_a_stream_and_a_whole_answer_have_them(server: Server, http: httpx.Client) -> None:
    whole = http.post(PATH, json=CHAT).json()["usage"]
    last = stream(server.port, {**CHAT, "stream_options": {"include_usage": True}})[-2]["usage"]
    for usage in (whole, last):
        times = Usage.model_validate(usage).timings
        assert times is not None and times.first_token_seconds is not None and times.queue_seconds is not None
        assert times.prefill_seconds is not None
        total = times.queue_seconds + times.prefill_seconds
        assert times.first_token_seconds == pytest.approx(total, abs=2e-6)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == "chatsvc.access"]


def test_OB_01_OB_04_each_request_has_one_log_line_with_its_end_and_its_times(
    server: Server, engine: ScriptedEngine, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chatsvc.access")
    http.post(PATH, json=CHAT, headers={"x-request-id": "whole"})
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post(PATH, {**CHAT, "stream": True}, **{"x-request-id": "gone"})
        server.until(lambda e: e.running)
        c.reset()
        server.until(lambda e: not e.running)
    for _ in range(200):
        if len(lines(caplog)) == 2:
            break
        server.call(lambda: None)
    whole, gone = lines(caplog)
    assert (whole["request_id"], whole["outcome"], whole["finish"]) == ("whole", "ok", ["stop"])
    assert whole["queue_seconds"] >= 0 and whole["prefill_seconds"] >= 0 and whole["first_token_seconds"] >= 0
    assert (gone["request_id"], gone["outcome"], gone["finish"]) == ("gone", "client_gone", ["abort"])
    assert gone["completion_tokens"] == 0 and "first_token_seconds" not in gone


def test_OB_04_the_log_line_of_a_sessions_answer_has_its_times(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chatsvc.access")
    with Server(store=MemoryStore(60.0)) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        session = http.post("/v1/sessions", json={}).json()["id"]
        body = {"content": "hi", "max_tokens": 4}
        assert http.post(f"/v1/sessions/{session}/messages", json=body).text.endswith("[DONE]\n\n")
        for _ in range(200):
            if len(lines(caplog)) == 2:
                break
            server.call(lambda: None)
    line = lines(caplog)[-1]
    assert line["path"].endswith("/messages") and line["queue_seconds"] >= 0 and line["first_token_seconds"] >= 0
