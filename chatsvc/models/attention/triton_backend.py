"""Attention over paged KV with the project's Triton kernels; importing it needs triton (see ``select``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chatsvc.models.attention.base import KVCache, StepLayout
from kernels.triton.paged_attention import paged_attention
from kernels.triton.reshape_and_cache import reshape_and_cache

# Triton compiles a kernel once more for pointers that are not divisible by 16 bytes: keep every part aligned.
_ALIGN = 2


@dataclass(frozen=True, slots=True)
class TritonMeta:
    """One step's metadata, int64 on the device: parts of one tensor, so one copy brings them there.

    Attributes:
        slots: [T].
        query_starts: [S + 1].
        seq_lens: [S].
        block_tables: [S, W], padded with the null block.
        max_query_len: on the host.
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int


class TritonBackend:
    """CUDA, or a CPU with Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported)."""

    name = "triton"

    def prepare(self, layout: StepLayout, cache: KVCache) -> TritonMeta:
        """One upload (see :class:`AttentionBackend`)."""
        starts = [0]
        for query_len in layout.query_lens:
            starts.append(starts[-1] + query_len)
        width = max((len(table) for table in layout.block_tables), default=0)
        tables = [block for table in layout.block_tables for block in [*table, *[0] * (width - len(table))]]
        flat: list[int] = []
        spans = []
        for part in (layout.slot_mapping, starts, layout.seq_lens, tables):
            spans.append((len(flat), len(flat) + len(part)))
            flat += part
            flat += [0] * (-len(flat) % _ALIGN)
        packed = torch.tensor(flat, dtype=torch.int64).to(cache.data.device)
        slots, query_starts, seq_lens, block_tables = (packed[start:end] for start, end in spans)
        return TritonMeta(
            slots=slots,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_tables=block_tables.view(len(layout.block_tables), width),
            max_query_len=max(layout.query_lens, default=0),
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        cache: KVCache,
        meta: TritonMeta,
        scale: float,
    ) -> torch.Tensor:
        """See :class:`AttentionBackend`."""
        k_cache, v_cache = cache.k(layer), cache.v(layer)
        reshape_and_cache(k, v, k_cache, v_cache, meta.slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_attention(
            q,
            k_cache,
            v_cache,
            meta.block_tables,
            meta.query_starts,
            meta.seq_lens,
            scale,
            meta.max_query_len,
            out,
        )
        return out
