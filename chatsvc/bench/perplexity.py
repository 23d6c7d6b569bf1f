"""How well a model predicts a fixed text, with each way of computing: what a faster one costs.

The text is the standard library's own documentation (``pydoc_data.topics``), cut into windows. Perplexity is
exp(mean of -log p(next token)) (Jelinek et al. 1977); only ratios of one run say something, for the text follows the
version of Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError
from chatsvc.runtime.local import LocalExecutor
from chatsvc.runtime.runner import ModelRunner
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer

WINDOW = 256  # tokens that see each other


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Attributes:
    tokens: that were predicted.
    """

    quantization: str
    kv_cache_dtype: str
    value: float
    tokens: int
    seconds: float


def text_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first ``count`` tokens of the text, fewer when it is shorter."""
    from pydoc_data import topics  # noqa: PLC0415  half a megabyte that only this bench wants

    ids: list[int] = []
    for _, text in sorted(topics.topics.items()):
        ids += tokenizer.encode(text + "\n\n")
        if len(ids) >= count:
            break
    return ids[:count]


def windows(ids: Sequence[int], size: int = WINDOW) -> Iterator[tuple[int, ...]]:
    """Cut; a last piece of one token predicts nothing and is left out."""
    for start in range(0, len(ids), size):
        if len(window := tuple(ids[start : start + size])) > 1:
            yield window


@torch.inference_mode()
def surprise(runner: ModelRunner, window: tuple[int, ...]) -> float:
    """Sum of -log p(token) of all but the first. Blocks 1 .. of the runner's pool are overwritten."""
    size = runner.cache.block_size
    table = tuple(range(1, 2 + len(window) // size))
    sampling = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, 0)
    # A token a row, all of one sequence: keys are written before anybody reads, and every row has logits.
    rows = tuple(ScheduledRow(i, (token,), i, table, i, sampling) for i, token in enumerate(window))
    logits, _ = runner.logits(rows)
    wanted = torch.tensor(window[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), wanted, reduction="sum"))


def perplexity(config: ServeConfig, quantization: str, tokens: int, kv_cache_dtype: str = "float32") -> Perplexity:
    """Of the configured model on ``tokens`` tokens of the text. Raises: ConfigError, ModelError."""
    blocks = WINDOW // config.block_size + 1
    own = {
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "num_kv_blocks": blocks,
        "max_num_batched_tokens": WINDOW,
        "max_model_len": WINDOW,
    }
    built = build(ServeConfig.of(**{**config.model_dump(exclude_unset=True), **own}))
    executor = built.engine.executor
    if not isinstance(executor, LocalExecutor):
        raise ConfigError("--executor simulated: perplexity needs a model")
    ids = text_ids(load_tokenizer(built.files), tokens)
    executor.start()
    try:
        assert executor.runner is not None
        began = time.perf_counter()
        total, count = 0.0, 0
        for window in windows(ids):
            total += surprise(executor.runner, window)
            count += len(window) - 1
        return Perplexity(quantization, kv_cache_dtype, math.exp(total / count), count, time.perf_counter() - began)
    finally:
        executor.stop()
