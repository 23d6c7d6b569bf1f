"""Tiny random transformers models, and a dense attention that knows nothing of pages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from chatsvc.modelfiles import ModelFiles
from chatsvc.models.llama import LlamaModel
from chatsvc.models.loader import load_model

CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB = 131


def tiny(family: str, **changes: Any) -> PreTrainedModel:
    """Three layers, four query heads for two key heads; every parameter random, norms and biases too."""
    config_class, model_class = CLASSES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attn_implementation": "eager",
    }
    if family == "mistral":
        settings["sliding_window"] = None
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class(**(settings | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Spread logits and attention, so that a wrong scale or a missing bias shows.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> ModelFiles:
    model.save_pretrained(directory, **options)
    return ModelFiles(directory, "hf", directory.name)


def load_float32(files: ModelFiles) -> LlamaModel:
    return load_model(files, dtype=torch.float32, device="cpu")


def attend_dense(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over one sequence computed in one piece: [T, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


class CachedAttend:
    """Causal attention of new tokens over all earlier ones of the same sequence."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self.keys:
            k, v = torch.cat((self.keys[layer], k)), torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        rows, columns = torch.arange(len(k) - len(q), len(k)), torch.arange(len(k))
        mask = columns[None, :] <= rows[:, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def token_ids(length: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def our_logits(model: LlamaModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    every = torch.arange(len(ids))
    return model.forward(ids, every, attend_dense, every, **options)


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None]).logits[0]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert theirs.std() > 0.1, "the reference is flat: the comparison would prove nothing"
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
