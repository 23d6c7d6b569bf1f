"""What the HTTP side needs from the floors below, as narrow as it uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar

from chatsvc.api.desk import Desk
from chatsvc.api.keys import KeySet
from chatsvc.api.quota import Quotas
from chatsvc.api.seeds import Seeds
from chatsvc.api.tracing import NoTracing, Tracing
from chatsvc.engine.protocol import Engine
from chatsvc.engine.wake import Pace
from chatsvc.sessions.base import SessionStore

P = ParamSpec("P")
T = TypeVar("T")

OFFLOAD_BYTES = 20_000  # text longer than this is parsed, rendered and encoded in a thread


class TextCodec(Protocol):
    """The part of ``Tokenizer`` that the API calls."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, special: bool = False, bos: bool = False, continuing: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Template(Protocol):
    """The part of ``ChatTemplate`` that the API calls."""

    @property
    def knows_tools(self) -> bool: ...

    def encode(
        self,
        messages: list[dict[str, Any]],
        tokenizer: Any,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        assistant_ids: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]: ...


class Uploads:
    """Waits for the parts of bodies, each bounded, so that a client who stops sending does not hold a request for ever.

    Once the server drains (``close``), a silent client has one more second.
    """

    CLOSING = 1.0

    def __init__(self) -> None:
        self.closing = False
        self._waits: set[asyncio.Timeout] = set()

    async def part(self, receive: Callable[[], Awaitable[T]], seconds: float) -> T:
        """What ``receive`` gives. Raises: TimeoutError."""
        async with asyncio.timeout(min(seconds, self.CLOSING) if self.closing else seconds) as wait:
            self._waits.add(wait)
            try:
                return await receive()
            finally:
                self._waits.discard(wait)

    def close(self) -> None:
        """The server drains."""
        self.closing = True
        end = asyncio.get_running_loop().time() + self.CLOSING
        for wait in self._waits:
            wait.reschedule(min(end, wait.when() or end))


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits of the HTTP side. Times in seconds, sizes in bytes."""

    ping_interval: float = 15.0
    max_body_bytes: int = 8 * 1024 * 1024
    body_idle_timeout: float = 30.0  # without a byte of the body
    body_timeout: float = 300.0  # for the whole body
    max_n: int = 16
    max_prompts: int = 64
    send_timeout: float = 300.0
    resume_grace: float = 60.0  # a session's answer goes on that long after its last reader has left
    cors_origins: tuple[str, ...] = ()  # web origins whose pages may call
    request_timeout: float | None = None  # an answer has to be complete after it; None: whenever it is


@dataclass(frozen=True)
class Services:
    """Everything an app is made of; built by whoever starts the server, who also starts and stops the engine.

    Attributes:
        model_name: the served model's public name.
        template: None when the model has none; chat requests are then refused with 400.
        store: None without sessions.
        store_answers: whether it did when it was last asked; does not ask.
        created: Unix time that ``/v1/models`` reports.
        keys: the API keys that count now; None: no keys are asked for.
    """

    engine: Engine
    tokenizer: TextCodec
    template: Template | None
    model_name: str
    settings: ApiSettings = ApiSettings()
    store: SessionStore | None = None
    store_answers: Callable[[], bool] = lambda: True
    created: int = 0
    seeds: Seeds = field(default_factory=Seeds)
    pace: Pace = field(default_factory=Pace)
    tracing: Tracing = field(default_factory=NoTracing)
    uploads: Uploads = field(default_factory=Uploads)
    text_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    keys: Callable[[], KeySet] | None = None
    quotas: Quotas = field(default_factory=Quotas)

    @cached_property
    def desk(self) -> Desk:
        """Every generation is started there."""
        return Desk(self.engine, timeout=self.settings.request_timeout, tracing=self.tracing)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of k times as many characters has at least k tokens."""
        tokenizer = self.tokenizer
        return max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))

    async def offload(self, size: int, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` here when its input is small (``size`` in bytes or characters), else in a thread.

        At most two such threads at a time: big bodies wait for each other, not everybody for them.
        """
        if size < OFFLOAD_BYTES:
            return fn(*args, **kwargs)
        async with self.text_slots:
            return await asyncio.to_thread(fn, *args, **kwargs)
