"""Writes transformers models as GGUF files, through gguf's own writer and quantisers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from chatsvc.modelfiles import ModelFiles

T = GGMLQuantizationType
# gguf has no Python quantiser for these: their blocks are random bytes, with float16 scales of a sane size at these
# places, so that weights are about 0.1.
RANDOM = {T.Q4_K: ((0, 3e-4), (2, 1e-3)), T.Q5_K: ((0, 2e-4), (2, 1e-3)), T.Q6_K: ((208, 6e-5),)}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
Tensors = dict[str, tuple[np.ndarray, GGMLQuantizationType]]


def encode(weights: np.ndarray, kind: GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """[rows, columns] float32 -> [rows, bytes] uint8 (or the float type itself); random content for K-quants."""
    if kind not in RANDOM:
        return gguf.quantize(weights, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = weights.shape
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at, typical in RANDOM[kind]:
        scales = (typical * random.uniform(0.5, 1.5, (rows, columns // block, 1))).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of a query or key projection: the two halves of a head, row by row in turn."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, _, kind = name.removeprefix("model.").rpartition(".")
    if stem.startswith("layers."):
        _, layer, inner = stem.split(".", 2)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def tensors_of(model: PreTrainedModel, kind: GGMLQuantizationType = T.F32) -> Tensors:
    """All tensors of a model, matrices as ``kind``; the model's own matrices become what ``kind`` can express."""
    config, tensors = model.config, {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        data, type_ = parameter.detach().numpy(), T.F32
        if parameter.dim() == 2:
            data, type_ = encode(data, kind, seed), kind
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(gguf.dequantize(data, kind)))
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            data = interleave(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        tensors[gguf_name(name)] = (data, type_)
    return tensors


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Keys below the architecture's prefix."""
    config = model.config
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def write(path: Path, arch: str, metadata: dict[str, Any], tensors: Tensors) -> ModelFiles:
    """Write a file; a value is stored as uint32, float32, bool or string by its Python type, None leaves it out."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "é"])
    for key, value in metadata.items():
        adders: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            adders[type(value)](key if key.startswith(("general.", "split.")) else f"{arch}.{key}", value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(path, "gguf", path.stem)


def save_gguf(path: Path, model: PreTrainedModel, kind: GGMLQuantizationType = T.F32, **metadata: Any) -> ModelFiles:
    tensors = tensors_of(model, kind)
    return write(path, model.config.model_type, metadata_of(model) | metadata, tensors)
