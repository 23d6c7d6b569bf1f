"""Shapes of the models that are simulated: enough to count their bytes and FLOPs.

Sources: the published configurations of Llama 2 (Touvron et al. 2023), Llama 3 (Llama Team 2024) and OPT (Zhang et al.
2022).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder.

    Attributes:
        dim, ffn, heads, kv_heads, head_dim, vocab: widths in elements.
        ffn_matrices: 3 with a gate (Llama), 2 without (OPT).
        context: longest sequence in tokens.
        bytes_per_element: of weights and K/V (2: fp16 or bf16).
    """

    name: str
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    bytes_per_element: int = 2
    ffn_matrices: int = 3

    @property
    def kv_bytes_per_token(self) -> int:
        """2 (K and V) x layers x KV heads x head dimension x bytes per element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element

    @property
    def layer_params(self) -> int:
        """Elements of the matrices of all layers (norms are left out: under 0.01 %)."""
        q_and_o = 2 * self.dim * self.heads * self.head_dim
        k_and_v = 2 * self.dim * self.kv_heads * self.head_dim
        return self.layers * (q_and_o + k_and_v + self.ffn_matrices * self.dim * self.ffn)

    @property
    def head_params(self) -> int:
        """Elements of the output projection; the embedding has as many."""
        return self.vocab * self.dim

    @property
    def weight_bytes(self) -> int:
        return (self.layer_params + 2 * self.head_params) * self.bytes_per_element

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads: all but the embedding, of which it reads a row for each token."""
        return (self.layer_params + self.head_params) * self.bytes_per_element


LLAMA_2_7B = ModelShape("Llama-2-7B", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
OPT_13B = ModelShape("OPT-13B", 40, 5120, 20480, 40, 40, 128, 50272, 2048, ffn_matrices=2)
LLAMA_3_70B = ModelShape("Llama-3-70B", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
