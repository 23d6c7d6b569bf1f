"""The perplexity bench, and what int8 costs the default model."""

from __future__ import annotations

import pytest
import torch

from chatsvc.bench.perplexity import perplexity, surprise, text_ids, windows
from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError, ModelError
from chatsvc.modelfiles import resolve
from chatsvc.models.loader import load_model
from chatsvc.runtime.local import LocalExecutor
from chatsvc.text.tokenizer import load_tokenizer
from kernels.cpu.build import compiler

CONFIG = ServeConfig.of(threads=min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def default_model() -> None:
    try:
        resolve("smollm2-135m")
    except ModelError as e:
        pytest.skip(str(e))


def test_windows_cover_everything_and_a_lone_token_is_left_out() -> None:
    assert list(windows(range(10), 4)) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert list(windows(range(9), 4)) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_the_sum_is_that_of_a_plain_forward_pass_in_float64() -> None:
    files = resolve("smollm2-135m")
    ids = tuple(text_ids(load_tokenizer(files), 100))
    executor = build(CONFIG.model_copy(update={"num_kv_blocks": 8, "max_num_batched_tokens": 64})).engine.executor
    assert isinstance(executor, LocalExecutor)
    executor.start()
    try:
        assert executor.runner is not None
        ours = surprise(executor.runner, ids)
    finally:
        executor.stop()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        every = torch.arange(100)
        logits = load_model(files, dtype=torch.float64).forward(torch.tensor(ids), every, attend, every)
        want = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum").item()
    assert ours == pytest.approx(want, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="int8 needs the compiled kernels")
def test_int8_predicts_as_well() -> None:
    """Over 20,000 tokens the ratio is 1.003; this text is shorter, and so the bound is wider."""
    exact, int8 = (perplexity(CONFIG, quantization, 2048) for quantization in ("none", "int8"))
    assert exact.tokens == int8.tokens == 2040
    assert 0.99 < int8.value / exact.value < 1.01
    assert int8.value != exact.value


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        perplexity(ServeConfig.of(executor="simulated"), "none", 100)
