"""Tensors of files, and where each of them goes: fused, allocated once, filled in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from chatsvc.errors import ModelError
from chatsvc.models.config import ModelConfig
from chatsvc.models.llama import LayerWeights, Linear, LlamaModel, ModelWeights
from kernels.cpu.library import Rows


class FileTensor(Protocol):
    """A tensor in a file, read when asked."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, out: torch.Tensor) -> None:
        """Fill ``out``, which has this shape and any float dtype."""
        ...

    def rows(self) -> Rows:
        """A matrix for the CPU kernels: as it lies in the file, mapped, where they know its format; else float32."""
        ...


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose files have been looked at; every tensor is there and has its shape, and none has been read.

    Attributes:
        tensors: under transformers' names.
        rope_factors: [D // 2] divisors of the rotary frequencies, or None.
    """

    config: ModelConfig
    tensors: Mapping[str, FileTensor]
    rope_factors: torch.Tensor | None = None

    def read(self, dtype: torch.dtype, device: torch.device) -> LlamaModel:
        """All weights, tensor by tensor, in memory of ``dtype``. Raises: ModelError."""
        weights, slots = allocate(self.config, dtype, device)
        for name, slot in slots.items():
            self.tensors[name].read_into(slot)
        return LlamaModel(self.config, weights, self.rope_factors)


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """Uninitialised weights, and for each of transformers' parameter names the view of them that it fills."""
    slots: dict[str, torch.Tensor] = {}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def vector(name: str, size: int) -> torch.Tensor:
        slots[name] = empty(size)
        return slots[name]

    def linear(prefix: str, parts: dict[str, int], width: int, bias: bool) -> Linear:
        fused = Linear(empty(sum(parts.values()), width), empty(sum(parts.values())) if bias else None)
        for tensor, kind in ((fused.weight, "weight"), (fused.bias, "bias")):
            if tensor is not None:
                views = tensor.split_with_sizes(list(parts.values()))
                slots.update({f"{prefix}{name}.{kind}": view for name, view in zip(parts, views, strict=True)})
        return fused

    hidden, inter = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    embed = slots["model.embed_tokens.weight"] = empty(config.vocab_size, hidden)
    layers = []
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        attn, mlp = f"{layer}self_attn.", f"{layer}mlp."
        layers.append(
            LayerWeights(
                input_norm=vector(f"{layer}input_layernorm.weight", hidden),
                qkv=linear(attn, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden, config.qkv_bias),
                q_norm=vector(f"{attn}q_norm.weight", config.head_dim) if config.qk_norm else None,
                k_norm=vector(f"{attn}k_norm.weight", config.head_dim) if config.qk_norm else None,
                o=linear(attn, {"o_proj": hidden}, q_size, config.o_bias),
                post_norm=vector(f"{layer}post_attention_layernorm.weight", hidden),
                gate_up=linear(mlp, {"gate_proj": inter, "up_proj": inter}, hidden, config.mlp_bias),
                down=linear(mlp, {"down_proj": hidden}, inter, config.mlp_bias),
            )
        )
    norm = vector("model.norm.weight", hidden)
    lm_head = embed
    if not config.tie_word_embeddings:
        lm_head = slots["lm_head.weight"] = empty(config.vocab_size, hidden)
    return ModelWeights(embed, tuple(layers), norm, lm_head), slots


def opened(
    config: ModelConfig,
    tensors: Mapping[str, FileTensor],
    rope_factors: torch.Tensor | None = None,
    rename: Callable[[str], str] = str,
) -> OpenModel:
    """The model of these tensors. Raises: ModelError: see :func:`check`."""
    _, slots = allocate(config, torch.float32, torch.device("meta"))
    check(slots, tensors, rename)
    return OpenModel(config, tensors, rope_factors)


def check(slots: Mapping[str, torch.Tensor], tensors: Mapping[str, FileTensor], rename: Callable[[str], str]) -> None:
    """Every slot has its tensor, of its shape, and nothing is left over.

    Args:
        slots: from :func:`allocate`.
        tensors: what the file has, under the same names.
        rename: the name to show, as the file spells it.

    Raises:
        ModelError: with all names that are wrong.
    """
    problems = []
    if missing := [rename(n) for n in slots if n not in tensors]:
        problems.append(f"missing: {_some(missing)}")
    if extra := [rename(n) for n in tensors if n not in slots]:
        problems.append(f"unexpected: {_some(extra)}")
    wrong = [
        f"{rename(n)} is {list(tensors[n].shape)}, expected {list(slot.shape)}"
        for n, slot in slots.items()
        if n in tensors and tuple(tensors[n].shape) != tuple(slot.shape)
    ]
    if wrong:
        problems.append(f"wrong shape: {_some(wrong)}")
    if problems:
        raise ModelError("the weights do not fit the configuration; " + "; ".join(problems))


def _some(names: list[str], limit: int = 12) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
