"""A Llama-family model in a GGUF file: its configuration, and its weights under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chatsvc.errors import ModelError
from chatsvc.models.config import ModelConfig, RopeScaling, yarn_attention_factor
from chatsvc.models.gguf_file import GGUFFile, GGUFTensor
from chatsvc.models.weights import FileTensor, OpenModel, opened
from kernels.cpu.library import Rows

# llama.cpp has no architecture of its own for Mistral: its files say "llama".
_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"

# Keys below the architecture's prefix that are read here ...
_HANDLED = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
    }
)
# ... that change no result ...
_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
# ... or change none at this value. Every other key is refused: it may change the result.
_NEUTRAL: Mapping[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "use_parallel_residual": False,
    "attention.causal": True,
    "attention.scale": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The configuration in a file's metadata.

    Raises:
        ModelError: naming the metadata key that is missing, has an impossible value, or asks for something that is
            not implemented.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelError(f"general.architecture {arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    if int(file.metadata.get("split.count", 1)) > 1:
        raise ModelError(f"split.count {file.metadata['split.count']}: a model in several GGUF files is not supported")
    keys = _Keys(arch, {k[len(arch) + 1 :]: v for k, v in file.metadata.items() if k.startswith(f"{arch}.")})
    keys.refuse_unknown()
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise ModelError(f"{arch}.{name} is {keys.integer(name)}, only the head size {head_dim} is supported")
    context = keys.integer("context_length")
    window = keys.integer("attention.sliding_window", 0)
    config = ModelConfig(
        architecture=arch,
        vocab_size=_vocab_size(file, keys),
        hidden_size=hidden,
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        max_position_embeddings=context,
        rope_scaling=_rope_scaling(keys, context),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=arch == "qwen3",
    )
    if 0 < window < config.max_model_len:
        raise ModelError(f"{arch}.attention.sliding_window {window}: a window inside the context is not supported")
    return config


def open_gguf(file: GGUFFile) -> OpenModel:
    """Look at all tensors.

    Raises:
        ModelError: see :func:`gguf_config`; or tensors are missing, left over, or have wrong shapes.
    """
    config = gguf_config(file)
    tensors: dict[str, FileTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name != _ROPE_FREQS:
            name = _hf_name(tensor.name)
            tensors[name] = _unpermuted(tensor, config) if config.architecture == "llama" else tensor
    return opened(config, tensors, _rope_freqs(file, config), _gguf_name)


class _Keys:
    """Typed reads of the metadata below the architecture's prefix."""

    def __init__(self, arch: str, values: dict[str, Any]) -> None:
        self._arch = arch
        self._values = values

    def refuse_unknown(self) -> None:
        refused = [
            f"{self._arch}.{key} = {str(value)[:60]}"
            for key, value in self._values.items()
            if not (key in _HANDLED or key in _HARMLESS or (key in _NEUTRAL and value == _NEUTRAL[key]))
        ]
        if refused:
            raise ModelError(f"the metadata asks for what is not supported: {'; '.join(refused)}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"the metadata key {self._arch}.{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self._arch}.{key} is {value!r}, expected a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"{self._arch}.{key} is {value!r}, expected a number")
        # Settings are decimal numbers stored in float32: 1e-5 is meant, not 9.999999747e-06.
        return float(str(np.float32(value)))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def name(self, key: str) -> str:
        return f"{self._arch}.{key}"


def _vocab_size(file: GGUFFile, keys: _Keys) -> int:
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise ModelError("missing: token_embd.weight")
    return keys.integer("vocab_size", embed.shape[0])


def _rope_scaling(keys: _Keys, context: int) -> RopeScaling:
    if "rope.scale_linear" in keys and keys.number("rope.scale_linear") != 1.0:
        return RopeScaling(type="linear", factor=keys.number("rope.scale_linear"))
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if keys.number(key, 1.0) != 1.0:
            raise ModelError(f"{keys.name(key)} = {keys.number(key)} is not supported")
    kind = keys.get("rope.scaling.type", "none")
    match kind:
        case "none":
            return RopeScaling()
        case "linear":
            return RopeScaling(type="linear", factor=keys.number("rope.scaling.factor"))
        case "yarn":
            factor = keys.number("rope.scaling.factor")
            return RopeScaling(
                type="yarn",
                factor=factor,
                original_max_position_embeddings=keys.integer("rope.scaling.original_context_length", context),
                attention_factor=yarn_attention_factor(factor),
                beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            )
        case _:
            raise ModelError(f"{keys.name('rope.scaling.type')} = {kind!r} is not supported")


def _rope_freqs(file: GGUFFile, config: ModelConfig) -> torch.Tensor | None:
    """Divisors of the frequencies: how llama.cpp's converter stores llama3 scaling."""
    tensor = file.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.shape != (config.head_dim // 2,):
        raise ModelError(f"wrong shape: {_ROPE_FREQS} is {list(tensor.shape)}, expected [{config.head_dim // 2}]")
    factors = torch.empty(tensor.shape, dtype=torch.float32)
    tensor.read_into(factors)
    return factors


def _hf_name(name: str) -> str:
    """transformers' name of a tensor; an unknown one stays as it is, so that it is reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"
    return name


def _gguf_name(name: str) -> str:
    """The reverse of :func:`_hf_name`, for messages."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in _OUTER.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        for ours, theirs in _LAYER.items():
            if match[2] == theirs:
                return f"blk.{match[1]}.{ours}.{kind}"
    return name


def _unpermuted(tensor: GGUFTensor, config: ModelConfig) -> FileTensor:
    if re.fullmatch(r"blk\.\d+\.attn_q\.(weight|bias)", tensor.name):
        return _Unpermuted(tensor, config.num_heads)
    if re.fullmatch(r"blk\.\d+\.attn_k\.(weight|bias)", tensor.name):
        return _Unpermuted(tensor, config.num_kv_heads)
    return tensor


@dataclass(frozen=True, slots=True)
class _Unpermuted:
    """Rows of a query or key projection, put back from llama.cpp's order for the architecture "llama".

    Its rotary kernel turns neighbours (2i, 2i + 1), transformers' turns (i, i + head_dim / 2), so its converter
    interleaves the two halves of each head.
    """

    tensor: GGUFTensor
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read_into(self, out: torch.Tensor) -> None:
        self.tensor.read_into(out)
        pairs = out.view(self.heads, -1, 2, *self.shape[1:])
        out.copy_(pairs.transpose(1, 2).reshape(self.shape))

    def rows(self) -> Rows:
        order = np.arange(self.shape[0]).reshape(self.heads, -1, 2).transpose(0, 2, 1).reshape(-1)
        return self.tensor.rows().reordered(order)
