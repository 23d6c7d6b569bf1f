"""The seam between a model and the attention kernels over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from chatsvc.models.base import CausalLM, ModelShape
from chatsvc.models.weights import OpenModel


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step on the host, as plain numbers: S sequences, T tokens in all, tokens of a sequence adjacent.

    Attributes:
        query_lens: [S] tokens computed for each sequence in this step (>= 1).
        seq_lens: [S] tokens of each sequence that are in the cache after this step's writes; the last query token
            of a sequence stands at position ``seq_len - 1``.
        block_tables: [S] block ids covering ``seq_len`` tokens.
        slot_mapping: [T] ``block_id * block_size + offset`` of each token, or -1: nothing is written for it.
    """

    query_lens: list[int]
    seq_lens: list[int]
    block_tables: Sequence[Sequence[int]]
    slot_mapping: list[int]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool, allocated once.

    ``data`` has shape [num_blocks + 1, num_layers, 2, block_size, num_kv_heads, head_dim]: one block is one contiguous
    run of bytes for all layers, so copying, swapping, saving or sending a block is one copy. Block 0 is the null
    block. Within a block tokens are adjacent, so a write is one row and a gather needs no transposition.
    """

    data: torch.Tensor

    @property
    def block_size(self) -> int:
        return int(self.data.shape[3])

    def k(self, layer: int) -> torch.Tensor:
        """[num_blocks + 1, block_size, num_kv_heads, head_dim], a strided view."""
        return self.data[:, layer, 0]

    def v(self, layer: int) -> torch.Tensor:
        """Same shape as :meth:`k`."""
        return self.data[:, layer, 1]


class AttentionBackend(Protocol):
    """``prepare`` is called once a step, ``forward`` once a layer. Written K/V is visible to every row of the step."""

    name: str

    def arithmetic(self, cache: KVCache) -> str:
        """How it computes over this cache; tells caches on disk apart, for another one makes other keys and values."""
        ...

    def prepare(self, layout: StepLayout, cache: KVCache) -> Any:
        """Build the step's metadata on the cache's device."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        cache: KVCache,
        meta: Any,
        scale: float,
    ) -> torch.Tensor:
        """Write k, v to the cache, then causal attention of q over it.

        Args:
            q: [T, num_heads, head_dim], rotary embedding applied.
            k, v: [T, num_kv_heads, head_dim].
            meta: from :meth:`prepare`.
            scale: multiplies q @ k.

        Returns:
            [T, num_heads, head_dim], contiguous. Slots that no sequence owns never contribute, whatever they hold.
        """
        ...


@runtime_checkable
class FusedModel(Protocol):
    """A model that runs a whole step, attention included, in one call."""

    shape: ModelShape
    dtype: torch.dtype
    device: torch.device

    def settle(self) -> None:
        """What may wait until the first steps have been measured; called once."""
        ...

    def step(
        self, ids: Sequence[int], positions: Sequence[int], layout: StepLayout, wanted: list[int], cache: KVCache
    ) -> torch.Tensor:
        """Write K and V, attend, and return the logits of ``wanted``.

        Args:
            ids, positions: [T].
            wanted: [R] indices into T, one of them several times where a sequence forks.

        Returns:
            [R, vocab_size] float32 logits.
        """
        ...


@runtime_checkable
class FusingBackend(Protocol):
    """An attention backend that can take a model over."""

    def load(self, model: OpenModel, dtype: torch.dtype) -> FusedModel | None:
        """A fused model straight from the files, or None when this kind is the caller's to read."""
        ...

    def fuse(self, model: CausalLM | FusedModel) -> CausalLM | FusedModel:
        """A fused copy of the model (the original may then be dropped), or the model itself when it cannot be."""
        ...
