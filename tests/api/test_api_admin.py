"""Probes, models, metrics, the block map, the API's description, request ids and log lines."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedEngine, Server
from starlette.routing import Route
from wire import CHAT, Connection, events

from chatsvc.api import openapi
from chatsvc.api.answers_schema import KVSnapshot, ModelCard, ModelList
from chatsvc.api.app import create_app
from chatsvc.api.openapi_responses import RESPONSE_OPERATIONS
from chatsvc.api.openapi_sessions import SESSION_OPERATIONS, SessionCard, SessionDeleted, SessionList
from chatsvc.sessions.memory import MemoryStore

CHAT_PATH = "/v1/chat/completions"


def test_SH_02_probes(http: httpx.Client, server: Server, engine: ScriptedEngine) -> None:
    def probes() -> tuple[int, int]:
        return http.get("/health").status_code, http.get("/ready").status_code

    assert probes() == (200, 200)
    for ready, healthy, expected in ((False, True, (200, 503)), (False, False, (503, 503)), (True, False, (503, 503))):
        server.call(lambda r=ready, h=healthy: (setattr(engine, "ready", r), setattr(engine, "healthy", h)))
        assert probes() == expected
    assert http.get("/ready").headers["retry-after"]


def test_models(http: httpx.Client, server: Server, engine: ScriptedEngine) -> None:
    listed = ModelList.model_validate(http.get("/v1/models").json())
    assert [m.id for m in listed.data] == ["tiny"] and listed.data[0].max_model_len == engine.limit
    ModelCard.model_validate(http.get("/v1/models/tiny").json())
    server.call(lambda: setattr(engine, "ready", False))
    assert "max_model_len" not in http.get("/v1/models/tiny").json()


def test_a_model_name_with_a_slash() -> None:
    with Server(model_name="org/tiny-1.5") as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        assert http.get("/v1/models/org/tiny-1.5").json()["id"] == "org/tiny-1.5"
        assert http.get("/v1/models/org%2Ftiny-1.5").status_code == 200
        assert http.post(CHAT_PATH, json={**CHAT, "model": "org/tiny-1.5"}).status_code == 200


def test_metrics_are_this_apps_own(http: httpx.Client, engine: ScriptedEngine) -> None:
    http.post(CHAT_PATH, json=CHAT)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    assert names and all(n.startswith("chatsvc_requests_finished") for n in names)  # no process-wide collectors


def test_the_block_map(http: httpx.Client, engine: ScriptedEngine) -> None:
    snapshot = http.get("/debug/kv").json()
    KVSnapshot.model_validate(snapshot)
    assert snapshot == engine.kv_snapshot()
    engine.capacity = type(engine.capacity)(3000, 1000, 512, 300)
    assert http.get("/debug/kv").json() == engine.kv_snapshot()


def test_the_block_maps_changes(server: Server, engine: ScriptedEngine) -> None:
    engine.kv_changes = [{"type": "snapshot", "block_size": 4, "blocks": [], "sequences": []}]
    with Connection(server.port) as c:
        c.send("GET", "/debug/kv/stream")
        assert c.head()[1]["content-type"].startswith("text/event-stream")
        first = c.piece()
        change = {"type": "change", "blocks": [], "sequences": [], "gone": ["a"]}
        server.call(lambda: engine.kv_changes.append(change))
        assert events(first + c.piece()) == engine.kv_changes
        assert c.piece() == b": ping\n\n"


def test_UI_01_the_page_and_its_headers(http: httpx.Client) -> None:
    answer = http.get("/")
    files = re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text)
    assert files
    for page in (answer, *(http.get(f) for f in files)):
        policy = page.headers["content-security-policy"]
        assert page.status_code == 200 and "script-src 'self'" in policy and "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
    assert http.get("/static/nothing.js").json()["error"]["code"] == "not_found"
    assert http.get("/static/../app.py").status_code == 404
    assert http.get("/static/%2e%2e/app.py").status_code == 404


# -- the description -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [None, MemoryStore(60.0)], ids=["plain", "sessions"])
def test_openapi_names_every_route_and_no_other(server: Server, store: MemoryStore | None) -> None:
    services = dataclasses.replace(server.services, store=store)
    operations = [*openapi.OPERATIONS, *RESPONSE_OPERATIONS, *(() if store is None else SESSION_OPERATIONS)]
    document = openapi.document(operations)
    described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    offered = {
        (re.sub(r":path}", "}", route.path), method)
        for route in create_app(services).routes
        if isinstance(route, Route) and route.path != "/"
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == offered


def test_ready_tells_about_the_store_and_does_not_depend_on_it() -> None:
    answers = [True]
    with (
        Server(store=MemoryStore(60.0), store_answers=lambda: answers[0]) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert http.get("/ready").json() == {"status": "ready", "store": "ok"}
        answers[0] = False
        ready = http.get("/ready")
        assert ready.status_code == 200 and ready.json() == {"status": "ready", "store": "away"}
        assert http.options("/v1/sessions").headers["allow"] == "GET, HEAD, POST"
        assert http.put("/v1/sessions/x").headers["allow"] == "DELETE, GET, HEAD, PATCH"


def test_openapi_is_true_about_sessions() -> None:
    with Server(store=MemoryStore(60.0)) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        assert "/v1/sessions" in http.get("/openapi.json").json()["paths"]
        made = http.post("/v1/sessions", json={"title": "t"})
        assert made.status_code == 201
        one = SessionCard.model_validate(made.json()).id
        SessionList.model_validate(http.get("/v1/sessions").json())
        said = http.post(f"/v1/sessions/{one}/messages", json={"content": "hi"})
        assert said.status_code == 200 and "[DONE]" in said.text
        full = SessionCard.model_validate(http.get(f"/v1/sessions/{one}").json())
        assert [m.role for m in full.messages] == ["user", "assistant"]
        SessionDeleted.model_validate(http.delete(f"/v1/sessions/{one}").json())
        assert http.get(f"/v1/sessions/{one}").status_code == 404


def test_openapi_refs_resolve_and_answers_are_described(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= set(document["components"]["schemas"])
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["responses"]["200"]["content"]
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_openapi_is_true_about_statuses(http: httpx.Client) -> None:
    """What the tests of errors see is in the document."""
    document = openapi.document()
    for path in (CHAT_PATH, "/v1/completions"):
        assert set(document["paths"][path]["post"]["responses"]) >= {
            "200",
            "400",
            "404",
            "413",
            "415",
            "429",
            "500",
            "503",
        }
    assert "422" not in json.dumps(document)


# -- following one request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", ["abc", "A-b_c.d:9", "x" * 128])
def test_OB_04_a_sane_request_id_comes_back(http: httpx.Client, good: str) -> None:
    for answer in (
        http.post(CHAT_PATH, json=CHAT, headers={"x-request-id": good}),
        http.post(CHAT_PATH, json={**CHAT, "stream": True}, headers={"x-request-id": good}),
        http.post(CHAT_PATH, json={}, headers={"x-request-id": good}),
        http.get("/nothing", headers={"x-request-id": good}),
        http.put("/health", headers={"x-request-id": good}),
    ):
        assert answer.headers.get_list("x-request-id") == [good]


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "<script>", 'a"b', "é"])
def test_OB_04_another_one_is_replaced(http: httpx.Client, bad: str) -> None:
    answer = http.get("/v1/models", headers=[(b"x-request-id", bad.encode())])
    seen = answer.headers["x-request-id"]
    assert seen != bad and seen.startswith("req_")


def test_OB_04_two_requests_with_one_id_stay_apart(http: httpx.Client, engine: ScriptedEngine) -> None:
    ids = {http.post(CHAT_PATH, json=CHAT, headers={"x-request-id": "same"}).json()["id"] for _ in range(2)}
    assert len(ids) == 2 and {p.request_id for p in engine.plays} == ids


def test_OB_04_one_line_per_request_and_no_prompt_in_it(
    http: httpx.Client, server: Server, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "verysecret"}]}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    http.post(CHAT_PATH, json=body, headers={"x-request-id": "r-ok", **trace})
    http.post(CHAT_PATH, json={**body, "stream": True}, headers={"x-request-id": "r-stream"})
    http.post(CHAT_PATH, json={**body, "n": 0}, headers={"x-request-id": "r-bad"})
    engine.fail_at = 1
    http.post(CHAT_PATH, json={**body, "stream": True}, headers={"x-request-id": "r-fault"})
    http.get("/health", headers={"x-request-id": "r-probe"})

    def lines() -> dict[str, Any]:
        records = [r.getMessage() for r in caplog.records if r.name == "chatsvc.access"]
        parsed = [json.loads(line) for line in records]
        assert len({p["request_id"] for p in parsed}) == len(parsed)
        return {p["request_id"]: p for p in parsed}

    server.until(lambda e: len(lines()) == 4)  # the line comes after the answer's last byte
    seen = lines()
    assert {i: (p["status"], p["outcome"]) for i, p in seen.items()} == {
        "r-ok": (200, "ok"), "r-stream": (200, "ok"), "r-bad": (400, "refused"), "r-fault": (200, "error"),
    }  # fmt: skip
    for name in ("r-ok", "r-stream"):
        line = seen[name]
        assert line["completion_tokens"] == 8 and line["prompt_tokens"] > 0 and line["finish"] == ["stop"]
        assert line["id"].startswith("chatcmpl-") and line["seconds"] >= line["first_token_seconds"] >= 0
    assert seen["r-ok"]["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert "verysecret" not in caplog.text
