"""GGUF files written by gguf's own writer, against gguf's own dequantisation and transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_writing import RANDOM, T, encode, metadata_of, save_gguf, tensors_of, write
from tiny_models import assert_close, hf_logits, load_float32, our_logits, tiny, token_ids

from chatsvc.errors import ModelError
from chatsvc.models.gguf_file import read_header
from chatsvc.models.loader import load_config, load_model

ALL = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K]
BIG = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize("kind", ALL)
def test_every_type_bit_for_bit(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """More rows than one piece holds, and a last piece that is not full."""
    weights = np.random.default_rng(1).normal(size=(301, 256)).astype(np.float32)
    raw = encode(weights, kind)
    files = write(tmp_path / "x.gguf", "llama", {}, {"one": (raw[:7], kind), "two": (raw, kind)})
    tensors = read_header(files.path).tensors
    for name, data in (("one", raw[:7]), ("two", raw)):
        assert tensors[name].shape == (len(data), 256)
        out = torch.full((len(data), 256), torch.nan)
        tensors[name].read_into(out)
        expected = torch.from_numpy(gguf.dequantize(data, kind))
        assert torch.equal(out, expected)
        half = torch.empty_like(out, dtype=torch.bfloat16)
        tensors[name].read_into(half)
        assert torch.equal(half, expected.bfloat16())


@pytest.mark.parametrize("kind", ALL)
def test_llama_of_every_type(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    reference = tiny("llama", **(BIG if kind in RANDOM else {}))
    model = load_float32(save_gguf(tmp_path / "m.gguf", reference, kind))
    assert model.config.rms_norm_eps == 1e-5
    ids = token_ids(60)
    assert_close(our_logits(model, ids), hf_logits(reference, ids))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_families(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    reference = tiny(family, **changes)
    model = load_float32(save_gguf(tmp_path / "m.gguf", reference))
    assert model.config.tie_word_embeddings == changes.get("tie_word_embeddings", False)
    ids = token_ids(60)
    assert_close(our_logits(model, ids), hf_logits(reference, ids))


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.finetuned": True,
            },
        ),
        ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.dimension_count": 16}),
    ],
)
def test_rope_metadata(tmp_path: Path, rope: dict[str, Any], metadata: dict[str, Any]) -> None:
    reference = tiny("llama", rope_parameters={**rope, "rope_theta": 5e4})
    model = load_float32(save_gguf(tmp_path / "m.gguf", reference, **metadata))
    ids = token_ids(300)
    assert_close(our_logits(model, ids), hf_logits(reference, ids))


def test_llama3_factors_as_a_tensor(tmp_path: Path) -> None:
    """llama.cpp stores llama3 scaling as one divisor for each frequency."""
    factor, low, high, original, theta, dim = 8.0, 1.0, 4.0, 64, 1e4, 32
    divisors = []
    for i in range(0, dim, 2):
        waves = original * theta ** (-i / dim) / (2 * math.pi)
        smooth = min(max((waves - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert divisors[0] == 1 and divisors[-1] == factor and any(1 < d < factor for d in divisors)
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope |= {"original_max_position_embeddings": original, "rope_theta": theta}
    reference = tiny("llama", head_dim=dim, rope_parameters=rope)
    tensors = tensors_of(reference) | {"rope_freqs.weight": (np.array(divisors, dtype=np.float32), T.F32)}
    model = load_float32(write(tmp_path / "m.gguf", "llama", metadata_of(reference), tensors))
    ids = token_ids(300)
    assert_close(our_logits(model, ids), hf_logits(reference, ids))
    tensors["rope_freqs.weight"] = (np.ones(5, dtype=np.float32), T.F32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        load_float32(write(tmp_path / "n.gguf", "llama", metadata_of(reference), tensors))


def test_vocabulary_size_from_metadata_or_from_the_embedding(tmp_path: Path) -> None:
    reference = tiny("llama")
    assert load_config(save_gguf(tmp_path / "a.gguf", reference)).vocab_size == 131
    with pytest.raises(ModelError, match=r"token_embd\.weight is \[131, 64\], expected \[132, 64\]"):
        load_float32(save_gguf(tmp_path / "b.gguf", reference, vocab_size=132))


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "gemma2"}, "gemma2"),
        ({"attention.sliding_window": 64}, "attention.sliding_window"),
        ({"expert_count": 8}, "expert_count"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"something.new": 1}, r"something\.new"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"block_count": None}, "block_count is missing"),
        ({"block_count": "three"}, "block_count"),
        ({"attention.head_count": 0}, "num_heads"),
        ({"attention.head_count_kv": 3}, "num_kv_heads"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_metadata_refused_by_name(tmp_path: Path, metadata: dict[str, Any], named: str) -> None:
    reference = tiny("llama")
    arch = metadata.pop("general.architecture", "llama")
    files = write(tmp_path / "m.gguf", arch, metadata_of(reference) | metadata, tensors_of(reference))
    with pytest.raises(ModelError, match=named):
        load_config(files)
    with pytest.raises(ModelError, match=named):
        load_float32(files)


def test_windows_and_experts_that_are_off_are_accepted(tmp_path: Path) -> None:
    metadata = {"attention.sliding_window": 256, "expert_count": 0, "logit_scale": 1.0}
    reference = tiny("llama")
    model = load_float32(save_gguf(tmp_path / "m.gguf", reference, **metadata))
    assert_close(our_logits(model, token_ids(9)), hf_logits(reference, token_ids(9)))


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    reference = tiny("llama")
    metadata, good = metadata_of(reference), tensors_of(reference)
    missing = {name: tensor for name, tensor in good.items() if name != "blk.1.ffn_up.weight"}
    no_norm = {name: tensor for name, tensor in good.items() if name != "output_norm.weight"}
    extra = good | {"blk.0.attn_sinks.weight": (np.ones(4, dtype=np.float32), T.F32)}
    q_norm = good | {"blk.2.attn_q_norm.weight": (np.ones(16, dtype=np.float32), T.F32)}
    shape = good | {"blk.2.attn_k.weight": (np.ones((16, 64), dtype=np.float32), T.F32)}
    for index, (tensors, named) in enumerate(
        [
            (missing, r"missing: blk\.1\.ffn_up\.weight"),
            (no_norm, r"missing: output_norm\.weight"),
            (extra, r"unexpected: blk\.0\.attn_sinks\.weight"),
            (q_norm, r"unexpected: blk\.2\.attn_q_norm\.weight"),
            (shape, r"blk\.2\.attn_k\.weight is \[16, 64\], expected \[32, 64\]"),
        ]
    ):
        files = write(tmp_path / f"{index}.gguf", "llama", metadata, tensors)
        with pytest.raises(ModelError, match=named):
            load_float32(files)


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    reference = tiny("llama", **BIG)
    blocks = np.zeros((256, 84), dtype=np.uint8)
    tensors = tensors_of(reference) | {"blk.0.ffn_up.weight": (blocks, T.Q2_K)}
    files = write(tmp_path / "m.gguf", "llama", metadata_of(reference), tensors)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight has type Q2_K"):
        load_float32(files)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 2000, -40])
def test_cut_files_are_refused(tmp_path: Path, keep: int) -> None:
    files = save_gguf(tmp_path / "m.gguf", tiny("llama"))
    files.path.write_bytes(files.path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load_model(files, dtype=torch.float32, device="cpu")
