"""The fused Triton step against transformers: chunks, decode, shared prefixes, slots of -1, in the interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import assert_close, hf_logits, save, tiny, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from chatsvc.models.attention.torch_backend import TorchBackend
from chatsvc.models.loader import load_model
from chatsvc.runtime import kv, sampler
from chatsvc.runtime.runner import ModelRunner
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput

pytest.importorskip("triton")

from chatsvc.models.attention.triton_backend import TritonBackend
from chatsvc.models.gpu_step import GpuModel
from chatsvc.models.llama import LlamaModel

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
SIZE = 8
SAMPLING = SamplingRow(SamplingParams(max_tokens=4, temperature=0.0, logprobs=2), 0, 0)


def small(family: str) -> PreTrainedModel:
    return tiny(family, num_hidden_layers=2)


def runner_of(family: str, path: Path, *, programs: int = 8, dtype: torch.dtype = torch.float32) -> ModelRunner:
    model = load_model(save(small(family), path), dtype=dtype, device=DEVICE)
    cache = kv.allocate(model.shape, 60, SIZE, dtype, torch.device(DEVICE))
    cache.data.fill_(float("nan"))
    return ModelRunner(model, TritonBackend(programs=programs), cache)


def row(
    ids: list[int], start: int, table: list[int], *, seq: int = 0, wants: bool = True, cached: int = 0
) -> ScheduledRow:
    """``ids`` are the tokens from ``start`` on; the first ``cached`` of them are in the cache already."""
    blocks = tuple(table[: -(-(start + len(ids)) // SIZE)])
    return ScheduledRow(seq, tuple(ids), start, blocks, start + cached, SAMPLING if wants else None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_chunks_and_decode_equal_transformers(family: str, tmp_path: Path) -> None:
    runner = runner_of(family, tmp_path)
    assert isinstance(runner.model, GpuModel)
    ids = token_ids(30).tolist()
    want = hf_logits(small(family), torch.tensor(ids))
    other = token_ids(11, seed=4).tolist()
    want_other = hf_logits(small(family), torch.tensor(other))
    table, second = [5, 2, 9, 7], [3, 8]

    runner.logits((row(ids[:13], 0, table, wants=False),))
    logits, _ = runner.logits((row(other, 0, second, seq=1), row(ids[13:29], 13, table)))
    assert_close(logits.cpu(), torch.stack((want_other[-1], want[28])))
    logits, _ = runner.logits((row(ids[29:], 29, table),))
    assert_close(logits[0].cpu(), want[29])
    logits, _ = runner.logits((row(ids[29:], 29, table, cached=1),))
    assert_close(logits[0].cpu(), want[29])


def test_sequences_that_share_a_prefix_equal_transformers(tmp_path: Path) -> None:
    """Three decodes over the same 128 tokens: planned as one read of them and a merge."""
    runner = runner_of("llama", tmp_path)
    prefix = token_ids(128).tolist()
    shared = list(range(20, 36))
    model = load_model(save(small("llama"), tmp_path), dtype=torch.float32, device=DEVICE)
    plain = ModelRunner(model, TorchBackend(), runner.cache)
    plain.logits((row(prefix, 0, shared, wants=False),))  # the interpreter would take seconds for it
    rows, want = [], []
    for i in range(3):
        own = token_ids(3 + i, seed=10 + i).tolist()
        table = [*shared, 40 + i]
        runner.logits((row(own[:-1], 128, table, wants=False),))
        rows.append(row(own[-1:], 128 + len(own) - 1, table, seq=i))
        want.append(hf_logits(small("llama"), torch.tensor(prefix + own))[-1])
    logits, _ = runner.logits(tuple(rows))
    assert_close(logits.cpu(), torch.stack(want))


def test_a_step_samples_on_the_device(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    ids = token_ids(20).tolist()
    want = hf_logits(small("llama"), torch.tensor(ids))[-1]
    result = runner.run(SchedulerOutput(0, (row(ids, 0, [1, 2, 3]),)))
    (token,) = result.tokens[0]
    assert token.token_id == int(want.argmax())
    assert token.logprob == pytest.approx(float(want.log_softmax(0).max()), abs=1e-3)
    assert [t for t, _ in token.top] == want.topk(2).indices.tolist()


class Waits(TorchDispatchMode):
    """Operations whose result the host must know before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("local_scalar_dense", "nonzero", "unique", "masked_select", "equal.default")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_in_a_step_waits_for_the_device(tmp_path: Path) -> None:
    """Neither the model nor the sampler, with everything that a sampler can be asked for."""
    runner = runner_of("llama", tmp_path)
    params = SamplingParams(
        max_tokens=4, top_k=5, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.1, logit_bias={3: 1.0}, logprobs=2
    )
    how = SamplingRow(params, 0, 9, forbidden_ids=(7,), prompt_ids=(1, 2), output_ids=(3, 3))
    plan = SchedulerOutput(0, (ScheduledRow(0, tuple(token_ids(9).tolist()), 0, (1, 2), 0, how),))
    with Waits() as waits:
        assert runner.run(plan).tokens
    assert waits.found == []
    with Waits() as control:
        sampler.sample(torch.ones(1, 9), [how])
    assert control.found, "the sampler on the host does wait: the test can see it"


def test_a_chunk_that_samples_nothing(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    result = runner.run(SchedulerOutput(0, (row(token_ids(5).tolist(), 0, [1], wants=False),)))
    assert (result.tokens, result.errors) == ({}, {})


def test_float64_is_not_for_the_kernels(tmp_path: Path) -> None:
    model = load_model(save(tiny("llama"), tmp_path), dtype=torch.float64, device="cpu")
    assert isinstance(TritonBackend().fuse(model), LlamaModel)


def test_fp8_pool(tmp_path: Path) -> None:
    """K and V in one byte each: near the truth, not equal to it."""
    runner = runner_of("llama", tmp_path)
    exact = runner_of("llama", tmp_path)
    data = runner.cache.data
    poison = torch.full(data.shape, 0x7F, dtype=torch.uint8, device=data.device)
    runner.cache = type(runner.cache)(poison.view(torch.float8_e4m3fn))
    ids = token_ids(12).tolist()
    (got, _), (want, _) = (r.logits((row(ids, 0, [4, 1]),)) for r in (runner, exact))
    assert not torch.equal(got, want)
    assert torch.nn.functional.cosine_similarity(got, want).item() > 0.98
