"""Every family against transformers, from a directory that transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    VOCAB,
    CachedAttend,
    assert_close,
    attend_dense,
    hf_logits,
    load_float32,
    our_logits,
    save,
    tiny,
    token_ids,
)
from transformers import AutoModelForCausalLM

from chatsvc.errors import ModelError
from chatsvc.modelfiles import ModelFiles
from chatsvc.models.loader import load_config, load_model


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 256}),
        ("mistral", {"head_dim": 32, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 16}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 40, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    reference = tiny(family, **changes)
    model = load_float32(save(reference, tmp_path))
    ids = token_ids(70)
    ours = our_logits(model, ids)
    assert ours.dtype == torch.float32 and ours.shape == (70, VOCAB)
    assert_close(ours, hf_logits(reference, ids))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sharded(tmp_path: Path, family: str) -> None:
    reference = tiny(family)
    files = save(reference, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    ids = token_ids(20)
    assert_close(our_logits(load_float32(files), ids), hf_logits(reference, ids))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_steps_equal_one_piece(tmp_path: Path, family: str) -> None:
    """Chunks of any size over a cache give the logits of the whole, and only the rows that were asked for."""
    model = load_float32(save(tiny(family), tmp_path))
    ids = token_ids(40)
    whole = our_logits(model, ids)
    attend = CachedAttend()
    with torch.inference_mode():
        at = 0
        for size in (7, 1, 1, 16, 2, 13):
            rows = torch.tensor([size - 1, 0])
            positions = torch.arange(at, at + size)
            out = model.forward(ids[at : at + size], positions, attend, rows)
            assert_close(out, whole[at + rows])
            at += size
        assert at == len(ids)


def test_no_rows_asked(tmp_path: Path) -> None:
    model = load_float32(save(tiny("llama"), tmp_path))
    with torch.inference_mode():
        none = torch.empty(0, dtype=torch.int64)
        assert model.forward(token_ids(5), torch.arange(5), attend_dense, none).shape == (0, VOCAB)


def test_rows_do_not_see_each_other(tmp_path: Path) -> None:
    """Two sequences in one flat batch: each equals itself alone."""
    model = load_float32(save(tiny("qwen3"), tmp_path))
    one, two = token_ids(9, seed=1), token_ids(14, seed=2)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = (slice(0, 9), slice(9, 23))
        return torch.cat([attend_dense(layer, q[p], k[p], v[p]) for p in parts])

    with torch.inference_mode():
        positions = torch.cat((torch.arange(9), torch.arange(14)))
        both = model.forward(torch.cat((one, two)), positions, attend, torch.arange(23))
    assert_close(both[:9], our_logits(model, one))
    assert_close(both[9:], our_logits(model, two))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_is_as_near_to_the_truth_as_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Rounding differs by order; ours may not be worse than transformers' own rounding."""
    files = save(tiny(family), tmp_path)
    ids = token_ids(50)
    truth = our_logits(load_model(files, dtype=torch.float64, device="cpu"), ids)
    ours = our_logits(load_model(files, dtype=dtype, device="cpu"), ids)
    # from_pretrained, not .to(): that would round the rotary frequencies as well.
    theirs = hf_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), ids)
    assert ours.dtype == torch.float32
    assert (ours - truth).abs().mean() <= 1.25 * (theirs - truth).abs().mean()


def test_float64_is_near_transformers_in_float32(tmp_path: Path) -> None:
    reference = tiny("qwen2")
    model = load_model(save(reference, tmp_path), dtype=torch.float64, device="cpu")
    logits = our_logits(model, token_ids(30))
    assert logits.dtype == torch.float64
    assert_close(logits.float(), hf_logits(reference, token_ids(30)))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float64])
def test_any_saved_dtype(tmp_path: Path, saved: torch.dtype) -> None:
    model = load_float32(save(tiny("llama").to(saved), tmp_path))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert_close(our_logits(model, token_ids(20)), hf_logits(reference, token_ids(20)))


def test_config_and_shape(tmp_path: Path) -> None:
    config = load_config(save(tiny("qwen3", head_dim=40), tmp_path))
    assert (config.architecture, config.qk_norm, config.qkv_bias, config.head_dim) == ("qwen3", True, False, 40)
    shape = config.shape
    assert (shape.vocab_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (VOCAB, 3, 4, 2)
    assert (shape.head_dim, shape.max_model_len) == (40, 256)


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="int8"):
        load_model(ModelFiles(tmp_path, "hf", "x"), dtype=torch.int8, device="cpu")
