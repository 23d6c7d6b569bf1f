"""The load test against a fake server whose timing is known."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None}


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}], "usage": None}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 100, "completion_tokens": 16, "prompt_tokens_details": {"cached_tokens": 64}},
}
FIRST, GAP = 0.4, 0.12  # seconds; four tokens a chunk, so 30 ms a token

Writer = Callable[[Any], Awaitable[None]]


async def good(write: Writer) -> None:
    await write(ROLE)
    await asyncio.sleep(FIRST)
    for i in range(4):
        if i:
            await asyncio.sleep(GAP)
        await write(text(f"four tokens {i}"))
    await write(END)
    await write(USAGE)
    await write("[DONE]")


async def truncated(write: Writer) -> None:
    await write(ROLE)
    await write(text("half an"))


async def error_in_the_middle(write: Writer) -> None:
    await write(text("half an"))
    await write({"error": {"message": "the engine fell over", "type": "server_error"}})
    await write("[DONE]")


async def empty(write: Writer) -> None:
    await write(ROLE)
    await write(END)
    await write(USAGE)
    await write("[DONE]")


def app(kinds: list[Any], seen: list[dict[str, Any]]) -> web.Application:
    """Answers in turn as ``kinds`` says; a number is an HTTP status. Afterwards everything is good."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        kind = kinds.pop(0) if kinds else good
        if isinstance(kind, int):
            return web.json_response({"error": {"message": "no"}}, status=kind, headers={"Retry-After": "0"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def write(item: Any) -> None:
            data = item if isinstance(item, str) else json.dumps(item)
            await response.write(b": ping\n\ndata: " + data.encode() + b"\n\n")

        await kind(write)
        return response

    application = web.Application()
    application.router.add_get("/v1/models", models)
    application.router.add_post("/v1/chat/completions", chat)
    return application


async def run(kinds: list[Any], tmp_path: Path, seconds: int = 4) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Locust's statistics by name, the requests that the server saw, and what was printed."""
    seen: list[dict[str, Any]] = []
    runner = web.AppRunner(app(kinds, seen))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    html = tmp_path / "report.html"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "1", "-r", "1", "-t", f"{seconds}s",
        "--host", f"http://127.0.0.1:{port}", "--html", str(html), "--json", "--stop-timeout", "5", "--turns", "2",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env={**os.environ, "CHATSVC_API_KEY": "sk-load"},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    await runner.cleanup()
    printed = out.decode()
    start = printed.index("[\n")
    stats = json.JSONDecoder().raw_decode(printed[start:])[0]
    assert html.stat().st_size > 1000, err
    return {entry["name"]: entry for entry in stats}, seen, printed + err.decode()


def times(entry: dict[str, Any]) -> list[float]:
    return sorted(float(t) for t in entry["response_times"])


async def test_what_is_measured_is_what_happened(tmp_path: Path) -> None:
    """LT-01, LT-02, LT-03. Sleeps can only be longer than asked, so every bound holds on a busy machine too."""
    stats, seen, printed = await run([], tmp_path)
    whole, ttft = stats["/v1/chat/completions"], stats["TTFT"]
    inter, silence = stats["inter-token"], stats["silence"]
    count = whole["num_requests"]
    assert count >= 2 and whole["num_failures"] == 0
    assert ttft["num_requests"] == inter["num_requests"] == silence["num_requests"] == count
    assert ttft["min_response_time"] >= FIRST * 1000 - 5  # not the role at 0 s
    assert inter["min_response_time"] >= GAP * 1000 / 4 - 1  # per token ...
    # ... and not per chunk: an answer's longest gap is at least its mean gap, which is four tokens long.
    assert inter["min_response_time"] <= silence["min_response_time"] / 4 + 1
    assert silence["min_response_time"] >= GAP * 1000 - 5
    assert whole["min_response_time"] >= (FIRST + 3 * GAP) * 1000 - 5  # the whole answer, not its headers
    assert ttft["min_response_time"] < whole["min_response_time"] - 2 * GAP * 1000
    assert all(r["model"] == "fake" and r["stream"] and r["stream_options"] == {"include_usage": True} for r in seen)
    assert {r["authorization"] for r in seen} == {"Bearer sk-load"} and "sk-load" not in printed
    lengths = [len(r["messages"]) for r in seen]
    assert lengths[:3] == [2, 4, 2][: len(lengths)]  # turns of one conversation, then a new one
    assert "64% of them cached" in printed and f"{16 * count} generated" in printed


async def test_failures_stand_apart(tmp_path: Path) -> None:
    """LT-04: refused, broken and cut answers are failures and have no time; an empty one breaks nothing."""
    stats, _, printed = await run([429, 503, truncated, error_in_the_middle, empty], tmp_path, seconds=10)
    whole = stats["/v1/chat/completions"]
    assert whole["num_failures"] == 4
    assert whole["num_none_requests"] == 4  # counted, and not in the percentiles
    assert stats["TTFT"]["num_requests"] == whole["num_requests"] - 4 - 1
    assert stats["TTFT"]["min_response_time"] >= FIRST * 1000 - 5
    for reason in ("HTTP 429", "HTTP 503", "truncated: no [DONE]", "the engine fell over"):
        assert reason in printed
    assert "Traceback" not in printed
