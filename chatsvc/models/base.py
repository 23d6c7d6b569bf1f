"""What a model is to the runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# attend(layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H, D]. The runner closes over cache and metadata, so no
# model ever looks at a global forward context.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the runner and the KV pool need to know of a model."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int


class CausalLM(Protocol):
    shape: ModelShape
    dtype: torch.dtype
    device: torch.device

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """One step over a flat batch.

        Args:
            input_ids, positions: [T] int64.
            logits_rows: [R] int64 indices into T: only these rows are projected to the vocabulary.

        Returns:
            [R, vocab_size] logits in float32 (float64 when the model is float64).
        """
        ...
