"""A tiny random Llama on disk, an engine that serves it, and transformers' opinion of what it said."""

from __future__ import annotations

import asyncio
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from engine_harness import VOCAB, ByteTokenizer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.output import Generation
from chatsvc.modelfiles import ModelFiles
from chatsvc.models.attention.select import make_backend
from chatsvc.models.loader import load_model
from chatsvc.runtime.local import LocalConfig, LocalExecutor
from chatsvc.scheduler.params import SamplingParams

EXCUSE, LOGPROB = 5e-4, 1e-3  # the contract's


class Rounded(DynamicCache):
    """What attention sees of a key or value has been through ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key: torch.Tensor, value: torch.Tensor, *where: Any, **more: Any) -> Any:
        key, value = (x.to(self.dtype).to(x.dtype) for x in (key, value))
        return super().update(key, value, *where, **more)


@dataclass(frozen=True)
class Tiny:
    files: ModelFiles
    theirs: Any

    def check(
        self,
        generation: Generation,
        kv_dtype: torch.dtype = torch.float32,
        excuse: float = EXCUSE,
        near: float = LOGPROB,
    ) -> None:
        """Every token is transformers' best after the same tokens; log-probabilities agree. Its keys and values are
        rounded to ``kv_dtype``."""
        gap, far = self.distance(generation, kv_dtype)
        assert gap < excuse and far < near, (generation.request_id, gap, far)

    @torch.inference_mode()
    def distance(self, generation: Generation, kv_dtype: torch.dtype) -> tuple[float, float]:
        """The most that a token is behind transformers' best, and that a log-probability is off."""
        gap = far = 0.0
        for log in generation.logs:
            assert log.finish_reason == "length", (log.finish_reason, log.error)
            ids = torch.tensor([*generation.prompt_token_ids, *log.token_ids])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the argument has two names, depending on transformers' version
                output = self.theirs(ids[None], past_key_values=Rounded(kv_dtype))
            logits = output.logits[0, len(generation.prompt_token_ids) - 1 : -1].double()
            logprobs = logits.log_softmax(1)
            for i, token in enumerate(log.tokens):
                assert token.logprob is not None
                gap = max(gap, float(logits[i].max() - logits[i, token.token_id]))
                far = max(far, abs(token.logprob - float(logprobs[i, token.token_id])))
        return gap, far


def make(directory: Path) -> Tiny:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)  # logits that are far apart
    model.save_pretrained(directory)
    return Tiny(ModelFiles(directory, "hf", "tiny"), model)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0)


class TinyEngine:
    """``async with``: started, every slot of the pool NaN until somebody writes it; empty at the end."""

    def __init__(
        self,
        tiny: Tiny,
        *,
        backend: str = "torch",
        num_blocks: int = 64,
        block_size: int = 8,
        budget: int = 64,
        max_num_seqs: int = 8,
        host_blocks: int = 0,
        preemption: Literal["auto", "swap", "recompute"] = "auto",
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        def load() -> Any:
            return load_model(tiny.files, dtype=torch.float32), make_backend(backend, "cpu")

        layers, kv_heads, dim = 2, 2, 16
        host = host_blocks * layers * 2 * block_size * kv_heads * dim * kv_dtype.itemsize
        local = LocalConfig(block_size, 0, num_blocks=num_blocks, measure=False, host_kv_memory=host, kv_dtype=kv_dtype)
        self.executor = LocalExecutor(local, load)
        config = EngineConfig(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            watermark_tokens=0,
            preemption=preemption,
            queue_timeout=3600,
            stuck_after=3600,
            give_up_after=3600,
        )
        self.engine = AsyncEngine(config, self.executor, ByteTokenizer())  # type: ignore[arg-type]
        self.requests = 0

    async def __aenter__(self) -> TinyEngine:
        await self.engine.start()
        assert self.executor.runner is not None
        self.executor.runner.cache.data.fill_(float("nan"))
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.engine.scheduler.check_integrity()
            assert self.engine.scheduler.manager.pool.num_used == 0
        await self.engine.stop()

    def generate(self, prompt: list[int], params: SamplingParams) -> Generation:
        self.requests += 1
        return self.engine.generate(request_id=f"t{self.requests}", prompt_token_ids=prompt, params=params)

    async def crowd(self, rng: random.Random, count: int, longest: int, answers: int) -> list[Generation]:
        """``count`` greedy requests with shared beginnings; some come later than others."""
        heads = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(2)]
        generations: list[Generation] = []
        for _ in range(count):
            prompt = rng.choice(heads)[: rng.randint(1, longest)] + [
                rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))
            ]
            generations.append(self.generate(prompt, replace(greedy(answers), n=rng.choice((1, 1, 1, 3)))))
            if rng.random() < 0.4:
                await anext(generations[-1].read())
        await asyncio.gather(*(g.wait() for g in generations))
        return generations
