"""Weights packed straight from files are the weights that are read into memory, bit for bit."""

from __future__ import annotations

import copy
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_writing import RANDOM, T, metadata_of, save_gguf, tensors_of, write
from tiny_models import hf_logits, save, tiny, token_ids

from chatsvc.errors import ModelError
from chatsvc.modelfiles import ModelFiles
from chatsvc.models.attention.base import KVCache, StepLayout
from chatsvc.models.attention.cpu_backend import CpuBackend
from chatsvc.models.cpu_step import CpuModel
from chatsvc.models.loader import load_model, open_model
from chatsvc.runtime import kv
from kernels.cpu.build import compiler, ensure
from kernels.cpu.library import Library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
ALL = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q4_K, T.Q6_K]
BIG = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
IDS = token_ids(40)


@cache
def library() -> Library:
    return Library(ensure())


def packed(files: ModelFiles, int8: bool = False) -> CpuModel:
    model = CpuBackend(library(), 2, int8).load(open_model(files), torch.float32)
    assert isinstance(model, CpuModel)
    return model


def fused(files: ModelFiles, int8: bool = False) -> CpuModel:
    model = CpuBackend(library(), 2, int8).fuse(load_model(files, dtype=torch.float32))
    assert isinstance(model, CpuModel)
    return model


@torch.inference_mode()
def logits(model: CpuModel) -> torch.Tensor:
    """Of every token of IDS."""
    count = len(IDS)
    cache: KVCache = kv.allocate(model.shape, 4, 16, torch.float32, torch.device("cpu"))
    layout = StepLayout([count], [count], [[1, 2, 3]], [16 + i for i in range(count)])
    return model.step(IDS.tolist(), list(range(count)), layout, list(range(count)), cache)


def assert_same(files: ModelFiles, in_parts: bool = False) -> torch.Tensor:
    """From files and from tensors. ``in_parts``: tiles, where there are such, multiply what files have in few bits."""
    ours, theirs = logits(packed(files)), logits(fused(files))
    if in_parts and library().tiles:
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    else:
        assert torch.equal(ours, theirs)
    return ours


@pytest.mark.parametrize("kind", ALL)
def test_every_gguf_type(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    reference = tiny("llama", **(BIG if kind in RANDOM else {}))
    ours = assert_same(save_gguf(tmp_path / "m.gguf", reference, kind), kind in (T.BF16, T.Q8_0, T.Q4_0, T.Q4_1))
    torch.testing.assert_close(ours, hf_logits(reference, IDS), atol=1e-4, rtol=0)


def test_parts_of_one_matrix_in_different_types(tmp_path: Path) -> None:
    reference = tiny("llama")
    kinds = {"attn_q": T.Q4_1, "attn_k": T.Q8_0, "attn_v": T.F16, "ffn_gate": T.Q4_0, "ffn_up": T.Q4_1}
    tensors = tensors_of(reference)
    for kind in set(kinds.values()):
        other = tensors_of(tiny("llama"), kind)
        tensors |= {n: other[n] for n in tensors if kinds.get(n.split(".")[2] if "blk" in n else "") == kind}
    assert_same(write(tmp_path / "m.gguf", "llama", metadata_of(reference), tensors))


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("llama", {"tie_word_embeddings": True}, torch.float32),
        ("llama", {"attention_bias": True, "mlp_bias": True}, torch.bfloat16),
        ("qwen2", {"tie_word_embeddings": True}, torch.bfloat16),
        ("qwen3", {"head_dim": 32}, torch.float16),
        ("mistral", {}, torch.bfloat16),
    ],
)
def test_safetensors_of_families(tmp_path: Path, family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    reference = tiny(family, **changes)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    ours = assert_same(save(copy.deepcopy(reference).to(dtype), tmp_path), dtype == torch.bfloat16)
    torch.testing.assert_close(ours, hf_logits(reference, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [T.F32, T.Q8_0, T.Q4_1, T.Q6_K])
def test_int8_is_near(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Sharp attention over random weights makes much of small errors; a wrong scale would make far more."""
    reference = tiny("llama", **(BIG if kind in RANDOM else {}))
    files = save_gguf(tmp_path / "m.gguf", reference, kind)
    exact, ours = hf_logits(reference, IDS), logits(packed(files, int8=True))
    assert torch.equal(ours, logits(packed(files, int8=True)))
    assert 1e-5 < (ours - exact).norm() / exact.norm() < 0.15


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    sizes = {}
    for kind in (T.F32, T.F16, T.Q8_0, T.Q4_0):
        reference = tiny("llama", hidden_size=256, intermediate_size=512, vocab_size=512, head_dim=64)
        sizes[kind] = packed(save_gguf(tmp_path / "m.gguf", reference, kind)).weight_bytes
    want = [0.5, 34 / 128, (21 if library().tiles else 20) / 128]  # tiles: a byte more for each block
    assert np.allclose([sizes[k] / sizes[T.F32] for k in (T.F16, T.Q8_0, T.Q4_0)], want, rtol=0.02)


def test_a_file_that_was_cut_after_it_was_opened(tmp_path: Path) -> None:
    files = save_gguf(tmp_path / "m.gguf", tiny("llama"), T.Q8_0)
    opened = open_model(files)
    os.truncate(files.path, files.path.stat().st_size - 5000)
    with pytest.raises(ModelError, match="ends inside tensor"):
        CpuBackend(library(), 1).load(opened, torch.float32)
