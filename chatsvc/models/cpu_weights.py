"""A model's weights in the order in which the CPU kernels pack them, from files or from tensors in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from chatsvc.models.config import ModelConfig
from chatsvc.models.llama import Linear, LlamaModel
from chatsvc.models.weights import OpenModel
from kernels.cpu.library import Rows

_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
KINDS = tuple(_PARTS)


@dataclass(frozen=True, slots=True)
class Norms:
    """Of one layer, float32: see :class:`chatsvc.models.llama.LayerWeights`."""

    input: torch.Tensor
    post: torch.Tensor
    q: torch.Tensor | None
    k: torch.Tensor | None


class Weights(Protocol):
    """Matrices are asked for one at a time, and may be dropped once they are packed."""

    config: ModelConfig
    tied: bool

    def linear(self, layer: int, kind: str) -> tuple[Rows, torch.Tensor | None]:
        """Weight and bias of one of :data:`KINDS`."""
        ...

    def norms(self, layer: int) -> Norms: ...

    def last(self) -> tuple[torch.Tensor, Rows, Rows]:
        """The last norm, the head, and the embedding."""
        ...


class FileWeights:
    """Nothing is read before it is packed, and what the kernels know is packed from the mapped file."""

    def __init__(self, model: OpenModel) -> None:
        self.config = model.config
        self.tied = model.config.tie_word_embeddings
        self._tensors = model.tensors

    def linear(self, layer: int, kind: str) -> tuple[Rows, torch.Tensor | None]:
        names = [f"model.layers.{layer}.{part}" for part in _PARTS[kind]]
        has_bias = f"{names[0]}.bias" in self._tensors
        bias = torch.cat([self._vector(f"{name}.bias") for name in names]) if has_bias else None
        return self._stacked([f"{name}.weight" for name in names]), bias

    def norms(self, layer: int) -> Norms:
        prefix = f"model.layers.{layer}."
        heads = [self._vector(f"{prefix}self_attn.{x}_norm.weight") if self.config.qk_norm else None for x in "qk"]
        return Norms(
            self._vector(f"{prefix}input_layernorm.weight"),
            self._vector(f"{prefix}post_attention_layernorm.weight"),
            *heads,
        )

    def last(self) -> tuple[torch.Tensor, Rows, Rows]:
        embed = self._tensors["model.embed_tokens.weight"].rows()
        head = embed if self.tied else self._tensors["lm_head.weight"].rows()
        return self._vector("model.norm.weight"), head, embed

    def _vector(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        out = torch.empty(tensor.shape)
        tensor.read_into(out)
        return out

    def _stacked(self, names: Sequence[str]) -> Rows:
        parts = [self._tensors[name].rows() for name in names]
        if any(part.format != parts[0].format for part in parts):  # files mix formats: float32 holds them all
            floats = [torch.empty(self._tensors[name].shape) for name in names]
            for name, out in zip(names, floats, strict=True):
                self._tensors[name].read_into(out)
            parts = [Rows.of(out) for out in floats]
        return Rows.stacked(parts)


class MemoryWeights:
    """A model in memory, float32 on the CPU."""

    def __init__(self, model: LlamaModel) -> None:
        self.config = model.config
        self._weights = model.weights
        self.tied = model.weights.lm_head is model.weights.embed

    def linear(self, layer: int, kind: str) -> tuple[Rows, torch.Tensor | None]:
        linear: Linear = getattr(self._weights.layers[layer], kind)
        return Rows.of(linear.weight.detach().contiguous()), _plain(linear.bias)

    def norms(self, layer: int) -> Norms:
        weights = self._weights.layers[layer]
        before, after = weights.input_norm.detach().contiguous(), weights.post_norm.detach().contiguous()
        return Norms(before, after, _plain(weights.q_norm), _plain(weights.k_norm))

    def last(self) -> tuple[torch.Tensor, Rows, Rows]:
        head, embed = (Rows.of(x.detach().contiguous()) for x in (self._weights.lm_head, self._weights.embed))
        return self._weights.norm.detach().contiguous(), head, embed


def _plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().contiguous()
