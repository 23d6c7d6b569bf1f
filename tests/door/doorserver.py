"""The real app, engine and text side behind the door, around an executor that computes no model; a real socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from chatsvc.api.app import create_app
from chatsvc.api.keys import KeySet, parse_keys
from chatsvc.api.quota import Quotas
from chatsvc.api.server import server_config
from chatsvc.api.services import ApiSettings, Services
from chatsvc.api.turns import Turns
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.modelfiles import resolve
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor
from chatsvc.sessions.memory import MemoryStore
from chatsvc.text.template import ChatTemplate, load_template
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def secret_of(name: str) -> str:
    """The key of that name, as its client sends it."""
    return f"sk-test-{name}-{'0123456789abcdef' * 3}"


def digest_of(name: str) -> str:
    return hashlib.sha256(secret_of(name).encode()).hexdigest()


def key_file(**keys: dict[str, Any]) -> str:
    """A key file with these keys."""
    lines = []
    for name, fields in keys.items():
        lines += ["[[key]]", f'name = "{name}"', f'sha256 = "{digest_of(name)}"']
        lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    return "\n".join(lines)


class Clock:
    """Nanoseconds, by hand."""

    def __init__(self) -> None:
        self.now = 10**15

    def __call__(self) -> int:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += round(seconds * 10**9)


@cache
def text_side() -> tuple[Tokenizer, ChatTemplate | None]:
    files = resolve("smollm2-135m")
    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(files, tokenizer)


@dataclass
class Running:
    app: Starlette
    services: Services
    engine: AsyncEngine
    turns: Turns
    url: str
    clock: Clock
    keys: list[KeySet]
    nobody: httpx.AsyncClient
    clients: dict[str, httpx.AsyncClient]

    def __getitem__(self, name: str) -> httpx.AsyncClient:
        """A client with the key of that name."""
        return self.clients[name]

    def load(self, text: str) -> None:
        """From now on these keys count."""
        self.keys[0] = parse_keys(text)

    async def idle(self) -> None:
        async with asyncio.timeout(20):
            while self.engine.num_requests:
                await asyncio.sleep(0.005)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    def running(self, name: str) -> int:
        """Requests that the key's account counts as running."""
        account = self.services.quotas._accounts.get(digest_of(name))
        return account.running if account else 0


@asynccontextmanager
async def serving(
    *,
    step: float = 0.0,
    blocks: int = 512,
    settings: ApiSettings | None = None,
    config: Any = None,
    **keys: dict[str, Any],
) -> AsyncIterator[Running]:
    """``step``: seconds of a step; ``keys``: the fields of each. Without any there is no door."""
    tokenizer, template = text_side()
    simulated = SimulatedConfig(blocks, 16, tokenizer.vocab_size, 8192, step, first_token_id=17)
    engine = AsyncEngine(config or EngineConfig(cache_secret=b"s"), SimulatedExecutor(simulated), tokenizer)
    clock, store = Clock(), MemoryStore(3600.0)
    current = [parse_keys(key_file(**keys))] if keys else []
    services = Services(
        engine,  # type: ignore[arg-type]
        tokenizer,  # type: ignore[arg-type]
        template,
        "tiny",
        settings or ApiSettings(ping_interval=5.0),
        store,
        keys=(lambda: current[0]) if keys else None,
        quotas=Quotas(clock),
    )
    turns = Turns(services, store)
    app = create_app(services, turns=turns)
    server = uvicorn.Server(server_config(app, host="127.0.0.1", port=0, grace=2))
    await store.open()
    await engine.start()
    task = asyncio.create_task(server._serve())
    async with AsyncExitStack() as stack:
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

            async def client(name: str | None = None) -> httpx.AsyncClient:
                headers = {"Authorization": f"Bearer {secret_of(name)}"} if name else {}
                return await stack.enter_async_context(
                    httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, headers=headers)
                )

            clients = {name: await client(name) for name in keys}
            yield Running(app, services, engine, turns, url, clock, current, await client(), clients)
        finally:
            await engine.stop()
            await turns.close()
            server.should_exit = True
            await task
            await store.close()
