"""A scripted engine, tokenizer and template, and a real uvicorn server around them.

The engine plays token lists into real output logs through the real detokenizer and stop matcher; what it does not do
is compute. Tests reach into the server's loop with ``server.call``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter

from chatsvc.api.app import create_app
from chatsvc.api.server import server_config
from chatsvc.api.services import ApiSettings, Services
from chatsvc.engine.output import Generation, OutputLog
from chatsvc.errors import InvalidRequest, Overloaded
from chatsvc.runtime.executor import KVCapacity
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken
from chatsvc.text.detokenizer import IncrementalDetokenizer
from chatsvc.text.stop import StopMatcher

EOS, BOS = 256, 257
VOCAB = 300


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends a turn, 257 begins a text; the rest are bytes modulo 256."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})
    strips_leading_space = False

    def encode(self, text: str, *, special: bool = False, bos: bool = False, continuing: bool = False) -> list[int]:
        ids: list[int] = list(text.encode())
        if special and text.startswith("<s>"):
            ids[:3] = [BOS]
        if bos and ids[:1] != [BOS]:
            ids.insert(0, BOS)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == EOS:
            return b"<|end|>"
        if token_id == BOS:
            return b"<s>"
        return bytes([token_id % 256])

    def is_special(self, token_id: int) -> bool:
        return token_id in (EOS, BOS)


class PlainTemplate:
    """``role: content`` lines; refuses what its tests want refused. ``knows_tools``: it writes their names in front."""

    def __init__(self, knows_tools: bool = False) -> None:
        self.knows_tools = knows_tools

    def encode(
        self,
        messages: list[dict[str, Any]],
        tokenizer: ByteTokenizer,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        assistant_ids: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        if messages[0]["content"] == "refuse me":
            raise InvalidRequest("the template refuses", param="messages")
        ids: list[int] = []
        if tools:
            ids += tokenizer.encode(" ".join(t["function"]["name"] for t in tools) + "\n")
        for i, message in enumerate(messages):
            calls = "".join(
                f"{c['function']['name']}{c['function']['arguments']}" for c in message.get("tool_calls", ())
            )
            said = (assistant_ids or {}).get(i) or tokenizer.encode(message["content"])
            ids += [*tokenizer.encode(f"{message['role']}: "), *said, *tokenizer.encode(calls), EOS]
        if continue_final_message:
            del ids[-1]
        elif add_generation_prompt:
            ids += tokenizer.encode("assistant: ")
        return ids


@dataclass
class Play:
    """One request as the engine got it, and how it goes on."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    tenant: str
    cache_salt: str
    priority: int
    generation: Generation
    task: asyncio.Task[None] | None = None
    cancelled: bool = False


Script = Callable[[list[int], SamplingParams, int], Sequence[int]]


def hello(prompt: list[int], params: SamplingParams, choice: int) -> Sequence[int]:
    """The default script: a greeting that differs by choice, then the end token."""
    return [*f"Hello {choice}".encode(), EOS]


def text_script(text: str) -> Script:
    return lambda prompt, params, choice: [*text.encode(), EOS]


@dataclass
class ScriptedEngine:
    """``gate`` holds every token back while it is closed; ``burst`` tokens are appended at each step."""

    capacity: KVCapacity = field(default_factory=lambda: KVCapacity(64, 1000, 512, VOCAB))
    limit: int = 1000
    block_size: int = 16
    ready: bool = True
    healthy: bool = True
    script: Script = hello
    burst: int = 1
    cached: int = 0
    fail_at: int | None = None
    refuse: Exception | None = None
    plays: list[Play] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    kv_changes: list[dict[str, Any]] = field(default_factory=list)
    kv_watches: int = 0
    kv_open: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.finished = Counter("chatsvc_requests_finished", "by reason", ["reason"], registry=self.registry)

    @property
    def metrics(self) -> ScriptedEngine:
        return self

    async def refresh(self) -> None:
        """Nothing is counted elsewhere."""

    @property
    def running(self) -> list[Play]:
        return [p for p in self.plays if not p.generation.finished]

    def generate(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        if self.refuse is not None:
            raise self.refuse
        loop = asyncio.get_running_loop()
        generation = Generation(
            request_id, prompt_token_ids, params.n, lambda *end: self._cancel(play, *end), loop.time()
        )
        play = Play(request_id, prompt_token_ids, params, tenant, cache_salt, priority, generation)
        play.task = loop.create_task(self._play(play))
        self.plays.append(play)
        return generation

    def cancel(self, request_id: str) -> bool:
        for play in self.running:
            if play.request_id == request_id:
                self._cancel(play)
                return True
        return False

    def _cancel(self, play: Play, error: str | None = None, status: int = 500) -> None:
        if play.generation.finished:
            return
        play.cancelled = True
        assert play.task is not None
        play.task.cancel()
        for log in play.generation.logs:
            if log.finish_reason is None:
                log.error, log.error_status = error, status
                log.finish_reason = "abort" if error is None else "error"
        self.finished.labels("abort").inc()
        play.generation.notify()

    async def _play(self, play: Play) -> None:
        generation, params = play.generation, play.params
        await self.gate.wait()
        generation.timings.scheduled = asyncio.get_running_loop().time()
        generation.num_cached_tokens = min(self.cached, len(play.prompt) - 1)
        players = [self._choice(play, log, self.script(play.prompt, params, log.index)) for log in generation.logs]
        while not generation.finished:
            await self.gate.wait()
            for log, player in zip(generation.logs, players, strict=True):
                for _ in range(self.burst):
                    if log.finish_reason is None:
                        next(player)
            generation.timings.first_token = generation.timings.first_token or asyncio.get_running_loop().time()
            generation.notify()
            await asyncio.sleep(0)
        self.finished.labels("stop").inc()

    def _choice(self, play: Play, log: OutputLog, ids: Sequence[int]) -> Any:
        params = play.params
        text, stops = IncrementalDetokenizer(TOKENIZER), StopMatcher(params.stop)  # type: ignore[arg-type]
        for i, token in enumerate(ids):
            if self.fail_at == len(log.tokens):
                log.finish_reason, log.error = "error", "NaN in the logits"
                yield
            top = ()
            if params.logprobs is not None:
                others = [(token, -0.25), (EOS, -3.0), (0xF0, float("-inf")), (65, float("nan"))]
                top = tuple(others[: params.logprobs])
            log.tokens.append(SampledToken(token, -0.25 if params.logprobs is not None else None, top))
            if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
                log.pieces.append("")
                log.tail, hit = stops.push(text.flush())
                log.tail += stops.flush()
                log.finish_reason, log.stop_reason = "stop", hit if hit else token
                yield
            piece, hit = stops.push(text.push(token))
            log.pieces.append(piece)
            if hit is not None:
                log.finish_reason, log.stop_reason = "stop", hit
                yield
            if len(log.tokens) >= params.max_tokens or i == len(ids) - 1:
                tail, hit = stops.push(text.flush())
                log.tail = tail + stops.flush()
                log.finish_reason = "length"
            yield

    def kv_snapshot(self) -> dict[str, Any]:
        blocks = [
            {"id": i, "state": "free", "ref_count": 0, "hits": 0, "hash": None, "owners": []}
            for i in range(1, self.capacity.num_blocks + 1)
        ]
        return {"block_size": self.block_size, "blocks": blocks, "sequences": []}

    async def kv_events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of ``kv_changes``, also of those that come later."""
        self.kv_watches += 1
        self.kv_open += 1
        events, told = self.kv_changes or [{"type": "snapshot", **self.kv_snapshot()}], 0
        try:
            while True:
                if told < len(events):
                    told += 1
                    yield events[told - 1]
                await asyncio.sleep(0.001)
        finally:
            self.kv_open -= 1


TOKENIZER = ByteTokenizer()


def overloaded() -> Overloaded:
    return Overloaded("The queue is full", retry_after=3)


class Server:
    """uvicorn on a free port, in a thread with its own loop; ``engine`` and ``services`` live there."""

    def __init__(
        self,
        settings: ApiSettings | None = None,
        *,
        head_timeout: float = 30.0,
        keep_alive: float = 75,
        make_engine: Callable[[], Coroutine[Any, Any, Any]] | None = None,
        **changes: Any,
    ) -> None:
        self._head_timeout, self._keep_alive, self._make_engine = head_timeout, keep_alive, make_engine
        self._started = threading.Event()
        self._settings = settings or ApiSettings(ping_interval=0.2)
        self._changes = changes
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Server:
        self.thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = ScriptedEngine()
        if self._make_engine is not None:
            self._changes["engine"] = await self._make_engine()
        self.services = Services(
            **{  # type: ignore[arg-type]
                "engine": self.engine,
                "tokenizer": TOKENIZER,
                "template": PlainTemplate(),
                "model_name": "tiny",
                "settings": self._settings,
                **self._changes,
            }
        )
        app = create_app(self.services)
        config = server_config(app, host="127.0.0.1", port=0, grace=2, head_timeout=self._head_timeout)
        config.timeout_keep_alive = self._keep_alive  # type: ignore[assignment]
        self.server = uvicorn.Server(config)
        serving = asyncio.create_task(self.server._serve())
        while not self.server.started:
            await asyncio.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self._started.set()
        await serving

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, fn: Callable[[], Any]) -> Any:
        """Run ``fn`` in the server's loop."""

        async def run() -> Any:
            return fn()

        return self.wait(run())

    def wait(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result(20)

    def until(self, condition: Callable[[ScriptedEngine], Any]) -> None:
        """Wait until ``condition(engine)`` holds in the server's loop; fails after ten seconds."""

        async def poll() -> None:
            async with asyncio.timeout(10):
                while not condition(self.engine):
                    await asyncio.sleep(0.005)

        self.wait(poll())

    def reset(self) -> None:
        """Back to the defaults; nothing may be running."""

        def clear() -> None:
            fresh = ScriptedEngine()
            for name in ("ready", "healthy", "script", "burst", "cached", "fail_at", "refuse", "limit"):
                setattr(self.engine, name, getattr(fresh, name))
            self.engine.gate.set()
            self.engine.plays.clear()
            self.engine.kv_changes.clear()
            self.engine.kv_watches = 0

        self.until(lambda e: not e.running)
        self.call(clear)
