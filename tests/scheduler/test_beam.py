"""The decisions of beam search against transformers' own, on small random models that are only tables."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chatsvc.scheduler.beam import BeamParams, BeamSearch

VOCAB, END = 23, 5


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def ours(model: LlamaForCausalLM, prompt: list[int], params: BeamParams, max_tokens: int) -> BeamSearch:
    search = BeamSearch(params, frozenset({END}), max_tokens)
    while not search.done:
        candidates = []
        for out in search.outputs:
            logits = model(torch.tensor([[*prompt, *out]])).logits[0, -1]
            top = logits.log_softmax(0).topk(min(VOCAB, search.num_candidates))
            candidates.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        search.advance(candidates)
    return search


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_decisions_equal_transformers(
    model: LlamaForCausalLM, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    ended = 0
    for i in range(10):
        prompt = [1, *[(i * 7 + j * 5) % (VOCAB - 6) + 6 for j in range(4)]]
        ids = torch.tensor([prompt])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=9,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        got = ours(model, prompt, BeamParams(width, length_penalty, early_stopping), 9)  # type: ignore[arg-type]
        rows = [row[len(prompt) :].tolist() for row in want.sequences]
        rows = [r[: r.index(END) + 1] if END in r else r for r in rows]
        scores = want.sequences_scores.tolist()
        ties = any(abs(a - b) < 1e-4 for a, b in itertools.pairwise(scores))
        assert ties or [list(h.tokens) for h in got.finished] == rows
        assert all(math.isclose(h.score, s, abs_tol=1e-4) for h, s in zip(got.finished, scores, strict=True))
        ended += sum(h.ended for h in got.finished)
    assert ended > 0, "end tokens must have mattered"
