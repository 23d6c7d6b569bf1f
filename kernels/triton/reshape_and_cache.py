# mypy: disallow-incomplete-defs=False
"""Write the step's K and V to their slots in the paged cache: one Triton program per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.fp8 import to_e4m3


@triton.jit
def reshape_and_cache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    fp8_scales_ptr,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    k_cache_stride_block,
    k_cache_stride_slot,
    k_cache_stride_head,
    v_cache_stride_block,
    v_cache_stride_slot,
    v_cache_stride_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    # 64 bits: a pool has more than 2**31 elements long before a GPU is full.
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, HEADS_PADDED)[:, None]
    dim = tl.arange(0, DIM_PADDED)[None, :]
    inside = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
    k = tl.load(k_ptr + token * k_stride_token + head * k_stride_head + dim, mask=inside)
    v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + dim, mask=inside)
    k_slot = k_cache_ptr + block * k_cache_stride_block + offset * k_cache_stride_slot
    v_slot = v_cache_ptr + block * v_cache_stride_block + offset * v_cache_stride_slot
    if FP8:
        k_scale = tl.load(fp8_scales_ptr + head, mask=head < NUM_KV_HEADS, other=1.0)
        v_scale = tl.load(fp8_scales_ptr + NUM_KV_HEADS + head, mask=head < NUM_KV_HEADS, other=1.0)
        k = to_e4m3(k.to(tl.float32) / k_scale)
        v = to_e4m3(v.to(tl.float32) / v_scale)
    tl.store(k_slot + head * k_cache_stride_head + dim, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
    tl.store(v_slot + head * v_cache_stride_head + dim, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def tile_shape(num_kv_heads: int, head_dim: int, *, fp8: bool = False) -> dict[str, int]:
    """The kernel's compile-time numbers for a shape: a tile holds one token, padded to powers of two."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEADS_PADDED": triton.next_power_of_2(num_kv_heads),
        "DIM_PADDED": triton.next_power_of_2(head_dim),
        "FP8": fp8,
    }


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    fp8_scales: torch.Tensor | None = None,
) -> None:
    """Write each token's K and V to its slot, in place.

    Args:
        k, v: [T, num_kv_heads, head_dim], float32, float16 or bfloat16.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last, which is 1;
            uint8: the bytes of e4m3 are written, the nearest to K / scale, at most 448.
        slots: [T] int32 or int64 ``block_id * block_size + offset``, or -1: nothing is written for this token.
        fp8_scales: [2, num_kv_heads] float32 for a uint8 cache.

    Raises:
        ValueError: the last dimension of a tensor is not contiguous, or a uint8 cache comes without scales.
    """
    fp8 = k_cache.dtype == torch.uint8
    if fp8 and fp8_scales is None:
        raise ValueError("a cache of bytes needs fp8_scales")
    tokens, kv_heads, dim = k.shape
    if any(t.stride(-1) != 1 for t in (k, v, k_cache, v_cache)):
        raise ValueError("the last dimension of k, v and the caches must be contiguous")
    if tokens == 0:
        return
    reshape_and_cache_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        fp8_scales,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        **tile_shape(kv_heads, dim, fp8=fp8),
    )
