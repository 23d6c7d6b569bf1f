"""Beam search through the whole engine: hypotheses equal transformers', under pressure and beside other requests."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import torch
from tiny_llama import Tiny, TinyEngine, greedy

from chatsvc.scheduler.beam import BeamParams
from chatsvc.scheduler.params import SamplingParams

END, LENGTH = 256, 12  # the byte tokenizer's end token


def theirs(tiny: Tiny, prompt: list[int], beam: BeamParams) -> tuple[list[list[int]], bool]:
    ids = torch.tensor([prompt])
    out = tiny.theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beam.width,
        num_return_sequences=beam.width,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    ties = any(abs(a - b) < 1e-4 for a, b in itertools.pairwise(out.sequences_scores.tolist()))
    return [r[: r.index(END) + 1] if END in r else r for r in rows], ties


@pytest.mark.parametrize(("width", "num_blocks"), [(2, 60), (4, 60), (4, 9)])
async def test_hypotheses_equal_transformers(tiny: Tiny, width: int, num_blocks: int) -> None:
    rng = random.Random(width)
    compared = 0
    async with TinyEngine(tiny, num_blocks=num_blocks, block_size=4, budget=16, max_num_seqs=6) as it:
        for length_penalty, early_stopping in itertools.product((0.0, 1.0, 2.0), (True, False)):
            beam = BeamParams(width, length_penalty, early_stopping)
            prompts = [[rng.randrange(3, 250) for _ in range(rng.randint(1, 20))] for _ in range(4)]
            params = SamplingParams(max_tokens=LENGTH, temperature=0.0, n=width, beam=beam)
            running = [it.generate(p, params) for p in prompts]
            beside = it.generate(prompts[0][:5], greedy(9))
            await asyncio.gather(*(g.wait() for g in [*running, beside]))
            tiny.check(beside)
            for prompt, generation in zip(prompts, running, strict=True):
                rows, ties = theirs(tiny, prompt, beam)
                assert ties or [log.token_ids for log in generation.logs] == rows
                compared += not ties
                for log in generation.logs:
                    assert log.finish_reason == ("stop" if log.token_ids[-1] == END else "length")
        assert compared > 12
        if num_blocks < 10:
            assert it.engine.scheduler.stats.preemptions > 0
        else:
            assert it.engine.scheduler.manager.cow_copies > 0


async def test_a_cancelled_search_leaves_nothing(tiny: Tiny) -> None:
    async with TinyEngine(tiny, num_blocks=60, block_size=4) as it:
        params = SamplingParams(max_tokens=60, temperature=0.0, n=2, beam=BeamParams(4))
        generation = it.generate([5, 6, 7], params)
        while not it.engine.scheduler.running:
            await asyncio.sleep(0)
        generation.cancel()
        await generation.wait()
        assert [log.finish_reason for log in generation.logs] == ["abort", "abort"]
        while it.engine.scheduler.has_work:
            await asyncio.sleep(0)
