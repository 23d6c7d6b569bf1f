"""What the engine's process builds in the tests of ``--engine process``: a small engine without a model."""

from __future__ import annotations

import time
from typing import Any

from engine_harness import FIRST, LAST, VOCAB, ByteTokenizer

from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.errors import ConfigError
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token

BLOCKS, SIZE = 200, 4


def engine(step_seconds: float = 0.0, settings: dict[str, Any] | None = None) -> AsyncEngine:
    """Answers are letters, a function of everything before them."""
    config = SimulatedConfig(BLOCKS, SIZE, VOCAB, BLOCKS * SIZE, step_seconds=step_seconds, tokens_per_step=64)
    executor = SimulatedExecutor(config, hashed_token(FIRST, LAST))
    return AsyncEngine(EngineConfig(SIZE, **(settings or {})), executor, ByteTokenizer())  # type: ignore[arg-type]


def emoji(step_seconds: float = 0.0) -> AsyncEngine:
    """Answers are the four bytes of one emoji, again and again; prompts have three tokens."""
    built = engine(step_seconds)
    built.executor._token_fn = lambda context, row: "🚀".encode()[(len(context) - 3) % 4]  # type: ignore[attr-defined]
    return built


def deaf(step_seconds: float = 0.0) -> AsyncEngine:
    """Whoever asks for its metrics stops its loop for ever."""
    built = engine(step_seconds)
    built.metrics.registry.collect = lambda: time.sleep(900)  # type: ignore[method-assign,assignment,return-value]
    return built


def dies(tokens: int = 5) -> AsyncEngine:
    """Its loop breaks, not a step of it, once an answer has that many tokens."""
    built = engine(0.01)
    publish = built._publish_news

    def broken() -> None:
        publish()
        if any(r.generation.num_output_tokens >= tokens for r in built._running.values()):
            raise ZeroDivisionError("the loop itself")

    built._publish_news = broken  # type: ignore[method-assign]
    return built


def refuses() -> AsyncEngine:
    raise ConfigError("lower --num-kv-blocks")


def breaks() -> AsyncEngine:
    raise ZeroDivisionError("boom")
