"""A KV cache of 16 bits under float32 models: against transformers whose keys and values are rounded the same way."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_llama import Tiny, TinyEngine

from chatsvc.config import ServeConfig
from chatsvc.engine.build import kv_dtype_of
from chatsvc.errors import ConfigError
from kernels.cpu.build import compiler

# A key whose float32 differs in the last place may be rounded to the other side.
NEAR = 2e-2
BACKENDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(compiler() is None, reason="no C++ compiler")),
]


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_swapped_shared_and_forked(tiny: Tiny, backend: str, kept: torch.dtype) -> None:
    rng = random.Random(3)
    async with TinyEngine(
        tiny, backend=backend, num_blocks=10, budget=23, host_blocks=40, preemption="swap", kv_dtype=kept
    ) as it:
        runner = it.executor.runner
        assert runner is not None and runner.host is not None
        assert runner.cache.data.dtype == runner.host.data.dtype == kept
        for generation in await it.crowd(rng, count=12, longest=40, answers=24):
            tiny.check(generation, kept, NEAR, NEAR)
        stats = it.engine.scheduler.stats
        assert stats.swaps > 0 and stats.hit_tokens > 0, "an arrangement that proves too little"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_rounding_is_seen(tiny: Tiny, backend: str) -> None:
    """The comparison above would notice a pool that keeps something else."""
    errors = {}
    for kept in (torch.float32, torch.bfloat16):
        async with TinyEngine(tiny, backend=backend, kv_dtype=kept) as it:
            (generation,) = await it.crowd(random.Random(5), count=1, longest=40, answers=24)
        for truth in (torch.float32, torch.bfloat16):
            errors[kept, truth] = tiny.distance(generation, truth)[1]
    for kept, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        assert errors[kept, kept] < 0.2 * errors[kept, other], errors


def test_bytes_and_fingerprint_follow(tiny: Tiny) -> None:
    layouts, sizes = set(), []
    for kept in (torch.float32, torch.bfloat16, torch.float16):
        executor = TinyEngine(tiny, kv_dtype=kept).executor
        try:
            capacity = executor.start()
        finally:
            executor.stop()
        layouts.add(capacity.layout)
        sizes.append(capacity.block_bytes)
    assert len(layouts) == 3, layouts
    assert sizes[1] == sizes[2] == sizes[0] / 2


def test_the_flag() -> None:
    def asked(**flags: str) -> torch.dtype:
        return kv_dtype_of(ServeConfig.of(**flags), torch.float32)

    assert asked() == asked(kv_cache_dtype="float32") == torch.float32
    assert asked(kv_cache_dtype="bfloat16") == asked(quantization="int8") == torch.bfloat16
    assert asked(quantization="int8", kv_cache_dtype="float32") == torch.float32
    assert asked(kv_cache_dtype="float16", attention_backend="cpu") == torch.float16
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype bfloat16 beside --dtype float32 .* not by triton"):
        asked(kv_cache_dtype="bfloat16", attention_backend="triton")
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        asked(kv_cache_dtype="int3")
