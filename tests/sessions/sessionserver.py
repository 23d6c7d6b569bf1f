"""The real app, engine, tokenizer, template and store around an executor that computes no model, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import uvicorn

from chatsvc.api.app import create_app
from chatsvc.api.server import server_config
from chatsvc.api.services import ApiSettings, Services
from chatsvc.api.turns import Turns
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.modelfiles import resolve
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor
from chatsvc.sessions.base import SessionStore
from chatsvc.text.template import ChatTemplate, load_template
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Running:
    engine: AsyncEngine
    turns: Turns
    store: SessionStore
    http: httpx.AsyncClient
    url: str

    async def session(self, **fields: Any) -> str:
        made = await self.http.post("/v1/sessions", json=fields)
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    async def read(self, session_id: str) -> dict[str, Any]:
        got = await self.http.get(f"/v1/sessions/{session_id}")
        assert got.status_code == 200, got.text
        return dict(got.json())

    async def turn(self, session_id: str, content: str = "hi", **fields: Any) -> Answer:
        """A whole turn, read to its end."""
        body = {"content": content, "max_tokens": 12, **fields}
        async with self.http.stream("POST", f"/v1/sessions/{session_id}/messages", json=body) as response:
            assert response.status_code == 200, await response.aread()
            return await read_answer(response)

    async def settled(self, session_id: str) -> None:
        """Until the session's turn is stored."""
        async with asyncio.timeout(20):
            while self.turns.running(("", session_id)) is not None:
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.engine.num_requests:
                await asyncio.sleep(0.01)


@dataclass
class Answer:
    text: str
    ids: list[str]
    finish: str | None
    usage: dict[str, Any] | None
    done: bool
    error: dict[str, Any] | None = None
    snapshot: bool = False  # the text stands in place of all that its reader had

    def go_on(self, more: Answer) -> None:
        """``more`` is what its reader was told after this."""
        self.text = more.text if more.snapshot else self.text + more.text
        self.ids += more.ids
        self.done, self.error = more.done, more.error

    @property
    def turn_id(self) -> str:
        return self.ids[0].split(":")[0]


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(last id, data) of each event; the response's extension ``snapshot`` says that one came."""
    last = ""
    lines = response.extensions.setdefault("lines", response.aiter_lines())  # reading may go on later
    async for line in lines:
        if line.startswith("id: "):
            last = line[4:]
        elif line == "event: snapshot":
            response.extensions["snapshot"] = True
        elif line.startswith("data: "):
            yield last, line[6:]


async def read_answer(response: httpx.Response, until: int | None = None) -> Answer:
    """Reads to the end, or until that many tokens were announced."""
    answer = Answer("", [], None, None, False)
    async for last, data in events(response):
        if data == "[DONE]":
            answer.done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = chunk["error"]
            continue
        answer.usage = chunk["usage"] or answer.usage
        for choice in chunk["choices"]:
            answer.ids.append(last)
            answer.text += choice["delta"].get("content", "")
            answer.finish = choice["finish_reason"] or answer.finish
        if until is not None and int(last.rsplit(":", 1)[1]) >= until:
            break
    answer.snapshot = response.extensions.pop("snapshot", False)
    return answer


@cache
def text_side() -> tuple[Tokenizer, ChatTemplate | None]:
    """Immutable; reading them takes half a second."""
    files = resolve("smollm2-135m")
    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(files, tokenizer)


@asynccontextmanager
async def serving(
    store: SessionStore,
    *,
    step: float = 0.0,
    blocks: int = 512,
    grace: float = 60.0,
    max_queue: int = 64,
    token_fn: Any = None,
    ping: float = 5.0,
    **engine_config: Any,
) -> AsyncIterator[Running]:
    """``step``: seconds of a step. The store is opened and closed here."""
    tokenizer, template = text_side()
    simulated = SimulatedConfig(blocks, 16, tokenizer.vocab_size, 8192, step, first_token_id=17)
    executor = SimulatedExecutor(simulated, token_fn)
    engine = AsyncEngine(EngineConfig(cache_secret=b"s", max_queue=max_queue, **engine_config), executor, tokenizer)
    settings = ApiSettings(ping_interval=ping, resume_grace=grace)
    services = Services(engine, tokenizer, template, "tiny", settings, store)  # type: ignore[arg-type]
    turns = Turns(services, store)
    app = create_app(services, turns=turns)
    server = uvicorn.Server(server_config(app, host="127.0.0.1", port=0, grace=2))
    await store.open()
    await store.interrupt_running()
    await engine.start()
    task = asyncio.create_task(server._serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
            yield Running(engine, turns, store, http, url)
    finally:
        await engine.stop()
        await turns.close()
        server.should_exit = True
        await task
        await store.close()
