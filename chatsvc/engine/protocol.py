"""An engine as those above it see it: the one in this process, and the one in a process of its own.

Everything happens in the event loop and nothing here blocks it. What crosses (prompts, parameters, tokens, text, block
events) is plain data, so where the engine runs makes no difference to its callers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter

from chatsvc.config import ServeConfig
from chatsvc.engine.output import Generation
from chatsvc.modelfiles import ModelFiles, resolve
from chatsvc.runtime.executor import KVCapacity
from chatsvc.scheduler.params import SamplingParams
from chatsvc.text.template import ChatTemplate, load_template
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer


class EngineMetrics(Protocol):
    """One registry per app, never the process-wide default."""

    @property
    def registry(self) -> CollectorRegistry: ...

    async def refresh(self) -> None:
        """Before a scrape: fetch what is counted elsewhere. Never raises, never takes longer than a second."""
        ...


class Engine(Protocol):
    """What the API calls."""

    @property
    def capacity(self) -> KVCapacity: ...

    @property
    def limit(self) -> int: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def ready(self) -> bool: ...

    @property
    def healthy(self) -> bool: ...

    def generate(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation: ...

    def cancel(self, request_id: str) -> bool: ...

    def kv_events(self) -> AsyncIterator[dict[str, Any]]:
        """First the whole block map, then its changes."""
        ...


class ServedMetrics(EngineMetrics, Protocol):
    @property
    def store_errors(self) -> Counter: ...

    @property
    def quota_fallbacks(self) -> Counter: ...


class ServedEngine(Engine, Protocol):
    """And what the server calls, which also starts and ends it."""

    @property
    def metrics(self) -> ServedMetrics: ...

    @property
    def num_requests(self) -> int: ...

    @property
    def dead(self) -> str | None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def begin_drain(self) -> None: ...

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109  the answer is a bool, not an exception
        ...


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns text into token ids, on the API's side."""

    files: ModelFiles
    tokenizer: Tokenizer
    template: ChatTemplate | None


def text_side(config: ServeConfig) -> TextSide:
    """Raises: ConfigError, ModelError."""
    files = resolve(config.model)
    tokenizer = load_tokenizer(files)
    return TextSide(files, tokenizer, load_template(files, tokenizer, config.chat_template))


E = TypeVar("E", bound=ServedEngine, covariant=True)


@dataclass(frozen=True, slots=True)
class Built(Generic[E]):
    """An engine that is not started yet, and the text side that goes with it."""

    engine: E
    tokenizer: Tokenizer
    template: ChatTemplate | None
    files: ModelFiles
