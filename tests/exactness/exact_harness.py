"""Runs the recorded chats through the real engine and compares with transformers, token for token."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.output import Generation
from chatsvc.modelfiles import resolve
from chatsvc.models.attention.base import AttentionBackend
from chatsvc.models.attention.select import make_backend
from chatsvc.models.base import CausalLM
from chatsvc.models.loader import load_model
from chatsvc.runtime.kv import block_bytes
from chatsvc.runtime.local import LocalConfig, LocalExecutor
from chatsvc.scheduler.params import SamplingParams
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent
CHATS: list[dict[str, Any]] = json.loads((ROOT / "chats.json").read_text())
EXCUSE = 5e-4  # two best logits closer than this are a tie; the comparison goes on with transformers fed our token
LOGPROB = 1e-3


@cache
def model() -> CausalLM:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return load_model(resolve("smollm2-135m"), dtype=torch.float32, device="cpu")


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2-135m"))


@cache
def transformers_model() -> Any:
    spec = importlib.util.spec_from_file_location("make_exactness", ROOT.parents[1] / "scripts" / "make_exactness.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script, script.load()[1]


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 2048
    block_size: int = 16
    budget: int = 512
    max_num_seqs: int = 16
    prefix_caching: bool = True
    watermark: int | None = None
    host_blocks: int = 0
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    steps_in_flight: int = 1
    backend: str = "auto"  # what people get: on a CPU with a compiler the compiled kernels
    tokens: int = 64
    chats: list[dict[str, Any]] = field(default_factory=lambda: CHATS)


class Rig:
    """A started engine over the shared weights."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        block = block_bytes(model().shape, setup.block_size, torch.float32)
        local = LocalConfig(
            setup.block_size, 0, num_blocks=setup.num_blocks, measure=False, host_kv_memory=setup.host_blocks * block
        )
        self.executor = LocalExecutor(local, self._load)
        config = EngineConfig(
            block_size=setup.block_size,
            prefix_caching=setup.prefix_caching,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.budget,
            watermark_tokens=setup.watermark,
            preemption=setup.preemption,
            steps_in_flight=setup.steps_in_flight,
            queue_timeout=3600,
            stuck_after=3600,
        )
        self.engine = AsyncEngine(config, self.executor, tokenizer())
        self._n = 0

    def _load(self) -> tuple[CausalLM, AttentionBackend]:
        return model(), make_backend(self.setup.backend, "cpu")

    async def __aenter__(self) -> Rig:
        await self.engine.start()
        # Whatever a slot holds before its owner writes it must not matter.
        assert self.executor.runner is not None
        self.executor.runner.cache.data.fill_(float("nan"))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.manager.pool.num_used == 0
        await self.engine.stop()

    def submit(self, chat: dict[str, Any]) -> Generation:
        self._n += 1
        params = SamplingParams(max_tokens=self.setup.tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        return self.engine.generate(request_id=f"x{self._n}", prompt_token_ids=chat["prompt"], params=params)

    async def alone(self) -> None:
        for chat in self.setup.chats:
            generation = self.submit(chat)
            await generation.wait()
            check(chat, generation, self.setup.tokens)

    async def at_once(self) -> list[Generation]:
        generations = [self.submit(chat) for chat in self.setup.chats]
        await asyncio.gather(*(g.wait() for g in generations))
        for chat, generation in zip(self.setup.chats, generations, strict=True):
            check(chat, generation, self.setup.tokens)
        return generations


def check(chat: dict[str, Any], generation: Generation, tokens: int) -> None:
    log = generation.logs[0]
    assert log.error is None and log.finish_reason == "length", (chat["name"], log.finish_reason, log.error)
    ours = log.token_ids
    assert len(ours) == tokens
    want, logprobs, gaps = chat["tokens"][:tokens], chat["logprobs"][:tokens], chat["gaps"][:tokens]
    while ours != want:
        at = next(i for i, (a, b) in enumerate(zip(ours, want, strict=True)) if a != b)
        assert gaps[at] < EXCUSE, (
            f"{chat['name']}: token {at} is {ours[at]}, transformers says {want[at]} by {gaps[at]}"
        )
        script, reference = transformers_model()
        rest = script.greedy(reference, chat["prompt"] + ours[: at + 1], tokens - at - 1)
        want = ours[: at + 1] + rest["tokens"]
        logprobs = [*logprobs[:at], None, *rest["logprobs"]]
        gaps = [*gaps[: at + 1], *rest["gaps"]]
    for i, (token, wanted) in enumerate(zip(log.tokens, logprobs, strict=True)):
        assert token.logprob is not None
        assert wanted is None or abs(token.logprob - wanted) < LOGPROB, (chat["name"], i, token.logprob, wanted)
