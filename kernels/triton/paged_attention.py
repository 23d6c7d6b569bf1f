# mypy: disallow-incomplete-defs=False
"""Causal attention over a paged KV cache in Triton: one kernel for prefill, decode, split keys and shared prefixes.

A program owns one KV head and one piece of the plan (see :mod:`kernels.triton.plan`): some rows and a stretch of keys.
All query heads that read this KV head stand in the same tile, so K and V are loaded once for the group
(row of the tile = row of the piece * GROUP + head)::

    GROUP = 3, BLOCK_M = 16: 16 // 3 = 5 rows        r0h0 r0h1 r0h2 r1h0 ... r4h2  (unused)

The tile walks over the keys BLOCK_N at a time, each key's address taken from the block table, so a step may span
several blocks or a part of one. The softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
FlashAttention, arXiv:2205.14135) in float32, in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import FACTOR, from_e4m3
from kernels.triton.plan import MERGE, PIECE, AttentionPlan
from kernels.triton.upload import Upload


@triton.jit
def _load(base, block, slot, stride_block, stride_slot, dim, mask, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """[BLOCK_N, DIM_PADDED] of K or V. What is masked is 0: a slot of nobody may hold NaN, and 0 * NaN is NaN."""
    offset = block * stride_block + slot * stride_slot
    if FP8:
        return from_e4m3(tl.load(base + offset[:, None] + dim[None, :], mask=mask, other=0)).to(DTYPE)
    return tl.load(base + offset[:, None] + dim[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def _online(scores, v, largest, total, acc, PRECISION: tl.constexpr):
    """One step of the online softmax: scores [BLOCK_M, BLOCK_N] in base 2, v [BLOCK_N, DIM_PADDED].

    Every row sees the first key of its piece, so after the first step ``larger`` is finite and nothing is inf - inf.
    """
    larger = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return larger, total, acc


@triton.jit
def paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    pieces_ptr,
    rows_ptr,
    tables_ptr,
    fp8_scales_ptr,
    scale_log2,
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    piece = pieces_ptr + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    first_row = tl.load(piece)
    num_rows = tl.load(piece + 1)
    table = tables_ptr + tl.load(piece + 2)
    first_key = tl.load(piece + 3)
    end_key = tl.load(piece + 4)
    part = tl.load(piece + 5)

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    used = m // GROUP < num_rows
    row = rows_ptr + (first_row + m // GROUP) * 3
    token = tl.load(row, mask=used, other=0).to(tl.int64)
    # A row that is not used sees every key and is never stored.
    position = tl.load(row + 1, mask=used, other=0x7FFFFFFF)
    partial = tl.load(row + 2, mask=used, other=0)
    head = kv_head * GROUP + m % GROUP
    inside = used[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = token * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=inside, other=0.0)
    if DOT_IN_FLOAT32:
        q = q.to(tl.float32)
    DTYPE: tl.constexpr = q.dtype
    if FP8:
        scale_log2 = scale_log2 * tl.load(fp8_scales_ptr + kv_head)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    # Head, block and slot x stride in 64 bits: a pool has more than 2**31 elements long before a GPU is full.
    k_base = k_cache_ptr + kv_head.to(tl.int64) * k_stride_head
    v_base = v_cache_ptr + kv_head.to(tl.int64) * v_stride_head
    n = tl.arange(0, BLOCK_N)
    in_dim = (dim < HEAD_DIM)[None, :]

    # Keys that every row sees need no mask.
    lowest = tl.minimum(tl.min(position), end_key - 1)
    plain = first_key + tl.maximum(lowest + 1 - first_key, 0) // BLOCK_N * BLOCK_N
    for start in range(first_key, plain, BLOCK_N):
        key = start + n
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        loaded = tl.broadcast_to(in_dim, [BLOCK_N, DIM_PADDED])
        k = _load(k_base, block, slot, k_stride_block, k_stride_slot, dim, loaded, DTYPE, FP8)
        v = _load(v_base, block, slot, v_stride_block, v_stride_slot, dim, loaded, DTYPE, FP8)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        largest, total, acc = _online(scores, v, largest, total, acc, PRECISION)
    for start in range(plain, end_key, BLOCK_N):
        key = start + n
        exists = key < end_key
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        loaded = exists[:, None] & in_dim
        k = _load(k_base, block, slot, k_stride_block, k_stride_slot, dim, loaded, DTYPE, FP8)
        v = _load(v_base, block, slot, v_stride_block, v_stride_slot, dim, loaded, DTYPE, FP8)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        largest, total, acc = _online(scores, v, largest, total, acc, PRECISION)

    if FP8:
        acc = acc * tl.load(fp8_scales_ptr + KV_HEADS + kv_head)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    at = (partial + part).to(tl.int64) * HEADS + head
    whole = partial < 0
    tl.store(stats_ptr + at * 2, largest, mask=used & (partial >= 0))
    tl.store(stats_ptr + at * 2 + 1, total, mask=used & (partial >= 0))
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside & (partial >= 0)[:, None])
    out = acc / total[:, None]
    out_offset = (token * HEADS + head) * HEAD_DIM
    tl.store(
        out_ptr + out_offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=inside & whole[:, None]
    )


@triton.jit
def merge_kernel(
    partial_ptr,
    stats_ptr,
    merges_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Join the partials of one row and head, left to right, by their log-sum-exp."""
    merge = merges_ptr + tl.program_id(0) * 3
    head = tl.program_id(1)
    token = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1).to(tl.int64)
    count = tl.load(merge + 2)
    dim = tl.arange(0, DIM_PADDED)
    inside = dim < HEAD_DIM
    # Every row sees a key of every piece: all is finite, and nothing below is inf - inf.
    at = first * HEADS + head
    largest = tl.load(stats_ptr + at * 2)
    total = tl.load(stats_ptr + at * 2 + 1)
    acc = tl.load(partial_ptr + at * HEAD_DIM + dim, mask=inside, other=0.0)
    for i in range(1, count):
        at = (first + i) * HEADS + head
        other = tl.load(stats_ptr + at * 2)
        larger = tl.maximum(largest, other)
        shrink = tl.exp2(largest - larger)
        weight = tl.exp2(other - larger)
        total = total * shrink + tl.load(stats_ptr + at * 2 + 1) * weight
        acc = acc * shrink + tl.load(partial_ptr + at * HEAD_DIM + dim, mask=inside, other=0.0) * weight
        largest = larger
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + dim, out, mask=inside)


LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """An :class:`AttentionPlan` on the device.

    Attributes:
        pieces, rows, merges, tables: int32, flat.
        num_partials, tile_rows: as in the plan.
    """

    pieces: torch.Tensor
    rows: torch.Tensor
    merges: torch.Tensor
    tables: torch.Tensor
    num_partials: int
    tile_rows: int

    @staticmethod
    def add(plan: AttentionPlan, upload: Upload) -> tuple[int, int, int, int]:
        """Put the plan's arrays into an upload; :meth:`take` finds them in what arrived."""
        return (upload.add(plan.pieces), upload.add(plan.rows), upload.add(plan.merges), upload.add(plan.tables))

    @staticmethod
    def take(plan: AttentionPlan, places: tuple[int, int, int, int], sent: list[torch.Tensor]) -> DevicePlan:
        """The device's side of :meth:`add`."""
        pieces, rows, merges, tables = (sent[place] for place in places)
        return DevicePlan(pieces, rows, merges, tables, plan.num_partials, plan.tile_rows)


def wide_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile when several tokens can share one."""
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return 32 if dim_padded <= 64 else 16
    return 64 if dim_padded <= 128 else 32


def tile_shape(
    group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tile_rows: int, *, fp8: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time numbers for a shape.

    With larger tiles than these registers spill, in float32 (no tensor cores) sooner: see
    ``python -m kernels.compile_check --full``.
    """
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    if fp8:
        keys = 32 if dim_padded <= 128 else 16
    elif dtype == torch.float32:
        keys = 32 if dim_padded <= 64 else 16
    else:
        keys = 64 if dim_padded <= 64 else 32
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": dim_padded,
        "BLOCK_M": tile_rows,
        "BLOCK_N": keys,
        "FP8": fp8,
        # Without "ieee" float32 goes through TF32: ten bits of mantissa.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        "DOT_IN_FLOAT32": dtype == torch.bfloat16
        and not isinstance(paged_attention_kernel, triton.runtime.JITFunction),
    }


def num_warps(head_dim: int, dtype: torch.dtype, tile_rows: int, *, fp8: bool = False) -> int:
    """Twice as many where a tile's registers would spill out of four."""
    crowded = head_dim > 128 if dtype == torch.float32 else fp8 and 64 < head_dim <= 128 and tile_rows > 16
    return 8 if crowded else 4


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: DevicePlan,
    scale: float,
    out: torch.Tensor,
    fp8_scales: torch.Tensor | None = None,
) -> None:
    """Causal grouped-query attention of a ragged batch, into ``out``. The layout is that of :mod:`kernels.reference`.

    Args:
        q: [T, num_heads, head_dim], float32, float16 or bfloat16.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last, which is 1;
            float32, float16, bfloat16, or uint8: the bytes of e4m3.
        plan: made for this many query and KV heads.
        scale: multiplies q @ k.
        out: [T, num_heads, head_dim], contiguous; every element is written.
        fp8_scales: [2, num_kv_heads] float32 for a uint8 cache: what the bytes of K and of V are multiplied by.

    Raises:
        ValueError: a tensor is not contiguous where it must be, or the heads do not divide, or fp8 without scales.
    """
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    if any(t.stride(-1) != 1 for t in (q, k_cache, v_cache)) or not out.is_contiguous():
        raise ValueError("out and the last dimension of q and the caches must be contiguous")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
    fp8 = k_cache.dtype == torch.uint8
    if fp8 and fp8_scales is None:
        raise ValueError("a cache of bytes needs fp8_scales")
    if not len(plan.pieces):
        return
    partial = torch.empty(plan.num_partials * heads * dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(plan.num_partials * heads * 2, dtype=torch.float32, device=q.device)
    shape = tile_shape(heads // kv_heads, kv_heads, dim, q.dtype, plan.tile_rows, fp8=fp8)
    paged_attention_kernel[(len(plan.pieces) // PIECE, kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        stats,
        plan.pieces,
        plan.rows,
        plan.tables,
        fp8_scales * FACTOR if fp8_scales is not None else None,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        num_warps=num_warps(dim, q.dtype, plan.tile_rows, fp8=fp8),
        **shape,
    )
    if plan.num_partials:
        merge_kernel[(len(plan.merges) // MERGE, heads)](
            partial,
            stats,
            plan.merges,
            out,
            HEADS=heads,
            HEAD_DIM=dim,
            DIM_PADDED=shape["DIM_PADDED"],
            num_warps=1,
        )
