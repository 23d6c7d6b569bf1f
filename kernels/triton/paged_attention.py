# mypy: disallow-incomplete-defs=False
"""Causal attention over a paged KV cache in Triton: one kernel for prefill chunks, decode and any mix of them.

A program owns one KV head and one tile of BLOCK_Q tokens of one sequence. All query heads that read this KV head stand
in the same tile, so K and V are loaded once for the group (row = token * GROUP + head)::

    GROUP = 3, BLOCK_M = 16, BLOCK_Q = 16 // 3 = 5        rows  t0h0 t0h1 t0h2 t1h0 ... t4h2  (unused)

The tile walks over the keys BLOCK_N at a time, each key's address taken from the block table, so a step may span
several blocks or a part of one. The softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867; Dao et al.,
FlashAttention, arXiv:2205.14135) in float32, in base 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def paged_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    num_seqs,
    scale_log2,
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    # The first tile of sequence s is query_starts[s] // BLOCK_Q + s: it grows with s and leaves room for every tile, so
    # the grid needs nothing but T and S, and the sequence of a tile is found by bisection.
    seq = tl.full((), 0, tl.int32)
    above = num_seqs
    while above - seq > 1:
        middle = (seq + above) // 2
        begins = tl.load(query_starts_ptr + middle) // BLOCK_Q + middle
        seq = tl.where(begins <= tile, middle, seq)
        above = tl.where(begins <= tile, above, middle)
    query_start = tl.load(query_starts_ptr + seq).to(tl.int64)
    query_len = (tl.load(query_starts_ptr + seq + 1) - query_start).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + seq).to(tl.int32)
    first = (tile - (query_start // BLOCK_Q + seq)).to(tl.int32) * BLOCK_Q
    if first >= query_len:
        return

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM_PADDED)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = (row < BLOCK_Q * GROUP) & (token < query_len)
    inside = used[:, None] & (dim < HEAD_DIM)[None, :]
    q_offset = (query_start + token) * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + q_offset[:, None] + dim[None, :], mask=inside, other=0.0)
    if DOT_IN_FLOAT32:
        q = q.to(tl.float32)

    # Position of each row's token; a row that is not used sees a harmless part of the keys and is never stored.
    position = seq_len - query_len + token
    end = seq_len - query_len + tl.minimum(first + BLOCK_Q, query_len)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    table = block_tables_ptr + seq.to(tl.int64) * table_stride
    k_base = k_cache_ptr + kv_head.to(tl.int64) * k_stride_head
    v_base = v_cache_ptr + kv_head.to(tl.int64) * v_stride_head

    for start in range(0, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        exists = key < end
        # Block id x stride in 64 bits. Keys that are not there are loaded as 0: their slots may hold NaN, and
        # 0 * NaN is NaN.
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = (key % BLOCK_SIZE).to(tl.int64)
        loaded = exists[:, None] & (dim < HEAD_DIM)[None, :]
        k_offset = block * k_stride_block + slot * k_stride_slot
        k = tl.load(k_base + k_offset[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        visible = exists[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        # Key 0 is visible to every row, so after the first pass `larger` is finite and nothing below is inf - inf.
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        v_offset = block * v_stride_block + slot * v_stride_slot
        v = tl.load(v_base + v_offset[:, None] + dim[None, :], mask=loaded, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        largest = larger

    out = acc / total[:, None]
    out_offset = (query_start + token) * out_stride_token + head * out_stride_head
    tl.store(out_ptr + out_offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


LOG2_E = 1.4426950408889634


def tile_shape(group: int, head_dim: int, dtype: torch.dtype, max_query_len: int) -> dict[str, Any]:
    """The kernel's compile-time numbers for a shape; ``tl.dot`` wants at least 16 rows.

    Decode needs no more rows than the group has heads. With larger tiles than these registers spill, in float32 (no
    tensor cores) sooner; ``python -m kernels.compile_check --full`` shows it.
    """
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        rows, keys = (32, 32) if dim_padded <= 64 else (32, 16) if dim_padded <= 128 else (16, 16)
    else:
        rows, keys = (64, 64) if dim_padded <= 64 else (64, 32) if dim_padded <= 128 else (32, 32)
    if max_query_len == 1:
        rows = 16
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM_PADDED": dim_padded,
        "BLOCK_M": max(rows, triton.next_power_of_2(group)),
        "BLOCK_N": keys,
        # Without "ieee" float32 goes through TF32: ten bits of mantissa.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        "DOT_IN_FLOAT32": dtype == torch.bfloat16
        and not isinstance(paged_attention_kernel, triton.runtime.JITFunction),
    }


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
) -> None:
    """Causal grouped-query attention of a ragged batch, into ``out``. Shapes as in :mod:`kernels.reference`.

    Args:
        q: [T, num_heads, head_dim], float32, float16 or bfloat16.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last, which is 1.
        block_tables: [S, W] int64 block ids; only the ids that cover ``seq_len`` are read.
        query_starts: [S + 1] int64 first row of each sequence in q, and T; every sequence has at least one row.
        seq_lens: [S] int64 tokens in the cache, those of q among them.
        scale: multiplies q @ k.
        max_query_len: the longest query of the batch.
        out: [T, num_heads, head_dim], every element is written.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous, or the heads do not divide.
    """
    tokens, heads, dim = q.shape
    kv_heads, num_seqs = k_cache.shape[2], seq_lens.shape[0]
    if any(t.stride(-1) != 1 for t in (q, k_cache, v_cache, block_tables, out)):
        raise ValueError("the last dimension of q, the caches, the block tables and out must be contiguous")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
    if num_seqs == 0:
        return
    shape = tile_shape(heads // kv_heads, dim, q.dtype, max_query_len)
    tiles = tokens // (shape["BLOCK_M"] // shape["GROUP"]) + num_seqs
    paged_attention_kernel[(tiles, kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        query_starts,
        seq_lens,
        num_seqs,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        block_tables.stride(0),
        BLOCK_SIZE=k_cache.shape[1],
        **shape,
    )
