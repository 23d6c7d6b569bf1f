"""Attention over paged KV in plain torch: right for every shape, and made of a few large operations per layer.

A step is split once, in ``prepare``, into units of work; every layer then runs the same units:

- decode units: sequences with one query token, bucketed by length. The blocks of a bucket are gathered whole into one
  [S, L, KV, D] tensor; heads that share a KV head become the query axis ([S, KV, G, D]), so nothing is repeated.
- prefill units: one sequence with several query tokens; long chunks are cut so that a mask stays small.

Gathered slots beyond a sequence's end hold whatever the pool held (even NaN), and 0 * NaN is NaN: they are zeroed, and
masked as well. Few operations matter because every torch call gives up the GIL and must win it back from the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chatsvc.models.attention.base import KVCache, StepLayout

# Tokens gathered into one decode unit: bounds the scratch, and a smaller unit is still in the cache when it is read.
MAX_UNIT_TOKENS = 16384
# A bucket may hold this many times the tokens that its sequences have.
MAX_PADDING = 1.25
# Queries of one prefill unit: bounds the mask to MAX_QUERIES x (context + MAX_QUERIES).
MAX_QUERIES = 256


@dataclass(frozen=True, slots=True)
class _Decode:
    """A bucket of S sequences with one query token each, padded to L tokens.

    Attributes:
        rows: [S] int64 rows of q, or None when the bucket is the whole step in order.
        blocks: [S * L / block_size] int64.
        garbage: [N] int64 indices into the S * L gathered tokens that lie beyond a sequence's end, or None.
        mask: [S, 1, 1, L] additive, or None when nothing is to be masked.
        size: S.
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    garbage: torch.Tensor | None
    mask: torch.Tensor | None
    size: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query tokens.

    Attributes:
        first: its first row in q.
        seq_len: its tokens in the cache.
        blocks: [ceil(seq_len / block_size)] int64.
        cuts: (first query, end query, visible keys of the last one, additive mask [queries, keys]) of each unit.
    """

    first: int
    seq_len: int
    blocks: torch.Tensor
    cuts: list[tuple[int, int, int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TorchMeta:
    """One step's work. ``written``: rows of k and v that have a slot (None: all), ``blocks`` and ``offsets`` theirs."""

    written: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    decodes: list[_Decode]
    prefills: list[_Prefill]


class TorchBackend:
    """See the module's docstring. Works on any torch device and floating dtype."""

    name = "torch"

    def prepare(self, layout: StepLayout, cache: KVCache) -> TorchMeta:
        """Split the step into units (see :class:`AttentionBackend`)."""
        device, size = cache.data.device, cache.block_size
        written = [row for row, slot in enumerate(layout.slot_mapping) if slot >= 0]
        slots = torch.tensor([layout.slot_mapping[row] for row in written], dtype=torch.int64, device=device)
        every = len(written) == len(layout.slot_mapping)

        singles: list[tuple[int, int, list[int]]] = []  # (seq_len, row, block table)
        several: list[tuple[int, int, int, list[int]]] = []  # (first row, query_len, seq_len, block table)
        row = 0
        for query_len, seq_len, table in zip(layout.query_lens, layout.seq_lens, layout.block_tables, strict=True):
            table = table[: -(-seq_len // size)]
            if query_len == 1:
                singles.append((seq_len, row, table))
            elif query_len > 1:
                several.append((row, query_len, seq_len, table))
            row += query_len
        return TorchMeta(
            written=None if every else torch.tensor(written, dtype=torch.int64, device=device),
            blocks=slots // size,
            offsets=slots % size,
            decodes=[_decode_unit(bucket, cache, row) for bucket in _buckets(singles, size)],
            prefills=_prefill_units(several, cache),
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        cache: KVCache,
        meta: TorchMeta,
        scale: float,
    ) -> torch.Tensor:
        """See :class:`AttentionBackend`."""
        k_cache, v_cache = cache.k(layer), cache.v(layer)
        if meta.written is not None:
            k, v = k.index_select(0, meta.written), v.index_select(0, meta.written)
        where = (meta.blocks, meta.offsets)
        k_cache.index_put_(where, k.to(k_cache.dtype))
        v_cache.index_put_(where, v.to(v_cache.dtype))

        if len(meta.decodes) == 1 and meta.decodes[0].rows is None:
            return _decode(meta.decodes[0], q, k_cache, v_cache, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for unit in meta.decodes:
            assert unit.rows is not None
            out.index_copy_(0, unit.rows, _decode(unit, q.index_select(0, unit.rows), k_cache, v_cache, scale))
        for prefill in meta.prefills:
            _prefill(prefill, q, k_cache, v_cache, scale, out)
        return out


def _buckets(singles: list[tuple[int, int, list[int]]], size: int) -> list[list[tuple[int, int, list[int]]]]:
    """Group sequences of similar length, longest first, so that padding and scratch stay bounded."""
    buckets: list[list[tuple[int, int, list[int]]]] = []
    longest = total = 0
    for single in sorted(singles, key=lambda s: -len(s[2])):
        blocks = len(single[2])
        padded = longest * (len(buckets[-1]) + 1) if buckets else 0
        if buckets and padded <= MAX_PADDING * (total + blocks) and padded * size <= MAX_UNIT_TOKENS:
            buckets[-1].append(single)
            total += blocks
        else:
            buckets.append([single])
            longest = total = blocks
    return buckets


def _decode_unit(bucket: list[tuple[int, int, list[int]]], cache: KVCache, num_rows: int) -> _Decode:
    device, size = cache.data.device, cache.block_size
    bucket = sorted(bucket, key=lambda single: single[1])  # a bucket that is the whole step keeps q's order
    width = max(len(table) for _, _, table in bucket)
    blocks = torch.tensor([table + [0] * (width - len(table)) for _, _, table in bucket], dtype=torch.int64)
    lengths = torch.tensor([seq_len for seq_len, _, _ in bucket], dtype=torch.int64)
    beyond = torch.arange(width * size) >= lengths[:, None]  # [S, L]
    garbage = beyond.flatten().nonzero().flatten()
    mask = None
    if garbage.numel():
        mask = torch.zeros(beyond.shape, dtype=cache.data.dtype).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None, :].to(device)
    whole = len(bucket) == num_rows
    return _Decode(
        rows=None if whole else torch.tensor([row for _, row, _ in bucket], dtype=torch.int64, device=device),
        blocks=blocks.flatten().to(device),
        garbage=garbage.to(device) if garbage.numel() else None,
        mask=mask,
        size=len(bucket),
    )


def _prefill_units(several: list[tuple[int, int, int, list[int]]], cache: KVCache) -> list[_Prefill]:
    """All masks are views of one staircase: row i sees column j when j <= i + base."""
    if not several:
        return []
    device = cache.data.device
    height = min(MAX_QUERIES, max(query_len for _, query_len, _, _ in several))
    base = max(seq_len for _, _, seq_len, _ in several) - 1
    stairs = torch.full((height, base + height), float("-inf"), dtype=cache.data.dtype, device=device).triu_(base + 1)
    units = []
    for first, query_len, seq_len, table in several:
        cuts = []
        for start in range(0, query_len, MAX_QUERIES):
            end = min(start + MAX_QUERIES, query_len)
            before = seq_len - query_len + start  # position of the first query = the last key that it sees
            keys = seq_len - query_len + end
            cuts.append((start, end, keys, stairs[: end - start, base - before : base - before + keys]))
        units.append(_Prefill(first, seq_len, torch.tensor(table, dtype=torch.int64, device=device), cuts))
    return units


def _decode(
    unit: _Decode, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
) -> torch.Tensor:
    """[S, H, D] of one bucket."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    keys = k_cache.index_select(0, unit.blocks).view(-1, kv_heads, dim)
    values = v_cache.index_select(0, unit.blocks).view(-1, kv_heads, dim)
    if unit.garbage is not None:
        keys.index_fill_(0, unit.garbage, 0)
        values.index_fill_(0, unit.garbage, 0)
    out = F.scaled_dot_product_attention(
        q.view(unit.size, kv_heads, heads // kv_heads, dim),
        keys.view(unit.size, -1, kv_heads, dim).transpose(1, 2).to(q.dtype),
        values.view(unit.size, -1, kv_heads, dim).transpose(1, 2).to(q.dtype),
        attn_mask=None if unit.mask is None else unit.mask.to(q.dtype),
        scale=scale,
    )
    return out.reshape(unit.size, heads, dim)


def _prefill(
    unit: _Prefill, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Fill the sequence's rows of out."""
    _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    keys = k_cache.index_select(0, unit.blocks).view(-1, kv_heads, 1, dim).permute(1, 2, 0, 3).to(q.dtype)
    values = v_cache.index_select(0, unit.blocks).view(-1, kv_heads, 1, dim).permute(1, 2, 0, 3).to(q.dtype)
    for start, end, visible, mask in unit.cuts:
        rows = slice(unit.first + start, unit.first + end)
        attended = F.scaled_dot_product_attention(
            q[rows].view(end - start, kv_heads, group, dim).permute(1, 2, 0, 3),
            keys[:, :, :visible].expand(-1, group, -1, -1),
            values[:, :, :visible].expand(-1, group, -1, -1),
            attn_mask=mask.to(q.dtype),
            scale=scale,
        )
        out[rows] = attended.permute(2, 0, 1, 3).reshape(end - start, heads, dim)
