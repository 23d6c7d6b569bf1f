"""What a decoder of the Llama family looks like, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from chatsvc.errors import ModelError
from chatsvc.models.base import ModelShape

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary angles are stretched; the fields a type does not use keep their defaults.

    Attributes:
        type: "default" (Su et al., RoFormer), "linear" (Chen et al., position interpolation), "dynamic" (NTK-aware,
            base from the current length), "llama3" (Llama 3.1's frequency bands), "yarn" (Peng et al., YaRN).
        factor: how many times longer than the original context.
        original_max_position_embeddings: context of pre-training, tokens.
        low_freq_factor, high_freq_factor: llama3's band borders.
        attention_factor: yarn: multiplies cos and sin (already derived from factor and mscale).
        beta_fast, beta_slow, truncate: yarn's ramp between extrapolation and interpolation.
    """

    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama family.

    Attributes:
        architecture: "llama", "mistral", "qwen2" or "qwen3".
        head_dim: of queries, keys and values; even.
        rms_norm_eps: added to the mean square.
        rope_theta: base of the rotary frequencies.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMSNorm over each query and key head before the rotary embedding (Qwen3).
        tie_word_embeddings: the output layer is the embedding.
        max_position_embeddings: as written in the file.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) <= 0:
                raise ModelError(f"{name} must be positive, the model says {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: the rotary embedding needs pairs")
        if not self.rms_norm_eps > 0 or not self.rope_theta > 0:
            raise ModelError(
                f"rms_norm_eps and rope_theta must be positive, not {self.rms_norm_eps} and {self.rope_theta}"
            )

    @property
    def max_model_len(self) -> int:
        """Tokens of one sequence.

        YaRN states its original context beside the factor, so its reach is known; "linear" and "dynamic" do not say
        whether ``max_position_embeddings`` is meant before or after stretching, so what is written is the limit.
        """
        scaling = self.rope_scaling
        if scaling.type == "yarn":
            return max(self.max_position_embeddings, int(scaling.original_max_position_embeddings * scaling.factor))
        return self.max_position_embeddings

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_model_len=self.max_model_len,
        )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature as a multiplier of cos and sin (Peng et al. 2023, section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
