"""The Llama family's forward pass: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chatsvc.models.base import Attend
from chatsvc.models.config import ModelConfig
from chatsvc.models.rotary import Rotary, rotate


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] += self(x), in place and in one call."""
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual += self.bias
        return residual


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        input_norm, post_norm: [hidden].
        qkv: [(H + 2 KV) * D, hidden]; rows of q, then k, then v.
        q_norm, k_norm: [D] or None.
        o: [hidden, H * D].
        gate_up: [2 * intermediate, hidden]; rows of gate, then up.
        down: [hidden, intermediate].
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All parameters, of one dtype on one device. ``lm_head`` is ``embed`` itself when the two are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor


class LlamaModel:
    """A :class:`chatsvc.models.base.CausalLM`. The caller holds ``torch.inference_mode()``.

    float64 is computed in float64 throughout, which is what a reference is for; the lower precisions take the mean
    square of RMSNorm in float32.

    Args:
        rope_factors: [D // 2] divisors of the rotary frequencies, or None.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, rope_factors: torch.Tensor | None = None) -> None:
        self.config = config
        self.weights = weights
        self.shape = config.shape
        self.dtype = weights.embed.dtype
        self.device = weights.embed.device
        self.rotary = Rotary(config, self.device, rope_factors)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_rows: torch.Tensor,
        rope_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over a flat batch; rows never see each other except through ``attend``.

        Args:
            input_ids, positions: [T] int64.
            attend: called once for each layer; its q [T, H, D], k and v [T, KV, D] are views with strides.
            logits_rows: [R] int64 indices into T.
            rope_lens: [T] int64, only for "dynamic" rope scaling: see :class:`chatsvc.models.rotary.Rotary`.

        Returns:
            [R, vocab_size] logits in float32 (float64 when the model is float64).
        """
        weights, eps = self.weights, self.config.rms_norm_eps
        cos, sin = self.rotary.cos_sin(positions, self.dtype, rope_lens)
        hidden = F.embedding(input_ids, weights.embed)
        last = self.config.num_layers - 1
        for index, layer in enumerate(weights.layers):
            q, k, v = self._qkv(layer, hidden, cos, sin)
            attended = attend(index, q, k, v).flatten(1)
            if index == last:
                # What follows works row by row, and only these rows are asked for.
                attended, hidden = attended.index_select(0, logits_rows), hidden.index_select(0, logits_rows)
            layer.o.add_to(hidden, attended)
            gate, up = layer.gate_up(rms_norm(hidden, layer.post_norm, eps)).chunk(2, dim=-1)
            layer.down.add_to(hidden, F.silu(gate).mul_(up))
        logits = F.linear(rms_norm(hidden, weights.norm, eps), weights.lm_head)
        return logits if self.dtype == torch.float64 else logits.float()

    def _qkv(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, config.rms_norm_eps))
        qkv = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((heads, kv_heads), dim=1)
            eps = config.rms_norm_eps
            qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), dim=1)
        q, k = rotate(qk, cos, sin).split_with_sizes((heads, kv_heads), dim=1)
        return q, k, v


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019).

    Half precisions are normalised in float32 and rounded before the weight is applied, as transformers does.
    """
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
