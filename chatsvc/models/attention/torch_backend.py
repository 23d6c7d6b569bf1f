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
        rows: [S] int64 rows of q, or None when the bucket is the whole step in q's order.
        gather: [2 * S * L / block_size] int64, the runs of K, then those of V (see :func:`_runs`).
        garbage: [N] int64 indices into the 2 * S * L gathered tokens that lie beyond a sequence's end, or None.
        mask: [S, 1, 1, L] additive, or None when nothing is to be masked.
        size: S.
    """

    rows: torch.Tensor | None
    gather: torch.Tensor
    garbage: torch.Tensor | None
    mask: torch.Tensor | None
    size: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query tokens.

    Attributes:
        first: its first row in q.
        gather: [2 * ceil(seq_len / block_size)] int64, the runs of K, then those of V.
        cuts: (first query, end query, keys that the last of them sees, additive mask [queries, keys]) of each piece.
    """

    first: int
    gather: torch.Tensor
    cuts: list[tuple[int, int, int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TorchMeta:
    """One step's work.

    Attributes:
        written: rows of k and v that have a slot, or None: all of them.
        slots: [W] int64, where they go in the tokens of :func:`_tokens`.
        scratch: [N, block_size * num_kv_heads * head_dim], what a unit gathers; allocated once per step, because the
            kernel's page faults for a fresh buffer of this size cost more than the copy into it.
    """

    written: torch.Tensor | None
    slots: torch.Tensor
    scratch: torch.Tensor
    decodes: list[_Decode]
    prefills: list[_Prefill]


class TorchBackend:
    """See the module's docstring. Works on any torch device and floating dtype; the pool must be contiguous."""

    name = "torch"

    def arithmetic(self, cache: KVCache) -> str:
        """See :class:`AttentionBackend`."""
        return self.name

    def prepare(self, layout: StepLayout, cache: KVCache) -> TorchMeta:
        """Split the step into units (see :class:`AttentionBackend`)."""
        data, size = cache.data, cache.block_size
        written = [row for row, slot in enumerate(layout.slot_mapping) if slot >= 0]
        every = len(written) == len(layout.slot_mapping)
        slots = torch.tensor([layout.slot_mapping[row] for row in written], dtype=torch.int64)

        singles: list[_Single] = []
        prefills: list[_Prefill] = []
        stairs = _stairs(layout, data)
        row = 0
        for query_len, seq_len, table in zip(layout.query_lens, layout.seq_lens, layout.block_tables, strict=True):
            blocks = list(table[: -(-seq_len // size)])
            if query_len == 1:
                singles.append((row, seq_len, blocks))
            elif query_len > 1:
                prefills.append(_prefill_unit(row, query_len, seq_len, blocks, stairs, data))
            row += query_len
        decodes = [_decode_unit(bucket, row, data) for bucket in _buckets(singles, size)]
        gathers = [unit.gather for unit in decodes] + [unit.gather for unit in prefills]
        return TorchMeta(
            written=None if every else torch.tensor(written, dtype=torch.int64, device=data.device),
            slots=(slots // size * (data.stride(0) // data.stride(3)) + slots % size).to(data.device),
            scratch=data.new_empty(max((g.shape[0] for g in gathers), default=0), data.stride(2)),
            decodes=decodes,
            prefills=prefills,
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
        if meta.written is not None:
            k, v = k.index_select(0, meta.written), v.index_select(0, meta.written)
        for part, new in enumerate((k, v)):
            _flat(cache.data, 2 * layer + part, 3).index_copy_(0, meta.slots, new.flatten(1).to(cache.data.dtype))

        runs = _flat(cache.data, 2 * layer, 2)
        if len(meta.decodes) == 1 and meta.decodes[0].rows is None:
            return _decode(meta.decodes[0], q, runs, meta.scratch, k.shape[1], scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for unit in meta.decodes:
            assert unit.rows is not None
            attended = _decode(unit, q.index_select(0, unit.rows), runs, meta.scratch, k.shape[1], scale)
            out.index_copy_(0, unit.rows, attended)
        for prefill in meta.prefills:
            _prefill(prefill, q, runs, meta.scratch, k.shape[1], scale, out)
        return out


_Single = tuple[int, int, list[int]]  # row in q, seq_len, blocks


def _flat(data: torch.Tensor, part: int, dim: int) -> torch.Tensor:
    """The pool as rows, counted from the first row of K (``part = 2 * layer``) or V (``+ 1``) of a layer in block 0.

    ``dim`` 2: a row is a run, the K or V of one block and layer; block ``b`` is at ``b * 2 * num_layers``, V one row
    after K. ``dim`` 3: a row is a token. So the same indices serve every layer, and K and V come in one gather.
    """
    rows = data.view(-1, data.stride(dim))
    return rows[part * (data.stride(2) // data.stride(dim)) :]


def _runs(blocks: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """[N] block ids to [2 * N] rows of ``_flat(data, 2 * layer, 2)``: all of K, then all of V."""
    keys = blocks * (2 * data.shape[1])
    return torch.cat((keys, keys + 1)).to(data.device)


def _buckets(singles: list[_Single], size: int) -> list[list[_Single]]:
    """Group sequences of similar length, longest first, so that padding and scratch stay bounded."""
    buckets: list[list[_Single]] = []
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


def _decode_unit(bucket: list[_Single], num_rows: int, data: torch.Tensor) -> _Decode:
    size = data.shape[3]
    bucket = sorted(bucket)  # a bucket that is the whole step keeps q's order
    width = max(len(blocks) for _, _, blocks in bucket)
    padded = torch.tensor([blocks + [0] * (width - len(blocks)) for _, _, blocks in bucket], dtype=torch.int64)
    lengths = torch.tensor([seq_len for _, seq_len, _ in bucket], dtype=torch.int64)
    beyond = torch.arange(width * size) >= lengths[:, None]  # [S, L]
    garbage = beyond.flatten().nonzero().flatten()
    mask = rows = None
    if garbage.numel():
        mask = torch.zeros(beyond.shape, dtype=data.dtype).masked_fill_(beyond, float("-inf"))
        mask = mask[:, None, None, :].to(data.device)
    if len(bucket) < num_rows:
        rows = torch.tensor([row for row, _, _ in bucket], dtype=torch.int64, device=data.device)
    return _Decode(
        rows=rows,
        gather=_runs(padded.flatten(), data),
        garbage=torch.cat((garbage, garbage + beyond.numel())).to(data.device) if garbage.numel() else None,
        mask=mask,
        size=len(bucket),
    )


def _stairs(layout: StepLayout, data: torch.Tensor) -> torch.Tensor:
    """[queries, base + queries] additive: row i sees column j when j <= i + base. Every mask of the step is a view.

    ``base`` is its width less its height.
    """
    several = [(q, s) for q, s in zip(layout.query_lens, layout.seq_lens, strict=True) if q > 1]
    height = min(MAX_QUERIES, max((query_len for query_len, _ in several), default=0))
    base = max((seq_len for _, seq_len in several), default=0)
    stairs = torch.full((height, base + height), float("-inf"), dtype=data.dtype, device=data.device)
    return stairs.triu_(base + 1)


def _prefill_unit(
    first: int, query_len: int, seq_len: int, blocks: list[int], stairs: torch.Tensor, data: torch.Tensor
) -> _Prefill:
    base = stairs.shape[1] - stairs.shape[0]
    cuts = []
    for start in range(0, query_len, MAX_QUERIES):
        end = min(start + MAX_QUERIES, query_len)
        before = seq_len - query_len + start  # keys before the first query; it sees itself too
        keys = seq_len - query_len + end
        cuts.append((start, end, keys, stairs[: end - start, base - before : base - before + keys]))
    return _Prefill(first, _runs(torch.tensor(blocks, dtype=torch.int64), data), cuts)


def _decode(
    unit: _Decode, q: torch.Tensor, runs: torch.Tensor, scratch: torch.Tensor, kv_heads: int, scale: float
) -> torch.Tensor:
    """[S, H, D] of one bucket; q holds its rows only."""
    _, heads, dim = q.shape
    got = torch.index_select(runs, 0, unit.gather, out=scratch[: unit.gather.shape[0]])
    if unit.garbage is not None:
        got.view(-1, kv_heads * dim).index_fill_(0, unit.garbage, 0)
    keys, values = got.view(2, unit.size, -1, kv_heads, dim).transpose(2, 3).to(q.dtype)  # [S, KV, L, D] each
    out = F.scaled_dot_product_attention(
        q.view(unit.size, kv_heads, heads // kv_heads, dim),
        keys,
        values,
        attn_mask=None if unit.mask is None else unit.mask.to(q.dtype),
        scale=scale,
    )
    return out.reshape(unit.size, heads, dim)


def _prefill(
    unit: _Prefill,
    q: torch.Tensor,
    runs: torch.Tensor,
    scratch: torch.Tensor,
    kv_heads: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill the sequence's rows of out."""
    _, heads, dim = q.shape
    group = heads // kv_heads
    got = torch.index_select(runs, 0, unit.gather, out=scratch[: unit.gather.shape[0]])
    # The cuts leave out what lies beyond the sequence's end. Heads that share a KV head read it through a zero stride.
    keys, values = got.view(2, -1, kv_heads, 1, dim).permute(0, 2, 3, 1, 4).to(q.dtype).expand(-1, -1, group, -1, -1)
    for start, end, visible, mask in unit.cuts:
        rows = slice(unit.first + start, unit.first + end)
        attended = F.scaled_dot_product_attention(
            q[rows].view(end - start, kv_heads, group, dim).permute(1, 2, 0, 3),
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask.to(q.dtype),
            scale=scale,
        )
        out[rows] = attended.permute(2, 0, 1, 3).reshape(end - start, heads, dim)
