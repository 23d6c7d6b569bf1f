"""A burst against a pool that holds a few of its requests: how long each way of stepping back takes."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Literal

from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.scheduler.params import SamplingParams

Mode = Literal["recompute", "swap", "auto"]
MODES: tuple[Mode, ...] = ("recompute", "swap", "auto")
FIT = 6
PROMPT, ANSWER = 64, 48


@dataclass(frozen=True, slots=True)
class BurstResult:
    """Attributes:
    seconds: from the first request to the end of the last.
    equal: answers that have the tokens of the first mode's.
    """

    mode: Mode
    requests: int
    seconds: float
    recomputed: int
    swapped: int
    blocks_out: int
    blocks_in: int
    computed_tokens: int
    equal: int


async def burst(config: ServeConfig, mode: Mode, requests: int, first: list[list[int]]) -> BurstResult:
    """Run it once on an engine of its own; ``first`` is filled by the first mode and compared with by the others.

    Raises: ConfigError, ModelError.
    """
    blocks = FIT * -(-(PROMPT + ANSWER) // config.block_size)
    update = {
        "num_kv_blocks": blocks,
        "max_num_seqs": requests,
        "preemption": mode,
        "host_kv_memory": 0 if mode == "recompute" else 2**30,
        "queue_timeout": 3600.0,
        "max_queue": requests,
    }
    engine = build(config.model_copy(update=update)).engine
    await engine.start()
    try:
        rng = random.Random(requests)
        vocab = engine.capacity.vocab_size
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(requests)]
        began = time.perf_counter()
        running = [
            engine.generate(request_id=f"burst-{i}", prompt_token_ids=prompt, params=params)
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(g.wait() for g in running))
        seconds = time.perf_counter() - began
        answers = [g.logs[0].token_ids for g in running]
        if not first:
            first.extend(answers)
        stats, host = engine.scheduler.stats, engine.scheduler.manager.host
        return BurstResult(
            mode=mode,
            requests=requests,
            seconds=seconds,
            recomputed=stats.preemptions,
            swapped=stats.swaps,
            blocks_out=host.blocks_out if host else 0,
            blocks_in=host.blocks_in if host else 0,
            computed_tokens=stats.computed_tokens,
            equal=sum(a == b for a, b in zip(answers, first, strict=True)),
        )
    finally:
        await engine.stop()
