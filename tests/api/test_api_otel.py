"""Spans of queue, prefill and decode: from the caller's trace, over the real app."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from scripted import ScriptedEngine, Server
from wire import CHAT, Connection

from chatsvc.api.otel import Spans
from chatsvc.api.tracing import NoTracing, make_tracing

PATH = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced() -> Iterator[tuple[Server, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider)
    with Server(tracing=spans) as server:
        yield server, exporter
    spans.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({s.name for s in spans}) == len(spans)
    return {s.name: s for s in spans}


def test_OB_04_a_request_has_its_parts_in_its_callers_trace(traced: tuple[Server, InMemorySpanExporter]) -> None:
    server, exporter = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = httpx.post(server.url + PATH, json=CHAT, headers=headers, trust_env=False).json()
    spans = by_name(exporter)
    assert set(spans) == {"generate", "queue", "prefill", "decode"}
    whole = spans["generate"]
    assert f"{whole.context.trace_id:032x}" == TRACE and whole.parent and f"{whole.parent.span_id:016x}" == PARENT
    for part in ("queue", "prefill", "decode"):
        parent = spans[part].parent
        assert parent is not None and parent.span_id == whole.context.span_id
    times = [t for name in ("queue", "prefill", "decode") for t in (spans[name].start_time, spans[name].end_time)]
    assert times == sorted(times, key=lambda t: t or 0) and times[1] == times[2] and times[3] == times[4]
    assert (whole.start_time, whole.end_time) == (times[0], times[-1])
    seen = dict(whole.attributes or {})
    assert seen["gen_ai.response.id"] == answer["id"] and seen["chatsvc.request_id"] == "mine"
    assert seen["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert "hi" not in str(seen), "no text of prompts"


def test_a_caller_that_does_not_record_is_not_recorded(traced: tuple[Server, InMemorySpanExporter]) -> None:
    server, exporter = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert httpx.post(server.url + PATH, json=CHAT, headers=headers, trust_env=False).status_code == 200
    assert exporter.get_finished_spans() == ()


def test_what_never_ran_and_what_failed(traced: tuple[Server, InMemorySpanExporter]) -> None:
    server, exporter = traced
    engine = server.engine
    assert isinstance(engine, ScriptedEngine)
    server.call(engine.gate.clear)
    with Connection(server.port) as c:
        c.post(PATH, {**CHAT, "stream": True}, traceparent="nonsense")
        server.until(lambda e: e.running)
        c.close()
        server.until(lambda e: not e.running)
    assert set(by_name(exporter)) == {"generate", "queue"}
    exporter.clear()
    server.call(engine.gate.set)
    engine.fail_at = 3
    httpx.post(server.url + PATH, json=CHAT, trust_env=False)
    assert by_name(exporter)["generate"].status.status_code == StatusCode.ERROR


def test_nothing_is_imported_unless_a_collector_is_named() -> None:
    assert isinstance(make_tracing({}), NoTracing)
    code = "import sys, chatsvc.cli.serve, chatsvc.api.app; sys.exit('chatsvc.api.otel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_spans_reach_the_collector_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, len(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("NO_PROXY", "*")
    tracing = make_tracing()
    with Server(tracing=tracing) as server:
        assert httpx.post(server.url + PATH, json=CHAT, trust_env=False).status_code == 200
    tracing.close()
    collector.shutdown()
    collector.server_close()
    assert [path for path, size in got if size > 100] == ["/v1/traces"]
